"""Turn an image into a model's input, as the preprocessing that is stored with the weights says.

Shapes: C channels, height × width pixels.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.config import Preprocessing
from vitrail.data.sources.source import read_image
from vitrail.data.transforms.decode import decode_image, to_channels
from vitrail.errors import InputError

Whole = TypeVar("Whole", int, Tensor)
MAX_ASPECT_RATIO = 16
"""The ends of a longer image are cut off before it is resized."""


def prepare(image: Any, preprocessing: Preprocessing) -> Tensor:
    """Decode, resize, crop and normalise one image for a model.

    Args:
        image: a path, the bytes of a file, a Pillow image, or (C, height, width) uint8 pixels.
        preprocessing: `model.preprocessing`.

    Returns:
        (C, height, width) float32, normalised by the model's mean and deviation.

    Raises:
        DataError: the image cannot be read or decoded.
    """
    content = read_image(image)
    pixels = content if isinstance(content, Tensor) else decode_image(content)
    pixels = to_channels(pixels, len(preprocessing.mean))
    return normalise(resize_and_crop(pixels, preprocessing), preprocessing)


def resize_and_crop(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Resize and crop (C, height, width) uint8 pixels of any size to the image size of the model."""
    target = preprocessing.resized
    if preprocessing.resize == "cover":
        pixels = _cut_ends(pixels)
        target = _covering_size(pixels.shape[1], pixels.shape[2], *target)
    if target != pixels.shape[1:]:
        pixels = F.interpolate(pixels[None], size=target, mode=preprocessing.interpolation, antialias=True)[0]
    height, width = preprocessing.image_size
    top, left = (halve_margin(margin, preprocessing) for margin in (pixels.shape[1] - height, pixels.shape[2] - width))
    return pixels[:, top : top + height, left : left + width]


def halve_margin(margin: Whole, preprocessing: Preprocessing) -> Whole:
    """Return the part of a margin, in whole pixels, that lies above or left of the crop."""
    half = margin // 2
    if preprocessing.crop_rounding == "even":
        return half + margin % 2 * (half % 2)
    return half


def normalise(pixels: Tensor, preprocessing: Preprocessing, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normalise (…, C, height, width) uint8 pixels, on any device, by the model's mean and deviation.

    Raises:
        InputError: the pixels are not uint8 or have another number of channels.
    """
    channels = len(preprocessing.mean)
    if pixels.dtype != torch.uint8 or pixels.ndim < 3 or pixels.shape[-3] != channels:
        raise InputError(
            f"normalise takes uint8 images of shape (…, {channels}, height, width), "
            f"not {pixels.dtype} of {tuple(pixels.shape)}"
        )
    mean = torch.tensor(preprocessing.mean, device=pixels.device)[:, None, None]
    std = torch.tensor(preprocessing.std, device=pixels.device)[:, None, None]
    return ((pixels.float() / 255 - mean) / std).to(dtype)


def _cut_ends(pixels: Tensor) -> Tensor:
    """Keep the middle of a very long image: the crop uses no more, and the whole might not fit into memory."""
    height, width = pixels.shape[1:]
    kept_height, kept_width = min(height, MAX_ASPECT_RATIO * width), min(width, MAX_ASPECT_RATIO * height)
    top, left = (height - kept_height) // 2, (width - kept_width) // 2
    return pixels[:, top : top + kept_height, left : left + kept_width]


def _covering_size(height: int, width: int, least_height: int, least_width: int) -> tuple[int, int]:
    """Return the smallest covering size of the same shape; the long side is rounded down, as in torchvision."""
    if least_height * width >= least_width * height:
        return least_height, max(least_height * width // height, least_width)
    return max(least_width * height // width, least_height), least_width
