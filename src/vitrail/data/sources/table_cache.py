"""Tables about samples, cached on disk and memory-mapped: a billion rows need no memory, and processes share them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.errors import DataError
from vitrail.system.files import is_out_of_handles, rename_when_free

VERSION = "1"
MAX_AGE_SECONDS = 30 * 24 * 3600


class MappedTable:
    """Named columns, each a .npy file of a folder, memory-mapped on first use in each process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._columns: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._columns:
            path = self.folder / f"{name}.npy"
            try:
                # An empty array cannot be mapped.
                self._columns[name] = np.load(path, mmap_mode="r" if path.stat().st_size > 128 else None)
            except (OSError, ValueError, EOFError) as error:
                if is_out_of_handles(error):  # the table may well be whole
                    raise
                raise DataError(f"{path} is damaged ({error}): delete {self.folder}, and it is made anew") from None
        return self._columns[name]

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_columns": {}}


def load_or_build_table(subject: str, fingerprint: str, build: Callable[[Path], None]) -> MappedTable:
    """Return the cached table about `subject`, or build it if there is none with this fingerprint.

    The table's folder appears complete or not at all, so two processes may build it at the same time.

    Args:
        subject: what the table is about, such as the path of a data set.
        fingerprint: changes whenever the data changes.
        build: writes the columns into a folder.
    """
    name = hashlib.sha256(f"{VERSION}\n{subject}".encode(errors="surrogateescape")).hexdigest()[:24]
    folder = (
        find_cache_folder() / f"{name}-{hashlib.sha256(fingerprint.encode(errors='surrogateescape')).hexdigest()[:16]}"
    )
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder.parent))
        try:
            build(draft)
            rename_when_free(draft, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        _delete_old(folder, name)
    return MappedTable(folder)


def find_cache_folder() -> Path:
    """Return VITRAIL_CACHE/index or the user's cache folder, or a temporary folder if that cannot be written.

    Raises:
        DataError: The temporary folder is not this user's alone: who writes there could say what images show.
    """
    home = os.environ.get("VITRAIL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vitrail"
    folder = Path(home).expanduser() / "index"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = _make_temporary_folder() / "index"
    return folder


def _make_temporary_folder() -> Path:
    """Return a folder of this user in the folder for temporary files, where anyone could have made one of that name."""
    if not hasattr(os, "getuid"):  # on Windows, that folder is the user's own
        return Path(tempfile.gettempdir()) / "vitrail"
    folder = Path(tempfile.gettempdir()) / f"vitrail-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if status.st_uid != os.getuid() or others_write or not stat.S_ISDIR(status.st_mode):
        raise DataError(
            f"{folder} belongs to another user, or others may write to it: "
            "set VITRAIL_CACHE to a folder that only you can write to"
        )
    return folder


def _delete_old(folder: Path, name: str) -> None:
    """Delete older tables about the same subject, unless they are so new that a run may still use them."""
    for other in folder.parent.glob(f"{name}-*"):
        if other != folder and time.time() - other.stat().st_mtime > MAX_AGE_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
