"""What all runtimes and exporters share: the type of an opened export, short error messages, silence."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

ExportRunner = Callable[[Tensor], Tensor]
"""An opened export: it maps input tensors to output tensors, both on the CPU."""


def first_line(error: Exception) -> str:
    """Return the first line of an error message that may be pages long."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def silence_exporters() -> Iterator[None]:
    """Silence the warnings that exporters address to their own developers."""
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
