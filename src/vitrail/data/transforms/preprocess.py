"""How an image becomes a model's input when it is evaluated: exactly what travels with the weights.

Shapes: C channels, height × width pixels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.config import Preprocessing
from vitrail.data.sources.source import read_image
from vitrail.data.transforms.decode import decode_image, to_channels
from vitrail.errors import InputError

MAX_ASPECT_RATIO = 16
"""Of a long image's sides; beyond, its ends are left out before it is resized."""


def prepare(image: Any, preprocessing: Preprocessing) -> Tensor:
    """An image → (C, height, width) float32, normalised.

    `image`: a path, the bytes of a file, a Pillow image, or (C, height, width) uint8 pixels.
    """
    content = read_image(image)
    pixels = content if isinstance(content, Tensor) else decode_image(content)
    pixels = to_channels(pixels, len(preprocessing.mean))
    return normalise(resize_and_crop(pixels, preprocessing), preprocessing)


def resize_and_crop(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """(C, height, width) uint8 of any size → resized and cropped to the size that the model sees."""
    target = preprocessing.resized
    if preprocessing.resize == "cover":
        pixels = _without_far_ends(pixels)
        target = _covering(pixels.shape[1], pixels.shape[2], *target)
    if target != pixels.shape[1:]:
        pixels = F.interpolate(pixels[None], size=target, mode=preprocessing.interpolation, antialias=True)[0]
    return _centre(pixels, *preprocessing.image_size)


def normalise(pixels: Tensor, preprocessing: Preprocessing, dtype: torch.dtype = torch.float32) -> Tensor:
    """(…, C, height, width) uint8, on any device → `dtype`, by the mean and deviation that travel with the weights."""
    channels = len(preprocessing.mean)
    if pixels.dtype != torch.uint8 or pixels.ndim < 3 or pixels.shape[-3] != channels:
        raise InputError(
            f"normalise takes uint8 images of shape (…, {channels}, height, width), "
            f"not {pixels.dtype} of {tuple(pixels.shape)}"
        )
    mean = torch.tensor(preprocessing.mean, device=pixels.device)[:, None, None]
    std = torch.tensor(preprocessing.std, device=pixels.device)[:, None, None]
    return ((pixels.float() / 255 - mean) / std).to(dtype)


def _without_far_ends(pixels: Tensor) -> Tensor:
    """The middle of a very long image: the crop sees no more, and resized whole it might not fit into memory."""
    height, width = pixels.shape[1:]
    return _centre(pixels, min(height, MAX_ASPECT_RATIO * width), min(width, MAX_ASPECT_RATIO * height))


def _covering(height: int, width: int, least_height: int, least_width: int) -> tuple[int, int]:
    """The smallest size of the same shape that covers another; the long side is rounded down, as torchvision does."""
    if least_height * width >= least_width * height:
        return least_height, max(least_height * width // height, least_width)
    return max(least_width * height // width, least_height), least_width


def _centre(pixels: Tensor, height: int, width: int) -> Tensor:
    """Where the margin is odd, the smaller half is above and left, as in Google's code and transformers."""
    top, left = (pixels.shape[1] - height) // 2, (pixels.shape[2] - width) // 2
    return pixels[:, top : top + height, left : left + width]
