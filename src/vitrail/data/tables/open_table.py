"""Find and read the table of data, whatever its layout."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.data.locate import (
    find_local_path,
    group_files_by_split,
    list_shard_files,
    match_all_splits,
    match_splits,
    resolve_path,
)
from vitrail.data.sources.image_files import is_image_name, list_folders, read_stat, walk_files
from vitrail.data.sources.layout import is_part_name
from vitrail.data.sources.source import SPLITS
from vitrail.data.tables.listed_rows import read_listed_rows
from vitrail.data.tables.row_table import RowTable
from vitrail.data.tables.shard_tables import (
    has_records,
    read_hub_table,
    read_parquet_table,
    read_stored_task,
    read_tar_table,
)
from vitrail.data.tables.text_tables import TEXT_TABLES, read_text_table
from vitrail.errors import DataError, MissingExtraError
from vitrail.tasks.task import Task

SHARDS = (".parquet", ".tar")


def read_table(data: Any, keep: tuple[str, ...], labels_only: bool) -> RowTable | None:
    """Return the table of data; None if it has none.

    Args:
        data: the name of a data set, a list of (image, target), or a dictionary with such a list for each split.
        keep: the columns to keep; all that may be targets if empty.
        labels_only: whether the answer may also be None for data that has a table, but surely one label an image.
    """
    if isinstance(data, Mapping):
        return _read_lists(data, keep)
    if isinstance(data, list):
        return read_listed_rows("the list", {None: data}, keep)
    if not isinstance(data, str | Path) or str(data) == "digits":
        return None
    if str(data).startswith("hf:"):
        return None if labels_only else _read_hub(str(data), keep)
    if (file := find_text_table(data)) is not None:
        return read_text_table(file, keep)
    return _read_shards(resolve_path(str(data)), keep, labels_only)


def find_text_table(data: Any) -> Path | None:
    """Return the file of a table in text that a name of data means: itself, or the only one in a folder.

    Records in JSON beside class folders are logs or captions of theirs: such a folder stays one of class folders.
    """
    if not isinstance(data, str | Path) or str(data).startswith("hf:") or str(data) == "digits":
        return None
    path = resolve_path(str(data))
    if path.is_dir() and not list_shard_files(path):
        tables = sorted(path.glob("*.jsonl"))
        return tables[0] if len(tables) == 1 and not has_class_folders(path) else None
    return path if path.suffix.lower() in TEXT_TABLES and path.is_file() else None


def has_class_folders(path: Path) -> bool:
    """Return whether a folder, or the folder of a split in it, holds folders of images that are classes.

    A single folder beside a table, or one called such as images, may as well hold the images of the table.
    """
    names = list_folders(path)
    classes = (name for name in names if not is_part_name(name) and _holds_images(path / name))
    splits = (name for name in names if any(name.lower() in words for words in SPLITS.values()))
    return len(list(itertools.islice(classes, 2))) == 2 or any(_splits_classes(path / name) for name in splits)


def _splits_classes(folder: Path) -> bool:
    return any(not is_part_name(name) and _holds_images(folder / name) for name in list_folders(folder))


def _holds_images(folder: Path) -> bool:
    return any(is_image_name(Path(name).name) for name in walk_files(folder))


def find_stored_task(data: Any) -> bool:
    """Return whether data are shards that `vitrail data pack` wrote with a task."""
    if not isinstance(data, str | Path) or str(data).startswith("hf:") or str(data) == "digits":
        return False
    path = find_local_path(data)
    return (path.is_dir() or path.suffix.lower() in SHARDS) and _read_task_beside(path) is not None


def _read_task_beside(path: Path) -> Task | None:
    return read_stored_task(path if path.is_dir() else path.parent)


def stamp_table(data: Any) -> str | None:
    """Return what tells that a table in text is still the same; None for data in another layout."""
    file = find_text_table(data)
    if file is None:
        return None
    stat = read_stat(file)
    return f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"


def _read_lists(data: Mapping[Any, Any], keep: tuple[str, ...]) -> RowTable:
    names = {str(name) for name in data}
    matches = match_all_splits("the dictionary", names)
    if not matches:
        raise DataError(f"the names of the lists are {', '.join(sorted(names)) or 'missing'}: give train, val or test")
    return read_listed_rows("the dictionary", {ours: data[theirs] for ours, theirs in matches}, keep)


def _read_shards(path: Path, keep: tuple[str, ...], labels_only: bool) -> RowTable | None:
    if path.is_file() and path.suffix.lower() in SHARDS:
        files = dict[str | None, list[Path]]({None: [path]})
    elif path.is_dir() and (found := list_shard_files(path)):
        files = group_files_by_split(path, found)
    else:
        return None
    task = _read_task_beside(path)
    first = next(iter(files.values()))[0]
    if first.suffix.lower() == ".parquet":
        table = read_parquet_table(str(path), files, keep or (task.columns if task else ()), labels_only and not task)
    elif labels_only and task is None and not has_records(first):
        return None
    else:
        table = read_tar_table(str(path), files, keep)
    if table is not None:
        table.task = task
    return table


def _read_hub(name: str, keep: tuple[str, ...]) -> RowTable:
    try:
        import datasets  # noqa: F401
    except ImportError:
        raise MissingExtraError(f"loading {name}", "datasets") from None
    from vitrail.data.sources.hub import list_hub_splits

    return read_hub_table(name, dict(match_splits(list_hub_splits(name))), keep)
