"""Decode a rectangle of a JPEG, whole or at a half, a quarter or an eighth of its size.

A random crop needs about half of a photograph. The C++ decoder in jpeg_kernels/ computes no other pixels, and stops
below the rectangle. It is compiled at first use. Without a compiler, and for kinds of JPEG that it does not know
(progressive ones, for example), simplejpeg decodes the whole image. Both give the same pixels: libjpeg's.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from vitrail.errors import NotApplicableError
from vitrail.system.compiler import load_library

log = logging.getLogger("vitrail")

Box = tuple[int, int, int, int]
"""Top, left, height, width."""


def decode_rectangle(content: bytes, shape: tuple[int, int], scale: int, box: Box) -> Any:
    """Decode a part of a JPEG.

    Args:
        content: the bytes of the file.
        shape: height and width of the whole image, from its header.
        scale: 1, 2, 4 or 8: the image is decoded at 1/`scale` of its size, rounded up.
        box: the part, in pixels of the smaller image.

    Returns:
        (height, width, 3) uint8, a numpy array.

    Raises:
        ValueError: the JPEG is damaged.
    """
    top, left, height, width = box
    decode = load_decoder()
    if decode is not None:
        pixels = np.empty((height, width, 3), dtype=np.uint8)
        if decode(content, len(content), scale, top, left, height, width, pixels.ctypes.data) == 0:
            return pixels
    least = {"min_height": -(-shape[0] // scale), "min_width": -(-shape[1] // scale), "min_factor": scale}
    pixels = simplejpeg.decode_jpeg(content, **(least if scale > 1 else {}))
    return pixels[top : top + height, left : left + width]


@functools.cache
def load_decoder() -> Callable[..., int] | None:
    """Return the compiled decoder, or None if it cannot be compiled on this machine.

    Call it before worker processes start: otherwise each of them compiles it.
    """
    try:
        kernels = load_library(Path(__file__).parent.parent / "jpeg_kernels")  # sums of damaged data overflow
        function = kernels.decode_rectangle
    except (NotApplicableError, AttributeError) as error:  # AttributeError: a cached library without our function
        log.info("JPEGs are decoded by simplejpeg, which takes longer: %s", error)
        return None
    function.restype = ctypes.c_int
    function.argtypes = [ctypes.c_char_p, ctypes.c_int64, *[ctypes.c_int] * 5, ctypes.c_void_p]
    return function
