"""Tables about samples, on disk and mapped: a billion rows cost no memory, and every process shares them."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.errors import DataError

VERSION = "1"
MAX_AGE_SECONDS = 30 * 24 * 3600


class MappedTable:
    """Named columns in a folder of .npy files, mapped when first used; a copy in another process maps them anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._columns: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._columns:
            path = self.folder / f"{name}.npy"
            try:
                # An empty file cannot be mapped.
                self._columns[name] = np.load(path, mmap_mode="r" if path.stat().st_size > 128 else None)
            except (OSError, ValueError, EOFError) as error:
                raise DataError(f"{path} is damaged ({error}): delete {self.folder}, and it is made anew") from None
        return self._columns[name]

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_columns": {}}


def load_or_build_table(what: str, fingerprint: str, build: Callable[[Path], None]) -> MappedTable:
    """The table about `what`, built into a folder of the cache unless one with this fingerprint is there.

    The folder appears whole or not at all, so two processes that build it at once do not disturb each other.
    """
    name = hashlib.sha256(f"{VERSION}\n{what}".encode(errors="surrogateescape")).hexdigest()[:24]
    folder = (
        find_cache_folder() / f"{name}-{hashlib.sha256(fingerprint.encode(errors='surrogateescape')).hexdigest()[:16]}"
    )
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder.parent))
        try:
            build(draft)
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # or another process was first
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        _forget_earlier(folder, name)
    return MappedTable(folder)


def find_cache_folder() -> Path:
    """Where tables lie: VITRAIL_CACHE, else the user's cache; a temporary folder where that cannot be written."""
    home = os.environ.get("VITRAIL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vitrail"
    folder = Path(home).expanduser() / "index"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"vitrail-{os.getuid() if hasattr(os, 'getuid') else 'user'}" / "index"
    return folder


def _forget_earlier(folder: Path, name: str) -> None:
    """Tables about the same thing as it was before, unless so new that a run may still need them."""
    for other in folder.parent.glob(f"{name}-*"):
        if other != folder and time.time() - other.stat().st_mtime > MAX_AGE_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
