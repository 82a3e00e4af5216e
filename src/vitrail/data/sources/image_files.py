"""Find image files in folders, and name them in messages. Nothing here needs torch, so an answer comes at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vitrail.errors import DataError, escape_unprintable
from vitrail.system.files import describe_reason

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
MOST_BYTES = 500_000_000
"""The largest image file that is read."""


def is_image_name(name: str) -> bool:
    """Return whether the name of a file is that of an image which is not hidden."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def walk_files(root: Path) -> Iterator[str]:
    """Yield the paths of all files below a folder, except hidden ones. Links are followed, each folder once."""
    entered = set[tuple[int, int]]()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=_raise_data_error):
        here = identify_folder(Path(folder))
        if here in entered:
            folders.clear()
            continue
        entered.add(here)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (f"{folder}{os.sep}{name}" for name in names if not name.startswith("."))


def _raise_data_error(error: OSError) -> None:
    raise DataError(f"{make_printable(error.filename)} cannot be listed: {describe_reason(error)}")


def list_entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, sorted by name; raise a DataError if it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{make_printable(folder)} cannot be listed: {describe_reason(error)}") from None


def is_dir(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder; not if it is a link to itself."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def list_folders(root: Path) -> list[str]:
    """Return the sorted names of the subfolders that are not hidden."""
    return [entry.name for entry in list_entries(root) if is_dir(entry) and not entry.name.startswith(".")]


def list_images(folder: Path) -> list[str]:
    """Return the sorted names of the images in a folder itself, without hidden ones."""
    return [entry.name for entry in list_entries(folder) if is_image_name(entry.name) and not is_dir(entry)]


def read_stat(path: Path) -> os.stat_result:
    """Return what the system knows of a file or folder; raise a DataError if it cannot be reached."""
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"{make_printable(path)} cannot be read: {describe_reason(error)}") from None


def identify_folder(folder: Path) -> tuple[int, int]:
    """Return numbers that are the same for every path to a folder."""
    stat = read_stat(folder)
    return stat.st_dev, stat.st_ino


def make_printable(path: str | os.PathLike[str]) -> str:
    """Return a path or a text on one line, with unprintable characters escaped."""
    text = os.fspath(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return escape_unprintable(text)
