"""Standard input, output and error of a process that was started without some of them, or with few characters."""

from __future__ import annotations

import io
import os
import sys


def check_streams() -> str | None:
    """Return why nothing can be printed, or None. A closed stdin or stderr is opened on the null device.

    A character that a stream does not have, such as an arrow in Windows' code page 1252, is printed as \\u2192.
    """
    # A file that is opened later would otherwise get the stream's number, and what is printed.
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            point_to_null(number)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (stays open)
            if name == "stdout":
                return "standard output is closed: send it to a file, or to the null device"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    return None


def point_to_null(number: int) -> None:
    """Let an open or closed file number lead to the null device."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
