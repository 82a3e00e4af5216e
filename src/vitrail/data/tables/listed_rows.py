"""Read the targets of lists of (image, target) that a program has at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitrail.data.sources.list_source import ListSource
from vitrail.data.tables.row_table import RowTable
from vitrail.errors import DataError
from vitrail.tasks.labels import LABEL
from vitrail.tasks.task import Cell

TAGS, VALUE = "tags", "value"
"""The names of columns of targets that have none."""


def read_listed_rows(title: str, lists: Mapping[str | None, Any], named: Sequence[str]) -> RowTable:
    """Return the table of lists of (image, target), such as (image, ["cat", "indoor"]) or (image, {"age": 34}).

    Args:
        title: the name of the lists in messages.
        lists: the list of each split; that of None if there are no splits.
        named: the columns to keep. A single one also names targets that are no dictionaries.
    """
    pairs: list[Any] = []
    splits: list[str | None] = []
    for split, samples in lists.items():
        if not isinstance(samples, list):
            raise DataError(f"{title} holds a {type(samples).__name__}: give a list of (image, target) pairs")
        for index, sample in enumerate(samples):
            if not isinstance(sample, tuple | list) or len(sample) != 2:
                raise DataError(f"sample {index} is not a pair: give (image, target), such as ('a.jpg', ['cat'])")
            pairs.append(sample)
            splits.append(split)
    if not pairs:
        raise DataError(f"{title} is empty: give (image, target) pairs")
    targets = [to_cell(target) for _, target in pairs]
    columns, problems = _make_columns(targets, named)
    images = ListSource([(image, 0) for image, _ in pairs])
    plain = tuple(columns) if all(isinstance(target, str | int) for target in targets) else ()
    has_splits = set(lists) != {None}
    return RowTable(title, columns, len(pairs), lambda: images, None, splits if has_splits else None, problems, plain)


def _make_columns(targets: Sequence[Any], named: Sequence[str]) -> tuple[dict[str, list[Cell]], dict[int, str]]:
    if not any(isinstance(target, Mapping) for target in targets):
        return {_name_column(targets, named): list(targets)}, {}
    names = dict.fromkeys(str(name) for target in targets if isinstance(target, Mapping) for name in target)
    columns: dict[str, list[Cell]] = {name: [] for name in names if not named or name in named}
    problems: dict[int, str] = {}
    for index, target in enumerate(targets):
        row = target if isinstance(target, Mapping) else {}
        if row is not target:
            problems[index] = f"its target is {str(target)[:50]!r}: give a dictionary of columns, as for the others"
        for name, cells in columns.items():
            cells.append(row.get(name))
    return columns, problems


def _name_column(targets: Sequence[Any], named: Sequence[str]) -> str:
    if len(named) == 1:
        return named[0]
    if any(isinstance(target, list) for target in targets):
        return TAGS
    return VALUE if any(isinstance(target, float) for target in targets) else LABEL


def to_cell(value: Any) -> Any:
    """Return a target as plain values: arrays and tensors as lists or numbers, sets as sorted lists."""
    if isinstance(value, Mapping):
        return {str(name): to_cell(each) for name, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, tuple | list):
        return [to_cell(each) for each in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return to_cell(value.tolist()) if hasattr(value, "tolist") else str(value)
