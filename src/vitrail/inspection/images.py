"""Read the images of a report one at a time, and fit them to models.

Shapes: B images, C channels, height × width pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.transforms.decode import to_channels
from vitrail.data.transforms.preprocess import normalise
from vitrail.errors import DataError, NotApplicableError
from vitrail.inference.prepare import fit_pixels
from vitrail.inspection.findings import Absent
from vitrail.inspection.image_choice import ImageChoice, Images, choose_images, choose_photographs
from vitrail.model.base import ImageModel
from vitrail.system.events import Progress
from vitrail.tasks.task import Task

MOST, SHOWN = 128, 8
"""The number of images to measure on, as in the paper, and how many of them are shown."""
MOST_PIXELS = 400_000
"""Larger images are made smaller if they are not fitted to a model, because many would fill the memory."""


@dataclass(frozen=True)
class InspectionImages:
    """Images that were read, and where they come from."""

    shown: list[tuple[str, Tensor]]
    """Name and pixels of each shown image, (C, height, width) uint8."""
    measured: list[Tensor]
    """Pixels of each measured image."""
    shown_from: str
    """The shown images in words: "8 of the 1,000 images of photos"."""
    measured_on: str
    broken: tuple[str, ...]
    """Names of images that could not be read, each with the reason."""


def fit_images(
    choice: ImageChoice,
    models: Sequence[ImageModel],
    most: int = MOST,
    show: int = SHOWN,
    progress: Progress | None = None,
) -> list[InspectionImages | Absent]:
    """Read images, evenly spread, and fit each to every model as `vitrail.Predictor` does.

    Only the fitted pixels are kept, (C, height, width) uint8 of each model's size.

    Args:
        choice: the images to choose from.
        models: each takes the images in its own size and number of channels.
        most: at most so many images are measured on.
        show: at most so many of these are shown, with the first.
        progress: called with the number of images that are read, and of all that will be.

    Returns:
        For each model its images; or why there are none, if they do not have the model's number of channels.

    Raises:
        DataError: if none of the images can be read.
    """
    found: list[InspectionImages | Absent] = []
    picked = _read_images(choice, [partial(_fit_for, model) for model in models], most, progress)
    shown = None if choice.shown is None else _read_images(choice.shown, [partial(_fit_for, m) for m in models], show)
    for number, model in enumerate(models):
        try:
            own = None if shown is None else shown[number]
            found.append(_collect_images(choice, picked[number], own, model.in_channels, show))
        except NotApplicableError as error:  # such as five channels: much can be measured without images
            found.append(Absent(str(error)))
    return found


def pick_from_folder(
    place: Images,
    channels: int,
    most: int = MOST,
    show: int = SHOWN,
    pixels: int = MOST_PIXELS,
    task: Task | None = None,
) -> InspectionImages:
    """Pick images as `choose_images` and `fit_images` do, but keep them as they are, for no model in particular.

    Args:
        place: a folder, a file, a data set or a list of images.
        channels: the number of channels that the model takes.
        most: at most so many images are measured on, evenly spread.
        show: at most so many of these are shown, evenly spread and with the first.
        pixels: larger images are made smaller to about so many pixels.
        task: of the model that looks at them, which a table is read by.

    Raises:
        DataError: if there are no images that can be read.
        NotApplicableError: if the images do not have the model's number of channels.
    """
    return _pick_pixels(choose_images(place, task), channels, most, show, pixels)


def pick_photographs(channels: int, most: int = MOST) -> InspectionImages:
    """Pick the photographs of `choose_photographs`, and crops of them to measure on, for no model in particular."""
    return _pick_pixels(choose_photographs(), channels, most, SHOWN, MOST_PIXELS)


def prepare_batch(pixels: Sequence[Tensor], model: ImageModel) -> Tensor:
    """Turn uint8 pixels of any sizes into input for the model, (B, C, height, width), on its device."""
    return normalise_batch([fit_pixels(each, model.preprocessing) for each in pixels], model)


def normalise_batch(fitted: Sequence[Tensor], model: ImageModel) -> Tensor:
    """Turn uint8 pixels of the model's size into its input, (B, C, height, width), on its device."""
    like, preprocessing = next(model.parameters()), model.preprocessing
    images = like.new_empty(len(fitted), model.in_channels, *preprocessing.image_size)
    for place, each in zip(images, fitted, strict=True):  # one by one: all at once would take three times the memory
        place.copy_(normalise(each, preprocessing, like.dtype))
    return images


def render_input(fitted: Tensor) -> NDArray[np.uint8]:
    """Return what a model sees, before it is normalised: (C, height, width) → (height, width, 1 or 3) uint8.

    Of two channels the first is taken, of more than three the first three.
    """
    image = fitted[: 3 if len(fitted) >= 3 else 1]
    return np.ascontiguousarray(image.permute(1, 2, 0).numpy())


def spread_evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers 0, 1, …, count − 1, evenly spread and with the first."""
    return [number * count // most for number in range(most)] if count > most else list(range(count))


@dataclass(frozen=True)
class _ReadImages:
    """Names and pixels of images, and the names of broken ones with the reasons."""

    images: list[tuple[str, Tensor]]
    broken: list[str]


def _read_images(
    choice: ImageChoice, fits: Sequence[Callable[[Tensor], Tensor]], most: int, progress: Progress | None = None
) -> list[_ReadImages]:
    """Read every image once and return what each of `fits` makes of the images."""
    results = [_ReadImages([], []) for _ in fits]
    chosen = spread_evenly(choice.count, most)
    for done, index in enumerate(chosen, start=1):
        try:
            name, pixels = choice.read(index)
        except DataError as error:
            for result in results:
                result.broken.append(f"{choice.name_image(index)}: {error}")
        else:
            for fit, result in zip(fits, results, strict=True):
                try:
                    result.images.append((name, fit(pixels)))
                except DataError as error:  # another number of channels
                    result.broken.append(f"{choice.name_image(index)}: {error}")
        if progress is not None:
            progress(done, len(chosen))
    return results


def _collect_images(
    choice: ImageChoice, picked: _ReadImages, shown: _ReadImages | None, channels: int, show: int
) -> InspectionImages:
    """Join what was read of a choice; raise a DataError or a NotApplicableError if nothing could be."""
    if not picked.images and channels not in (1, 3):
        raise NotApplicableError(
            f"image files have one channel or three, but this model takes {channels}: give data with pixels of "
            f"{channels} channels"
        )
    if not picked.images:
        example = f"; the first, {picked.broken[0]}" if picked.broken else ""
        raise DataError(f"none of {choice.describe(choice.count)} can be read{example}: give other images")
    if choice.shown is None or shown is None:
        shown_ones = [picked.images[place] for place in spread_evenly(len(picked.images), show)]
    else:
        shown_ones = shown.images
    return InspectionImages(
        shown=shown_ones,
        measured=[image for _, image in picked.images],
        shown_from=(choice.shown or choice).describe(len(shown_ones)),
        measured_on=choice.describe(len(picked.images)),
        broken=tuple(picked.broken),
    )


def _pick_pixels(choice: ImageChoice, channels: int, most: int, show: int, pixels: int) -> InspectionImages:
    keep = partial(_shrink, channels=channels, pixels=pixels)
    (picked,) = _read_images(choice, [keep], most)
    shown = None if choice.shown is None else _read_images(choice.shown, [keep], show)[0]
    return _collect_images(choice, picked, shown, channels, show)


def _fit_for(model: ImageModel, pixels: Tensor) -> Tensor:
    # A copy, because the crop is a view that would keep the whole image in memory.
    return fit_pixels(pixels, model.preprocessing).clone(memory_format=torch.contiguous_format)


def _shrink(image: Tensor, channels: int, pixels: int) -> Tensor:
    image = to_channels(image, channels)
    height, width = image.shape[1:]
    scale = (pixels / (height * width)) ** 0.5
    if scale >= 1:
        return image
    size = [max(int(side * scale), 1) for side in (height, width)]
    return F.interpolate(image[None], size=size, mode="bilinear", antialias=True)[0]
