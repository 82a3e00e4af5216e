"""Atomic file writes: after a crash a file has either its old content or all of the new."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from vitrail.errors import ConfigError


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a crash leaves either the old content or all of the new one."""
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_bytes(content)
    move_into_place(draft, path)


def move_into_place(draft: Path, path: Path) -> None:
    """Rename a finished draft to its final path, once its bytes are on the disk."""
    flush_to_disk(draft)
    draft.replace(path)
    flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_folder(path: Path) -> bool:
    """Return whether there is such a folder; False also for names that no file can have."""
    try:
        return path.is_dir()
    except OSError:  # the name is too long, or its folder cannot be read
        return False


def check_out_file(out: Path | None) -> None:
    """Raise a ConfigError if a file to write is a folder, or would lie in a folder that does not exist."""
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise ConfigError(f"--out {out}: give the name of a file in a folder that is there")


def write_out_file(out: Path, content: dict[str, Any]) -> None:
    """Write a result as JSON to a file that `check_out_file` has allowed."""
    try:
        write_whole(out, (json.dumps(content, indent=2) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror or error}") from None


def sha256(path: Path) -> str:
    """Return the hash of a file as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def short_name(text: str) -> str:
    """Return the last part of a model's or a data set's name, with only characters that a folder name may have.

    For the `model` folder inside a run folder, return the name of the run; for its `best` folder, "NAME-best".
    """
    path = Path(text.removeprefix("hf:").removeprefix("timm:"))
    if path.name == "model" and path.parent.name:
        path = path.parent
    elif path.name == "best" and path.parent.name:
        path = path.with_name(f"{path.parent.name}-best")
    return re.sub(r"[^\w.+-]+", "-", path.name).strip("-.") or "data"
