"""Data with another task than one label an image: tags, numbers, levels or attributes, which a table tells.

    image,tags                      image,indoor,cat            image,age,height
    a.jpg,indoor|cat                a.jpg,1,1                   a.jpg,34,1.72

The table is a CSV, a record in JSON on each line (.jsonl), a list of records (.json), the columns of Parquet files, the
JSON beside the images of tar shards, or a list of (image, target) in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.data.locate import match_all_splits, resolve_path
from vitrail.data.order import Indices
from vitrail.data.sources.annotated import AnnotatedSource
from vitrail.data.sources.folder import FileSource, check_base
from vitrail.data.sources.image_files import read_stat
from vitrail.data.sources.source import Source, Subset
from vitrail.data.tables.recognise import ColumnGuide, fit_columns, learn_task
from vitrail.data.tables.row_table import RowTable
from vitrail.data.tables.text_tables import TEXT_TABLES, read_text_table
from vitrail.errors import ConfigError, DataError
from vitrail.tasks.registry import find_task
from vitrail.tasks.task import Task

if TYPE_CHECKING:
    from vitrail.data.open import Data

REASONS_SHOWN = 3
"""How many reasons an error lists if no row can be used."""


@dataclass(frozen=True)
class TaskData:
    """Data, and what is learned from it. Functions take it as DATA; `add_task` makes it.

    Nothing else is decided here, so a record of it opens the same samples everywhere.
    """

    data: Any
    """The data itself: the name of a data set, a list, or a dictionary of lists."""
    task: Task | str | None = None
    """A task, which a model has learned; or a kind of task; None to recognise it."""
    columns: tuple[str, ...] = ()
    """The columns to learn; none to find them."""

    @property
    def kind(self) -> str | None:
        """The kind of the task; None to recognise it."""
        return self.task.kind if isinstance(self.task, Task) else self.task


def recognise_task(data: Data) -> Task:
    """Return the task that data tells: `Labels` for images in class folders, and whatever the columns of a table are.

    Raises:
        ConfigError: the columns that are named do not go together.
        DataError: the data cannot be read, or does not tell what to learn.
    """
    from vitrail.data.open import list_splits, open_data

    wrapped = data if isinstance(data, TaskData) else TaskData(data)
    if (found := open_annotated(wrapped)) is not None:
        return found[0].task
    splits = list_splits(wrapped.data)
    return open_data(wrapped.data, splits[0] if splits else None).task


def recognise_data(data: Data) -> Data:
    """Return data as functions take it: with its task if a table tells another than one label; else as it is."""
    if isinstance(data, TaskData):
        return data
    found = open_annotated(TaskData(data))
    return data if found is None else TaskData(data, found[0].task)


def open_annotated(data: TaskData) -> tuple[AnnotatedSource, dict[str, Indices]] | None:
    """Return all samples of data with a table, and for each split the numbers of its samples.

    Returns:
        None for data that `open_data` opens without its task: one label an image, in a layout without this record.
    """
    stamp = _stamp(data)
    if stamp is None:
        return _build(data)
    found = _build_once(data, stamp)
    if found is None:
        return None
    source, splits = found
    return source, splits


def open_part(data: TaskData, split: str | None = None) -> Source:
    """Return the samples of one split of data that `open_annotated` opens, or all of them."""
    found = open_annotated(data)
    assert found is not None
    source, splits = found
    return source if split is None else Subset(source, splits[split])


def _stamp(data: TaskData) -> str | None:
    """Return what tells that a file is still the same; None for data that is no single file."""
    path = _find_table(data.data)
    if path is None:
        return None
    stat = read_stat(path)
    return f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"


@lru_cache(maxsize=4)
def _build_once(data: TaskData, stamp: str) -> tuple[AnnotatedSource, dict[str, Indices]] | None:
    """Build the samples of a table, which is read once by all who open its splits."""
    return _build(data)


def _build(data: TaskData) -> tuple[AnnotatedSource, dict[str, Indices]] | None:
    table = read_table(data)
    if table is None:
        if data.columns or data.kind not in (None, "labels"):
            raise DataError(_explain_missing_table(data))
        return None
    if (task := _find_task(data, table)) is None:
        return None
    images = table.open_images()
    if isinstance(images, FileSource) and (path := _find_table(data.data)) is not None:
        check_base(path, images)
    source = AnnotatedSource(images, task, table.select(task.columns), table.places, table.problems)
    if len(source.broken_rows) == len(source):
        reasons = "\n".join(f"  {reason}" for reason in list(source.broken_rows.values())[:REASONS_SHOWN])
        raise DataError(f"{table.title}: no row can be used\n{reasons}")
    return source, _divide(table)


def _find_task(data: TaskData, table: RowTable) -> Task | None:
    """Return the task with the columns of a table; None if the data opens without this record."""
    if isinstance(data.task, Task):
        return fit_columns(data.task, table, data.columns)
    kind, columns = ColumnGuide(table, data.kind, data.columns).choose()
    if kind == "labels" and not data.columns and opens_without_task(data.data, columns):
        return None
    return learn_task(table, kind, columns)


def _divide(table: RowTable) -> dict[str, Indices]:
    """Return the rows of each split. Rows that do not tell theirs, for they are broken, are of the first."""
    if table.splits is None:
        return {}
    known = {split for index, split in enumerate(table.splits) if index not in table.problems}
    matches = match_all_splits(table.title, {split or "" for split in known})
    if not matches:
        return {}
    ours = {theirs: place for place, (_, theirs) in enumerate(matches)}
    numbers = np.fromiter((ours.get(split or "", 0) for split in table.splits), np.int64, len(table))
    return {name: np.flatnonzero(numbers == place) for place, (name, _) in enumerate(matches)}


def read_table(data: TaskData) -> RowTable | None:
    """Return the table of data; None if it has none."""
    path = _find_table(data.data)
    return None if path is None else read_text_table(path, data.columns)


def _find_table(data: Any) -> Path | None:
    """Return the file of a table in text that a name of data means."""
    if not isinstance(data, str | Path) or str(data).startswith("hf:") or str(data) == "digits":
        return None
    path = resolve_path(str(data))
    if path.is_dir():
        tables = sorted(path.glob("*.jsonl"))
        return tables[0] if len(tables) == 1 else None
    return path if path.suffix.lower() in TEXT_TABLES and path.is_file() else None


def opens_without_task(data: Any, columns: tuple[str, ...]) -> bool:
    """Return whether `open_data` opens data with one label an image as it is."""
    from vitrail.data.sources.folder import LABEL_COLUMNS

    path = _find_table(data)
    return path is None or (path.suffix.lower() == ".csv" and columns[0].lower() in LABEL_COLUMNS)


def _explain_missing_table(data: TaskData) -> str:
    from vitrail.data.open import name_data

    what = f"task = {data.kind!r}" if data.kind else f"labels = {','.join(data.columns)!r}"
    return (
        f"{name_data(data.data)} has no table, which {what} needs: write a CSV with a column `image` and a column for "
        "what to learn beside the images, and give the CSV"
    )


def make_task_data(data: Any, task: Task | str | None, labels: Any) -> TaskData:
    """Return data with its task and columns, which are checked as far as that needs no file.

    Raises:
        ConfigError: there is no such task, or `labels` names no column.
    """
    if isinstance(data, TaskData):
        data = data.data
    if isinstance(task, str):
        find_task(task)
    if isinstance(labels, str):
        labels = labels.split(",")
    names = tuple(str(name).strip() for name in labels or ())
    if labels is not None and (not names or not all(names) or len(set(names)) < len(names)):
        raise ConfigError(f"labels = {','.join(names)!r}: name columns, each once, such as 'colour,shape'")
    if isinstance(data, Mapping):
        data = dict(data)
    return TaskData(data, task, names)
