"""How much of a map falls on the object of an image, by a mask of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.sources.source import Source, read_file
from vitrail.data.transforms.decode import decode_image
from vitrail.errors import DataError
from vitrail.studies.study_data import StudyData, cut_square

Array = NDArray[np.float64]
SPREAD = 0.25
"""Standard deviation of the centre prior, in sides of the image."""
OBJECT, BACKGROUND = 1, 2
"""Values of a trimap, as Oxford-IIIT Pets has them; pixels with other values belong to neither."""


def make_centre_prior(grid: tuple[int, int], count: int) -> Array:
    """Return `count` equal maps, (count, rows, columns), that are brightest in the middle of the image."""
    rows, columns = ((np.arange(side) + 0.5) / side - 0.5 for side in grid)
    prior = np.exp(-(rows[:, None] ** 2 + columns[None] ** 2) / (2 * SPREAD**2))
    return np.repeat(prior[None], count, axis=0)


def measure_object_share(maps: Array, masks: Array) -> float:
    """Return the mean share of a map that falls on the object, of what falls on object and background.

    Args:
        maps: (N, rows, columns), not negative.
        masks: (N, 2, rows, columns), how much of a patch is object and how much background. Images without an object
            or without background are left out.
    """
    on_object, on_background = ((maps * masks[:, part]).sum(axis=(1, 2)) for part in (0, 1))
    counts = (masks.sum(axis=(2, 3)) > 0).all(axis=1)
    return float((on_object[counts] / (on_object + on_background)[counts]).mean())


def read_object_masks(data: StudyData, images: Source, grid: tuple[int, int], kept_size: int | None) -> Array:
    """Return how much of each patch is object and how much background, (N, 2, rows, columns), both in 0…1.

    The masks are trimaps beside the images; without them the images are bright objects on black ground.

    Raises:
        DataError: An image has no mask.
    """
    masks = []
    for index in range(len(images)):
        if data.masks is None:
            content = images.read(index).content
            pixels = content if isinstance(content, Tensor) else decode_image(content)
            is_object = pixels.float().mean(dim=0) > 127
            both = torch.stack([is_object, ~is_object])
        else:
            path = data.masks / f"{Path(images.name(index)).stem}.png"
            if not path.is_file():
                raise DataError(f"{path} does not exist: every image of the test part needs a mask with its name")
            trimap = decode_image(read_file(path))[:1]
            trimap = trimap if kept_size is None else cut_square(trimap, kept_size, "nearest")
            both = torch.cat([trimap == OBJECT, trimap == BACKGROUND])
        masks.append(F.adaptive_avg_pool2d(both.float(), grid))
    return torch.stack(masks).double().numpy()
