"""Find what a name of data means on the disk: its table, its shards, and the splits that names of files mean."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from vitrail.data.sources.source import MOST_BYTES, SPLITS, read_small_text
from vitrail.errors import DataError, LayoutError
from vitrail.system.remote import is_address

Error = TypeVar("Error", bound=DataError)
CLASS_NAME_FILES = ("classes.txt", "labels.txt")


def find_local_path(name: str | Path) -> Path:
    """Return the path that a name of data means. An address such as s3://bucket/folder is copied into the cache first.

    Raises:
        DataError: there is nothing at the address, or it cannot be copied.
    """
    if is_address(name):
        from vitrail.data.sources.remote_copy import open_copy

        return open_copy(str(name))
    return Path(name).expanduser()


def name_by_address(error: Error) -> Error:
    """Return an error that names data in a bucket by its address, in place of its copy on this machine."""
    from vitrail.data.sources.remote_copy import name_copies

    error.args = tuple(name_copies(each) if isinstance(each, str) else each for each in error.args)
    if isinstance(error, LayoutError):
        error.given, error.data = name_copies(error.given), error.data and name_copies(error.data)
    return error


def resolve_path(text: str) -> Path:
    """Return the path that a name of data means; for a folder with exactly one CSV, that CSV."""
    path = find_local_path(text)
    tables = sorted(path.glob("*.csv")) if path.is_dir() else []
    return tables[0] if len(tables) == 1 else path


def match_splits(names: set[str]) -> list[tuple[str, str]]:
    """Return (our name, their name) for each name that means a split."""
    matches = [(ours, theirs) for ours, words in SPLITS.items() for theirs in sorted(names) if theirs.lower() in words]
    for (ours, first), (again, second) in itertools.pairwise(matches):
        if ours == again:
            raise DataError(f"{first!r} and {second!r} both mean {ours!r}: rename one, or join them")
    return matches


def match_all_splits(path: Path | str, names: set[str]) -> list[tuple[str, str]]:
    """As `match_splits`, but raise a DataError if only some of the names mean a split."""
    matches = match_splits(names)
    others = names - {theirs for _, theirs in matches}
    if matches and others:
        other_names = ", ".join(repr(other) for other in sorted(others))
        split_names = ", ".join(theirs for _, theirs in matches)
        raise DataError(f"{path} has {split_names}, and also {other_names}, of no split: rename or move what is extra")
    return matches


def list_shard_files(folder: Path) -> list[Path]:
    """Return the Parquet or tar files of a folder, including its subfolders named `data` or after a split."""
    inner = [child for child in sorted(folder.iterdir()) if child.is_dir() and _may_hold_shards(child.name)]
    for suffix in (".parquet", ".tar"):
        if files := [path for place in [folder, *inner] for path in sorted(place.glob(f"*{suffix}"))]:
            return files
    return []


def _may_hold_shards(name: str) -> bool:
    return name == "data" or any(name.lower() in names for names in SPLITS.values())


def guess_split(root: Path, path: Path) -> str | None:
    """Return the split that a file's folder means, or else a word of the file's name."""
    folder = path.parent.name.lower() if path.parent != root else ""
    is_split = _may_hold_shards(folder) and folder != "data"
    words = {folder} if is_split else set(re.split(r"[\W_]+", path.name.lower()))
    matches = [ours for ours, names in SPLITS.items() if words & set(names)]
    if len(matches) > 1:
        raise DataError(f"{path.name} could belong to {' or '.join(matches)}: rename it")
    return matches[0] if matches else None


def group_files_by_split(path: Path, files: Sequence[Path]) -> dict[str | None, list[Path]]:
    """Return the files of each split in the order of the splits; all under None if no name means one."""
    groups: dict[str | None, list[Path]] = {}
    for file in files:
        groups.setdefault(guess_split(path, file), []).append(file)
    if None in groups and len(groups) > 1:
        splits = ", ".join(str(split) for split in groups if split)
        raise DataError(f"{path} has {splits}, and also {groups[None][0].name}, which is of no split: move it")
    return {split: groups[split] for split in (*SPLITS, None) if split in groups}


def read_class_names(folder: Path) -> tuple[str, ...]:
    for name in CLASS_NAME_FILES:
        if (folder / name).is_file():
            text = read_small_text(folder / name, MOST_BYTES)
            return tuple(text.replace("\r\n", "\n").removesuffix("\n").split("\n"))
    return ()
