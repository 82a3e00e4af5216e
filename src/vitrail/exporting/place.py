"""The file that an export is written to: it appears whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from vitrail.errors import ConfigError, ExportError
from vitrail.system.files import describe_reason, move_into_place


def check_target(target: Path, suffix: str) -> Path:
    """Return the path to write to, or raise a ConfigError if its suffix is wrong: only an export is ever replaced."""
    target = target.expanduser()
    if target.suffix != suffix:
        raise ConfigError(f"{target}: name a file that ends in {suffix}; one that is there already is replaced")
    if target.is_dir():
        raise ConfigError(f"{target} is a folder: name a file that ends in {suffix}")
    return target


@contextlib.contextmanager
def write_atomically(target: Path) -> Iterator[Path]:
    """Yield a draft path in a temporary folder beside `target`, and move the folder's files into place afterwards.

    The draft is moved last, because it may refer to the other files. If the block raises, nothing is left behind.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ExportError(f"{target} cannot be written: {describe_reason(error)}") from None
    draft = folder / target.name
    try:
        try:
            yield draft
        except OSError as error:  # of the draft, or of what lies in the system's temporary folder on the way to it
            where = error.filename or f"beside it, or in {tempfile.gettempdir()}"
            raise ExportError(f"{target} cannot be made: {describe_reason(error)} ({where})") from None
        try:
            for path in sorted(folder.iterdir(), key=lambda path: path == draft):
                path.chmod(0o666 & ~_read_umask())
                move_into_place(path, target.with_name(path.name))
        except OSError as error:
            raise ExportError(f"{target} cannot be written: {describe_reason(error)}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_size(draft: Path) -> int:
    """Return the bytes of an export, including files of weights beside it."""
    return sum(path.stat().st_size for path in draft.parent.iterdir() if path.name.startswith(draft.stem))


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
