"""Decode an uploaded image into the pixels that a model sees."""

from __future__ import annotations

import logging

from torch import Tensor

from vitrail.config import Preprocessing
from vitrail.data.transforms.decode import MOST_PIXELS_SERVING, decode_image
from vitrail.data.transforms.preprocess import MAX_ASPECT_RATIO
from vitrail.errors import DataError, TooLargeError
from vitrail.inference.prepare import fit_pixels
from vitrail.serving.http_errors import HttpError
from vitrail.serving.image_header import count_pixels

log = logging.getLogger("vitrail")

SECONDS_PER_IMAGE, SECONDS_PER_PIXEL = 0.0005, 1e-8
"""About what one core takes to decode and resize; the server measures how far its own images are from that."""

Box = tuple[float, float, float, float]
"""Left, top, width and height, as fractions of the upright image."""


def decode_upload(
    content: bytes, preprocessing: Preprocessing, most_pixels: int = MOST_PIXELS_SERVING
) -> tuple[Tensor, Box]:
    """Decode an image file and resize it as the model's preprocessing says.

    Returns:
        (C, height, width) uint8 pixels of the model's size, and the part of the image that they show.

    Raises:
        HttpError: 400 if the image cannot be read, 413 if it has more than `most_pixels` pixels.
    """
    try:
        image = decode_image(content, most_pixels)
        box = find_visible_box(image.shape[1], image.shape[2], preprocessing)
        return fit_pixels(image, preprocessing).contiguous(), box
    except TooLargeError as error:
        raise HttpError(413, f"the image is too large: {error}", "too_many_pixels") from None
    except DataError as error:
        raise HttpError(400, f"the image cannot be read: {error}", "bad_image") from None
    except Exception as error:  # any bytes can arrive here, and so any error
        log.warning("an image could not be prepared", exc_info=True)
        raise HttpError(400, f"the image cannot be read: {type(error).__name__}", "bad_image") from None


def expect_decoding_seconds(content: bytes, most_pixels: int = MOST_PIXELS_SERVING) -> float:
    """Return about how long an image takes to decode, by the pixels that its header promises."""
    pixels = count_pixels(content)
    if pixels is None:
        pixels = most_pixels
    return SECONDS_PER_IMAGE + SECONDS_PER_PIXEL * (pixels if pixels <= most_pixels else 0)  # more are not decoded


def find_visible_box(height: int, width: int, preprocessing: Preprocessing) -> Box:
    """Return the part of an upright image of that size that the preprocessing does not crop away."""
    crop_height, crop_width = preprocessing.image_size
    resized_height, resized_width = preprocessing.resized
    if preprocessing.resize == "squash":
        box_height, box_width = crop_height / resized_height, crop_width / resized_width
    else:
        # The image is resized until it just covers the resized size, then its centre is cropped.
        middle_height, middle_width = min(height, MAX_ASPECT_RATIO * width), min(width, MAX_ASPECT_RATIO * height)
        scale = max(resized_height / middle_height, resized_width / middle_width)
        box_height, box_width = crop_height / scale / height, crop_width / scale / width
    box_height, box_width = min(box_height, 1.0), min(box_width, 1.0)
    return (1 - box_width) / 2, (1 - box_height) / 2, box_width, box_height
