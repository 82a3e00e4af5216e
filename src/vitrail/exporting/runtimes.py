"""What all runtimes and exporters share: the type of an opened export, short error messages, silence."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vitrail.errors import ExportError
from vitrail.inference.sessions import Session

ExportRunner = Callable[[Tensor], Tensor]
"""An opened export: it maps input tensors to output tensors, both on the CPU."""


def first_line(error: Exception) -> str:
    """Return the first line of an error message that may be pages long."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def wrap_session(session: Session) -> ExportRunner:
    """Return a session as a function of tensors; where it fails, the function raises an ExportError."""

    def run(inputs: Tensor) -> Tensor:
        try:
            return torch.from_numpy(session.run(inputs.numpy()))
        except Exception as error:  # the library's own kinds
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise ExportError(f"{session.runtime} cannot run the export: {reason}") from error

    return run


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
