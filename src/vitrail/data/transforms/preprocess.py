"""Turn an image into a model's input, as the preprocessing that is stored with the weights says.

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
    return _crop_centre(pixels, *preprocessing.image_size)


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
    return _crop_centre(pixels, min(height, MAX_ASPECT_RATIO * width), min(width, MAX_ASPECT_RATIO * height))


def _covering_size(height: int, width: int, least_height: int, least_width: int) -> tuple[int, int]:
    """Return the smallest covering size of the same shape; the long side is rounded down, as in torchvision."""
    if least_height * width >= least_width * height:
        return least_height, max(least_height * width // height, least_width)
    return max(least_width * height // width, least_height), least_width


def _crop_centre(pixels: Tensor, height: int, width: int) -> Tensor:
    """Crop the centre; of an odd margin the smaller half is above and left, as in Google's code and transformers."""
    top, left = (pixels.shape[1] - height) // 2, (pixels.shape[2] - width) // 2
    return pixels[:, top : top + height, left : left + width]
