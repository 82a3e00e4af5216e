"""What the system refuses, as one line and an exit code: a full disk, a closed pipe, too little memory."""

from __future__ import annotations

import contextlib
import errno
import sys

from vitrail.errors import ConfigError, Stopped, VitrailError
from vitrail.system.files import describe_os_error
from vitrail.system.standard_streams import point_to_null

FAILED, WRONG_COMMAND, STOPPED = 1, 2, 3
NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "Cannot allocate memory")
"""Words of a RuntimeError of PyTorch that means too little memory."""
NOT_WRITTEN = ("PytorchStreamWriter", "No space left")
"""Words of a RuntimeError of PyTorch that means a file that could not be written."""


def print_failure(error: Exception) -> int | None:
    """Print an error as one line on stderr, and return the exit code; None for a bug, whose traceback is needed."""
    line = _describe(error)
    if line is None:
        return None
    with contextlib.suppress(OSError):  # stderr may be full as well
        print(line if isinstance(error, Stopped) else f"error: {line}", file=sys.stderr)
    return STOPPED if isinstance(error, Stopped) else WRONG_COMMAND if isinstance(error, ConfigError) else FAILED


def _describe(error: Exception) -> str | None:
    if isinstance(error, VitrailError):
        return str(error)
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, OSError):
        return describe_os_error(error)
    if isinstance(error, MemoryError) or any(words in first for words in NO_MEMORY):
        return f"there is not enough memory: take a smaller batch or model{f' ({first})' if first else ''}"
    if type(error) is NotImplementedError and "MPS" in first:
        from vitrail.system.device import explain_missing_operation

        return explain_missing_operation(error)
    # By name: importing these libraries here would cost every command a second.
    if type(error).__name__ == "SafetensorError" or any(words in first for words in NOT_WRITTEN):
        return f"a file of weights cannot be read or written: {first}"
    return None


def flush_output() -> int:
    """Write what is left to print; return FAILED if that is not possible. A reader that went away is told nothing."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:
            print_failure(error)
        with contextlib.suppress(OSError, ValueError):  # or Python would try again at its end, and complain
            point_to_null(sys.stdout.fileno())
        return FAILED
    return 0
