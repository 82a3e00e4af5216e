"""Decode image files to RGB pixels: `decode_image` for any use, `decode_crop` for training.

Pillow is the reference decoder: the pixels it gives are the right ones. Training decodes only the crop of a JPEG
(jpeg.py), and at a half, a quarter or an eighth of its size (in the frequency domain) if no more is needed.

Images are (C, height, width) uint8 tensors; their memory order is (height, width, C), which is fastest to resize.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.transforms.jpeg import Box, decode_rectangle
from vitrail.errors import DataError, TooLargeError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""The formats that are read. Pillow knows many more, and some of them run interpreters."""
EXTENSIONS = dict(
    zip(FORMATS, (("jpg", "jpeg"), ("png",), ("webp",), ("gif",), ("bmp",), ("tif", "tiff"), ("ppm",)), strict=True)
)
"""File name endings of each format, the usual one first."""
MOST_PIXELS_TRAINING, MOST_PIXELS_SERVING = 100_000_000, 40_000_000
"""An image with more pixels raises a TooLargeError."""
LARGE_IMAGE = 16_000_000
"""Images with more pixels are decoded one at a time: decoding can take 16 bytes per pixel, and many threads at once
would use up the memory."""
STRIP_PIXELS = 1_000_000
"""Images are converted in strips of about so many pixels: whole copies would take several times their memory."""
SCALES = (8, 4, 2)
"""The factors by which a JPEG can be decoded smaller."""
ORIENTATION = 0x0112
LUMA = (19595, 38470, 7471)
"""Weights of red, green and blue in a grey value, in 65536ths, as in Pillow."""


class _IgnoredWarnings:
    """A context in which Pillow's warnings about metadata are ignored, for use by many threads at once.

    Warning filters belong to the whole process, so two threads that set and restore them would disturb each other.
    Here the first thread to enter saves the filters, and the last to leave restores them.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._before.close()


IGNORE_WARNINGS = _IgnoredWarnings()
_LARGE_IMAGE_LOCK = threading.Lock()


def decode_image(content: bytes, most_pixels: int = MOST_PIXELS_TRAINING) -> Tensor:
    """Decode an image file to (3, height, width) uint8 pixels, upright, as a person sees it.

    Raises:
        DataError: the file is empty, damaged or of an unknown format.
        TooLargeError: the image has more than `most_pixels` pixels.
    """
    return _to_tensor(np.array(decode_to_pillow(content, most_pixels)))


def decode_to_pillow(content: bytes, most_pixels: int = MOST_PIXELS_TRAINING) -> Image.Image:
    """Decode an image file to an upright RGB image of Pillow; the first frame of an animation.

    Raises as `decode_image` does.
    """
    with IGNORE_WARNINGS:
        image = open_image(content, most_pixels)
        with _LARGE_IMAGE_LOCK if image.height * image.width > LARGE_IMAGE else nullcontext():
            try:
                image.load()
                return to_rgb(turn_upright(image))
            except DataError:
                raise
            except Exception as error:  # Pillow raises many kinds of errors for damaged files
                raise DataError(f"damaged: {_first_line(error)}") from None


def open_image(content: bytes, most_pixels: int = MOST_PIXELS_TRAINING) -> Image.Image:
    """Open an image file and check its size; only the header is read."""
    if not content:
        raise DataError("empty")
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError:
        raise TooLargeError(f"more than {min(most_pixels, 2 * (Image.MAX_IMAGE_PIXELS or 0)):,} pixels") from None
    except Exception as error:
        unknown = isinstance(error, UnidentifiedImageError)
        raise DataError("not an image of a known kind" if unknown else f"damaged: {_first_line(error)}") from None
    check_size(image.height, image.width, most_pixels)
    return image


def read_format(content: bytes) -> tuple[str, str]:
    """Return one of `FORMATS` and Pillow's mode, from the header of an image file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about large images
        image = open_image(content)
    return "JPEG" if image.format == "MPO" else str(image.format), image.mode


def check_size(height: int, width: int, most_pixels: int) -> None:
    """Raise a TooLargeError for an image with more than `most_pixels` pixels."""
    if height * width > most_pixels:
        raise TooLargeError(f"{width}×{height} pixels, more than the {most_pixels:,} allowed")


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to RGB; transparent parts are placed on white."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        # Keep the upper 8 of 16 bits; Pillow's own conversion would clip.
        return Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8)).convert("RGB")
    if image.mode in ("F", "I"):
        raise DataError("its pixels are numbers without a range, so their brightness is unknown")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        result = Image.new("RGB", image.size)
        rows = max(STRIP_PIXELS // image.width, 1)
        for top in range(0, image.height, rows):
            above = image.crop((0, top, image.width, min(top + rows, image.height))).convert("RGBA")
            result.paste(Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("RGB"), (0, top))
        return result
    return image.convert("RGB")


def to_channels(image: Tensor, channels: int) -> Tensor:
    """Convert (3 or 1, height, width) pixels to 1 or 3 channels; grey is computed as in Pillow."""
    if image.shape[0] == channels:
        return image
    if image.shape[0] == 1:
        return image.expand(channels, -1, -1)
    if image.shape[0] == 3 and channels == 1:
        grey = torch.empty((1, *image.shape[1:]), dtype=torch.uint8)
        strips = zip(image.flatten(1).split(STRIP_PIXELS, dim=1), grey.flatten().split(STRIP_PIXELS), strict=True)
        for colours, result in strips:
            red, green, blue = colours.int()
            result.copy_(red * LUMA[0] + green * LUMA[1] + blue * LUMA[2] + 0x8000 >> 16)
        return grey
    raise DataError(f"{image.shape[0]} channels, and the model takes {channels}")


def decode_crop(
    content: bytes | Tensor,
    choose_box: Callable[[int, int], Box],
    size: tuple[int, int],
    most_pixels: int = MOST_PIXELS_TRAINING,
) -> Tensor:
    """Decode a part of an image and resize it to (C, *size) uint8, for training.

    The box is chosen before decoding, so a JPEG is decoded no larger than needed.

    Args:
        content: the bytes of an image file, or (C, height, width) uint8 pixels.
        choose_box: returns (top, left, height, width) of the part, given the image's height and width.
        size: height and width of the result.
        most_pixels: larger images raise a TooLargeError.
    """
    if isinstance(content, Tensor):
        return _resize_part(content.permute(1, 2, 0).numpy(), choose_box(*content.shape[1:]), size)
    try:
        return _decode_jpeg_crop(content, choose_box, size, most_pixels)
    except _NeedsPillowError:
        image = decode_image(content, most_pixels)
        return _resize_part(image.permute(1, 2, 0).numpy(), choose_box(*image.shape[1:]), size)


class _NeedsPillowError(Exception):
    """The file must be decoded by Pillow."""


def _decode_jpeg_crop(
    content: bytes, choose_box: Callable[[int, int], Box], size: tuple[int, int], most_pixels: int
) -> Tensor:
    if not content.startswith(b"\xff\xd8"):
        raise _NeedsPillowError
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError:
        raise _NeedsPillowError from None
    check_size(height, width, most_pixels)
    if colours not in ("YCbCr", "Gray", "RGB"):
        raise _NeedsPillowError
    turn = _TURNS[_read_orientation(content)]
    upright = (width, height) if turn.swap else (height, width)
    box = choose_box(*upright)
    ratio = min(box[2] / size[0], box[3] / size[1])
    scale = next((scale for scale in SCALES if ratio >= scale), 1)
    top, left, box_height, box_width = (number // scale for number in box)
    smaller = -(-upright[0] // scale), -(-upright[1] // scale)
    try:
        stored = turn.find_box((top, left, box_height, box_width), *smaller)
        pixels = decode_rectangle(content, (height, width), scale, stored)
    except ValueError:  # libjpeg warns; Pillow may be able to decode it
        raise _NeedsPillowError from None
    return _resize_part(turn.apply(pixels), (0, 0, box_height, box_width), size)


def _read_orientation(content: bytes) -> int:
    """Return the orientation in a JPEG's metadata, 1 to 8."""
    if not _has_exif(content):
        return 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = Image.open(io.BytesIO(content), formats=("JPEG",)).getexif().get(ORIENTATION, 1)
        except Exception:
            raise _NeedsPillowError from None
    return value if value in _TURNS else 1


def _has_exif(content: bytes) -> bool:
    """Tell whether a segment before the pixels may hold an orientation; searching all bytes would take longer."""
    place = 2
    while content[place : place + 1] == b"\xff":
        marker, length = content[place + 1 : place + 2], int.from_bytes(content[place + 2 : place + 4], "big")
        if marker == b"\xe1":  # Exif or XMP
            return True
        if marker in (b"\xda", b""):  # the pixels begin
            return False
        place += 1 if marker == b"\xff" else 2 + max(length, 2)  # padding between segments
    return False


class _Turn(NamedTuple):
    """How an image is turned upright: rows and columns are swapped, then their order is reversed."""

    swap: bool
    reverse_rows: bool
    reverse_columns: bool

    def apply(self, pixels: Any) -> Any:
        """Turn (height, width, C) pixels."""
        turned = pixels.swapaxes(0, 1) if self.swap else pixels
        return turned[:: -1 if self.reverse_rows else 1, :: -1 if self.reverse_columns else 1]

    def find_box(self, box: Box, height: int, width: int) -> Box:
        """Return where a part of the upright image, which has this height and width, is stored."""
        top, left, box_height, box_width = box
        if self.reverse_rows:
            top = height - top - box_height
        if self.reverse_columns:
            left = width - left - box_width
        return (left, top, box_width, box_height) if self.swap else (top, left, box_height, box_width)


_TURNS = {
    1: _Turn(swap=False, reverse_rows=False, reverse_columns=False),
    2: _Turn(swap=False, reverse_rows=False, reverse_columns=True),
    3: _Turn(swap=False, reverse_rows=True, reverse_columns=True),
    4: _Turn(swap=False, reverse_rows=True, reverse_columns=False),
    5: _Turn(swap=True, reverse_rows=False, reverse_columns=False),
    6: _Turn(swap=True, reverse_rows=False, reverse_columns=True),
    7: _Turn(swap=True, reverse_rows=True, reverse_columns=True),
    8: _Turn(swap=True, reverse_rows=True, reverse_columns=False),
}
"""How to turn an image upright, by orientation."""


def turn_upright(image: Image.Image) -> Image.Image:
    """Turn an image as its metadata says."""
    try:
        return image if image.getexif().get(ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)
    except Exception:  # unreadable metadata is ignored
        return image


def _resize_part(pixels: Any, box: Box, size: tuple[int, int]) -> Tensor:
    """Resize a box of (height, width, C) pixels to (C, *size), with antialias."""
    top, left, height, width = box
    part = _to_tensor(np.ascontiguousarray(pixels[top : top + height, left : left + width]))
    if tuple(part.shape[1:]) == size:
        return part
    return F.interpolate(part[None], size=size, mode="bilinear", antialias=True)[0]


def _to_tensor(pixels: Any) -> Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
