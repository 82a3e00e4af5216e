"""From the bytes of an image file to RGB pixels.

Pillow is the decoder of record: what it makes of a file is what the file shows. JPEGs go through simplejpeg where the
pixels are the same, and in training a JPEG of which much less is needed than it holds is decoded at a half, a quarter
or an eighth of its size, in its own frequency domain.

Images are (C, height, width) uint8 tensors; their memory is (height, width, C), which resizing likes best.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import DataError, TooLargeError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""What is opened at all. Pillow reads many more, among them some that run interpreters."""
MOST_PIXELS_TRAINING, MOST_PIXELS_SERVING = 100_000_000, 40_000_000
LARGE_IMAGE = 16_000_000
"""Pixels from which on images are decoded one at a time: one can take 16 bytes a pixel on its way, and many threads
that decode such at once would take all memory."""
SCALES = (8, 4, 2)
"""By how much a JPEG can be decoded smaller and still fast."""
ORIENTATION = 0x0112
LUMA = (19595, 38470, 7471)
"""Weights of red, green and blue in a grey value, in 65536ths: Pillow's own."""

Box = tuple[int, int, int, int]
"""Top, left, height, width."""


class _Hush:
    """Pillow's remarks on strangers' metadata are not shown while any thread decodes.

    What is shown is the whole process's choice. Were it changed for each image, of two threads at once the one that
    leaves last would put back what the other had set, for good. So the first to enter keeps what there was, and the
    last to leave puts it back.
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


IGNORE_WARNINGS = _Hush()
_LARGE_ONE = threading.Lock()


def decode_image(content: bytes, most_pixels: int = MOST_PIXELS_TRAINING) -> Tensor:
    """(3, height, width): the image as a person sees it, by the decoder of record."""
    return _tensor(np.array(decode_to_pillow(content, most_pixels)))


def decode_to_pillow(content: bytes, most_pixels: int = MOST_PIXELS_TRAINING) -> Image.Image:
    """Upright and RGB; the first frame of an animation. A DataError says what is wrong with a file."""
    with IGNORE_WARNINGS:
        image = open_image(content, most_pixels)
        with _LARGE_ONE if image.height * image.width > LARGE_IMAGE else nullcontext():
            try:
                image.load()
                return to_rgb(turn_upright(image))
            except DataError:
                raise
            except Exception as error:  # a damaged file fails in Pillow in many ways
                raise DataError(f"damaged: {_first_line(error)}") from None


def open_image(content: bytes, most_pixels: int = MOST_PIXELS_TRAINING) -> Image.Image:
    """The header is read, the pixels are not; its size is checked."""
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


def check_size(height: int, width: int, most_pixels: int) -> None:
    """Refuse an image that is larger than allowed, before it is decoded."""
    if height * width > most_pixels:
        raise TooLargeError(f"{width}×{height} pixels, more than the {most_pixels:,} allowed")


def to_rgb(image: Image.Image) -> Image.Image:
    """From any of Pillow's modes. What is transparent lies on white."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        # 16 bits, of which the upper 8 are kept; Pillow's own conversion would clip them.
        return Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8)).convert("RGB")
    if image.mode in ("F", "I"):
        raise DataError("its pixels are numbers without a range, which no one can show")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        above = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("RGB")
    return image.convert("RGB")


def to_channels(image: Tensor, channels: int) -> Tensor:
    """(3 or 1, height, width) → so many channels: grey as Pillow computes it, or grey three times."""
    if image.shape[0] == channels:
        return image
    if image.shape[0] == 1:
        return image.expand(channels, -1, -1)
    if image.shape[0] == 3 and channels == 1:
        weights = torch.tensor(LUMA, dtype=torch.int32)[:, None, None]
        return ((image.int() * weights).sum(dim=0, keepdim=True) + 0x8000 >> 16).to(torch.uint8)
    raise DataError(f"{image.shape[0]} channels, and the model takes {channels}")


def decode_crop(
    content: bytes | Tensor,
    choose_box: Callable[[int, int], Box],
    size: tuple[int, int],
    most_pixels: int = MOST_PIXELS_TRAINING,
) -> Tensor:
    """(C, *size): the part of an image that `choose_box(height, width)` names, resized. For training.

    The box is chosen before anything is decoded, so a JPEG need not be decoded larger than it will be used.
    """
    if isinstance(content, Tensor):
        return _resized_part(content.permute(1, 2, 0).numpy(), choose_box(*content.shape[1:]), size)
    try:
        return _decode_jpeg_crop(content, choose_box, size, most_pixels)
    except _NotSoFastError:
        image = decode_image(content, most_pixels)
        return _resized_part(image.permute(1, 2, 0).numpy(), choose_box(*image.shape[1:]), size)


class _NotSoFastError(Exception):
    """A file that the decoder of record must see."""


def _decode_jpeg_crop(
    content: bytes, choose_box: Callable[[int, int], Box], size: tuple[int, int], most_pixels: int
) -> Tensor:
    if not content.startswith(b"\xff\xd8"):
        raise _NotSoFastError
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError:
        raise _NotSoFastError from None
    check_size(height, width, most_pixels)
    if colours not in ("YCbCr", "Gray", "RGB"):
        raise _NotSoFastError
    turned = _turned(content)
    top, left, box_height, box_width = choose_box(*((width, height) if turned >= 5 else (height, width)))
    ratio = min(box_height / size[0], box_width / size[1])
    scale = next((scale for scale in SCALES if ratio >= scale), 1)
    smaller = {"min_height": -(-height // scale), "min_width": -(-width // scale), "min_factor": scale}
    try:
        pixels = simplejpeg.decode_jpeg(content, **(smaller if scale > 1 else {}))
    except ValueError:  # a warning of libjpeg's, which Pillow may know how to take
        raise _NotSoFastError from None
    box = (top // scale, left // scale, max(box_height // scale, 1), max(box_width // scale, 1))
    return _resized_part(_TURNS[turned](pixels), box, size)


def _turned(content: bytes) -> int:
    """The orientation in a JPEG's metadata, 1 to 8."""
    if not _has_exif(content):
        return 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = Image.open(io.BytesIO(content), formats=("JPEG",)).getexif().get(ORIENTATION, 1)
        except Exception:
            raise _NotSoFastError from None
    return found if found in _TURNS else 1


def _has_exif(content: bytes) -> bool:
    """Whether a segment before the pixels may tell an orientation. Looking through all bytes would take longer."""
    place = 2
    while content[place : place + 1] == b"\xff":
        marker, length = content[place + 1 : place + 2], int.from_bytes(content[place + 2 : place + 4], "big")
        if marker == b"\xe1":  # Exif, or XMP, which can tell it too
            return True
        if marker in (b"\xda", b""):  # the pixels begin
            return False
        place += 1 if marker == b"\xff" else 2 + max(length, 2)  # segments may be filled up with that byte
    return False


_TURNS: dict[int, Callable[[Any], Any]] = {
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: pixels.swapaxes(0, 1)[:, ::-1],
    7: lambda pixels: pixels.swapaxes(0, 1)[::-1, ::-1],
    8: lambda pixels: pixels.swapaxes(0, 1)[::-1],
}
"""What makes an image upright, by its orientation."""


def turn_upright(image: Image.Image) -> Image.Image:
    """Turned as its metadata says."""
    try:
        return image if image.getexif().get(ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)
    except Exception:  # metadata that cannot be read turns nothing
        return image


def _resized_part(pixels: Any, box: Box, size: tuple[int, int]) -> Tensor:
    """A box of (height, width, C) pixels → (C, *size), with antialias."""
    top, left, height, width = box
    part = _tensor(np.ascontiguousarray(pixels[top : top + height, left : left + width]))
    if tuple(part.shape[1:]) == size:
        return part
    return F.interpolate(part[None], size=size, mode="bilinear", antialias=True)[0]


def _tensor(pixels: Any) -> Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
