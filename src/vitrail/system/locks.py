"""Locks on files, so that two processes do not write in one folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def lock_file(path: Path) -> BinaryIO:
    """Open a file, which is made if there is none, with a lock that one process at a time can hold.

    The system unlocks it when the file is closed or the process ends, in any way.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: the file cannot be opened, or the file system has no locks.
    """
    file = path.open("ab")
    try:
        _lock(file.fileno())
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError | PermissionError):
            raise BlockingIOError(error.errno, "another process has the lock", str(path)) from None
        raise
    return file


def _lock(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        return
    # Not flock: workers would inherit it, and outlive a killed run by some seconds.
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
