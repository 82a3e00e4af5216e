"""Prepare an image for a model: read it in any common form, decode it, and fit it to the model's size."""

from __future__ import annotations

import os
import threading
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.config import Preprocessing
from vitrail.data.sources.source import make_printable, read_image
from vitrail.data.transforms.decode import IGNORE_WARNINGS, MOST_PIXELS_TRAINING, check_size, decode_image, to_channels
from vitrail.data.transforms.preprocess import resize_and_crop
from vitrail.errors import DataError, InputError, VitrailError

ALLOWED = (
    "a path, the bytes of a file, a Pillow image, a uint8 NumPy array (height, width[, channels]) or a uint8 tensor "
    "(channels, height, width)"
)


OneImage = str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image | NDArray[Any] | Tensor


def fit_image(image: OneImage, preprocessing: Preprocessing, most_pixels: int = MOST_PIXELS_TRAINING) -> Tensor:
    """Return an image as a model takes it, before it is normalised: (C, height, width) uint8.

    Args:
        image: a path, the bytes of a file, a Pillow image, an array or a tensor.
        preprocessing: the model's own.
        most_pixels: images with more pixels are refused before they are decoded.

    Raises:
        DataError: the image cannot be read or decoded.
        InputError: an array or a tensor is no image that the model can take.
    """
    with IGNORE_WARNINGS:
        return fit_pixels(read_pixels(image, len(preprocessing.mean), most_pixels), preprocessing)


def fit_pixels(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Resize and crop decoded pixels, (1, 3 or C, any height, any width) uint8, to a model's size and channels."""
    return resize_and_crop(to_channels(pixels, len(preprocessing.mean)), preprocessing)


def read_pixels(image: OneImage, channels: int, most_pixels: int = MOST_PIXELS_TRAINING) -> Tensor:
    """Decode an image: (1, 3 or `channels`, height, width) uint8, at its full size."""
    if isinstance(image, Image.Image):
        return _read_pillow(image, most_pixels)
    if isinstance(image, np.ndarray | Tensor):
        _check_pixels(image, channels)
    elif not is_one_image(image):
        raise InputError(f"a {name_kind(image)} is no image: give {ALLOWED}")
    content = read_image(bytes(image) if isinstance(image, bytearray | memoryview) else image)
    return content.cpu() if isinstance(content, Tensor) else decode_image(content, most_pixels)


def is_one_image(images: object) -> TypeGuard[OneImage]:
    """Return whether the argument is a single image, not a collection of images."""
    return isinstance(images, str | os.PathLike | bytes | bytearray | memoryview | Image.Image | np.ndarray | Tensor)


def _check_pixels(image: NDArray[Any] | Tensor, channels: int) -> None:
    """Raise an InputError if an array or a tensor is not an image that a model with so many channels can take."""
    is_tensor = isinstance(image, Tensor)
    shape = tuple(image.shape)
    if image.dtype != (torch.uint8 if is_tensor else np.uint8) or len(shape) not in (2, 3) or 0 in shape:
        several = "; several images go in a list" if len(shape) == 4 else ""
        raise InputError(f"{image.dtype} of shape {shape} is no image: give {ALLOWED}{several}")
    own = 1 if len(shape) == 2 else shape[0 if is_tensor else 2]
    if own not in (1, 3, channels) or (own == 3 and channels not in (1, 3)):
        place = "first in a tensor" if is_tensor else "last in a NumPy array"
        raise InputError(f"shape {shape} has {own} channels (they come {place}), but the model takes {channels}")


_LOADING = [threading.Lock() for _ in range(64)]
"""Pillow reads a file when its pixels are first needed. Two threads must not trigger that at once."""


def _read_pillow(image: Image.Image, most_pixels: int) -> Tensor:
    check_size(image.height, image.width, most_pixels)
    try:
        with _LOADING[id(image) // 16 % len(_LOADING)]:
            image.load()
        content = read_image(image)
    except VitrailError:
        raise
    except Exception as error:  # Pillow fails in many ways on a damaged file
        raise DataError(f"damaged: {(str(error).strip().splitlines() or [name_kind(error)])[0]}") from None
    assert isinstance(content, Tensor)
    return content


def describe_image(image: object) -> str:
    """Return the path of an image on one line, or the kind of any other image: "a tensor", …"""
    if isinstance(image, str | os.PathLike):
        return make_printable(image)
    kinds = {np.ndarray: "a NumPy array", Tensor: "a tensor", Image.Image: "a Pillow image"}
    return next((name for kind, name in kinds.items() if isinstance(image, kind)), f"a {name_kind(image)}")


def name_kind(value: object) -> str:
    """Return the name of a value's type, for messages."""
    return type(value).__name__
