"""Data with another task than one label an image: tags, numbers, levels or attributes, which a table tells.

    image,tags                      image,indoor,cat            image,age,height
    a.jpg,indoor|cat                a.jpg,1,1                   a.jpg,34,1.72

The table is a CSV, a record in JSON on each line (.jsonl), a list of records (.json), the columns of Parquet files, the
JSON beside the images of tar shards, or a list of (image, target) in Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.data.locate import match_splits
from vitrail.data.order import Indices
from vitrail.data.sources.annotated import LABELS, AnnotatedSource
from vitrail.data.sources.folder import FileSource, check_base
from vitrail.data.sources.source import SPLITS, Source, Subset
from vitrail.data.sources.split_columns import refuse_split_columns
from vitrail.data.tables.open_table import read_table, stamp_table
from vitrail.data.tables.recognise import ColumnGuide, fit_columns, learn_task, refuse_joined_tags
from vitrail.data.tables.row_table import RowTable
from vitrail.errors import ConfigError, DataError
from vitrail.system.files import describe_reason
from vitrail.tasks.registry import find_task
from vitrail.tasks.tags import TAGS
from vitrail.tasks.task import Task

if TYPE_CHECKING:
    from vitrail.data.open import Data

REASONS_SHOWN = 3
"""How many reasons an error lists if no row can be used."""


@dataclass(frozen=True)
class TaskData:
    """Data, and what is learned from it. Functions take it as DATA; `add_task` makes it."""

    data: Any
    """The data itself: the name of a data set, a list, or a dictionary of lists."""
    task: Task | str | None = None
    """A task, which a model has learned; or a kind of task; None to recognise it."""
    columns: tuple[str, ...] = ()
    """The columns to learn; none to find them."""
    allows_joined_tags: bool = False
    """Whether a column of tags may hold mostly cells such as `indoor, cat`, because `data check` lists them."""

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


def recognise_data(data: Data, *, allows_joined_tags: bool = False) -> Data:
    """Return data as functions take it: with its task if a table tells another than one label; else as it is.

    `allows_joined_tags` is for `data check`: see `TaskData`.
    """
    if isinstance(data, TaskData):
        return replace(data, allows_joined_tags=allows_joined_tags)
    found = open_annotated(TaskData(data, allows_joined_tags=allows_joined_tags))
    return data if found is None else TaskData(data, found[0].task)


def open_annotated(data: TaskData) -> tuple[AnnotatedSource, dict[str, Indices]] | None:
    """Return all samples of data with a table, and for each split the numbers of its samples.

    Returns:
        None for data that `open_data` opens without its task: one label an image, in a layout without this record.
    """
    if isinstance(data.data, Source):
        return None
    try:
        stamp = stamp_table(data.data)
        return _build(data) if stamp is None else _build_once(data, stamp)
    except OSError as error:
        raise DataError(f"{_name(data)} cannot be opened: {describe_reason(error)}") from None


def open_part(data: TaskData, split: str | None = None) -> Source:
    """Return the samples of one split of data that `open_annotated` opens, or all of them."""
    found = open_annotated(data)
    assert found is not None
    source, splits = found
    return source if split is None else Subset(source, splits[split])


@lru_cache(maxsize=4)
def _build_once(data: TaskData, stamp: str) -> tuple[AnnotatedSource, dict[str, Indices]] | None:
    """Build the samples of a table in text, which is read once by all who open its splits."""
    return _build(data)


def _build(data: TaskData) -> tuple[AnnotatedSource, dict[str, Indices]] | None:
    is_plain = data.task in (None, LABELS) and not data.columns
    keep = data.columns if not isinstance(data.task, Task) else ()
    table = read_table(data.data, keep, labels_only=is_plain)
    if table is None:
        if not is_plain:
            raise DataError(_explain_missing_table(data))
        return None
    if any(column not in table.columns for column in keep):
        table = read_table(data.data, (), labels_only=False) or table  # with all columns, so that the error names them
    matches = _mark_rows_without_split(table)
    splits = _divide(table, matches)
    task = _find_task(data, table, splits.get("train"))
    if task is None:
        return None
    images = table.open_images()
    if isinstance(images, FileSource) and table.file is not None:
        check_base(table.file, images)
    source = AnnotatedSource(images, task, table.select(task.columns), table.places, table.problems)
    if len(source.broken_rows) == len(source):
        reasons = "\n".join(f"  {reason}" for reason in list(source.broken_rows.values())[:REASONS_SHOWN])
        raise DataError(f"{table.title}: no row can be used\n{reasons}")
    return source, splits


def _find_task(data: TaskData, table: RowTable, training: Indices | None) -> Task | None:
    """Return the task with the columns of a table; None if the data opens without this record.

    `training` are the rows to train on; None if there are no splits.
    """
    if isinstance(data.task, Task):
        task = fit_columns(data.task, table, data.columns)
        refuse_split_columns(table.title, table.split_columns, task.columns)
        return task
    if table.task is not None and data.kind in (None, table.task.kind) and not data.columns:
        return fit_columns(table.task, table, ())
    kind, columns = ColumnGuide(table, data.kind, data.columns).choose()
    # Of several columns that were found, none is surely to be learned.
    refuse_split_columns(table.title, table.split_columns, columns if len(columns) == 1 else data.columns)
    if kind == TAGS and len(columns) == 1 and not data.allows_joined_tags:
        refuse_joined_tags(table, columns[0])
    if kind == LABELS and not data.columns and columns[0] in table.plain_labels:
        return None
    return learn_task(table, kind, columns, training)


def _mark_rows_without_split(table: RowTable) -> list[tuple[str, str]]:
    """Return (our name, their name) of each split; if there are any, rows of none are bad and teach nothing."""
    splits = table.splits or []
    matches = match_splits({split for split in splits if split})
    known = {theirs for _, theirs in matches}
    for index, split in enumerate(splits if known else []):
        if split in known or index in table.problems:
            continue
        problem = f"the split is {split[:50]!r}" if split else "there is no split, and other rows have one"
        table.problems[index] = f"{problem}: write {' or '.join(SPLITS)}"
        for cells in table.columns.values():
            cells[index] = None
    return matches


def _divide(table: RowTable, matches: Sequence[tuple[str, str]]) -> dict[str, Indices]:
    """Return the rows of each split. Rows that do not tell theirs, for they are broken, are of the first."""
    if table.splits is None or not matches:
        return {}
    ours = {theirs: place for place, (_, theirs) in enumerate(matches)}
    numbers = np.fromiter((ours.get(split or "", 0) for split in table.splits), np.int64, len(table))
    return {name: np.flatnonzero(numbers == place) for place, (name, _) in enumerate(matches)}


def _explain_missing_table(data: TaskData) -> str:
    what = f"task = {data.kind!r}" if data.kind else f"labels = {','.join(data.columns)!r}"
    return (
        f"{_name(data)} has no table, which {what} needs: write a CSV with a column `image` and a column for "
        "what to learn beside the images, and give the CSV"
    )


def _name(data: TaskData) -> str:
    from vitrail.data.open import name_data

    return name_data(data)


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
