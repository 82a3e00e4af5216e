"""The bytes that a client sent → pixels that a model sees, or what is wrong with them; and which part that is."""

from __future__ import annotations

import io
import logging

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.config import Preprocessing
from vitrail.data.transforms.decode import MOST_PIXELS_SERVING, decode, to_channels
from vitrail.data.transforms.evaluation import MOST_RATIO, fitted
from vitrail.errors import DataError, TooLargeError
from vitrail.serving.http_errors import Refusal

log = logging.getLogger("vitrail")

Box = tuple[float, float, float, float]
"""Left, top, width and height, in fractions of the upright image."""


def pixels_of(
    content: bytes, preprocessing: Preprocessing, most_pixels: int = MOST_PIXELS_SERVING
) -> tuple[Tensor, Box]:
    """(C, height, width) uint8 of the model's size, and the part of the image that they show. Else a Refusal."""
    try:
        image = decode(content, most_pixels)
        box = part_seen(image.shape[1], image.shape[2], preprocessing)
        return fitted(to_channels(image, len(preprocessing.mean)), preprocessing).contiguous(), box
    except TooLargeError as error:
        raise Refusal(413, f"the image is too large: {error}", "too_many_pixels") from None
    except DataError as error:
        raise Refusal(400, f"the image cannot be read: {error}", "bad_image") from None
    except Exception as error:  # of whatever kind: these are a stranger's bytes
        log.warning("an image could not be prepared", exc_info=True)
        raise Refusal(400, f"the image cannot be read: {type(error).__name__}", "bad_image") from None


def part_seen(height: int, width: int, preprocessing: Preprocessing) -> Box:
    """What `fitted` keeps of an upright image of that size."""
    seen_height, seen_width = preprocessing.image_size
    least_height, least_width = preprocessing.resized
    if preprocessing.resize == "squash":
        part_height, part_width = seen_height / least_height, seen_width / least_width
    else:
        # Resized until it just covers; then the seen size is so much of either side.
        middle_height, middle_width = min(height, MOST_RATIO * width), min(width, MOST_RATIO * height)
        scale = max(least_height / middle_height, least_width / middle_width)
        part_height, part_width = seen_height / scale / height, seen_width / scale / width
    part_height, part_width = min(part_height, 1.0), min(part_width, 1.0)
    return (1 - part_width) / 2, (1 - part_height) / 2, part_width, part_height


def grey_png(shares: NDArray[np.float64]) -> bytes:
    """(rows, columns) of shares → a PNG of as many pixels in 8-bit grey, the largest share 255."""
    largest = max(float(shares.max()), np.finfo(np.float64).tiny)
    file = io.BytesIO()
    Image.fromarray(np.rint(shares / largest * 255).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()
