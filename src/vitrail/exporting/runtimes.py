"""What all runtimes and exporters share."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

Run = Callable[[Tensor], Tensor]
"""An export that is open: inputs → outputs, both on the CPU."""


def first_line(error: Exception) -> str:
    """What went wrong, from errors that tell pages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Without what exporters say to their own developers, on paths that work."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.utils._sympy.interp", "onnxscript", "root")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
