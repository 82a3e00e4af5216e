"""The cells of a table as values with a type, so that shards hold numbers, lists and names, and not all as text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from vitrail.errors import DataError
from vitrail.tasks.cells import is_empty, read_number, read_yes_or_no, split_tags
from vitrail.tasks.tags import Tags
from vitrail.tasks.task import Cell, Task


def find_cell_kind(task: Task, column: str) -> str:
    """Return the type of a column in Parquet: "string", "float64", "int8" or "list string"."""
    if isinstance(task, Tags):
        return "int8" if task.column is None else "list string"
    return "float64" if task.kind == "numbers" else "string"


def type_cells(task: Task, cells: Mapping[str, Cell]) -> dict[str, Any]:
    """Return the cells of a task's columns with their types; None for what is empty.

    Raises:
        DataError: they are no cells of this task.
    """
    missing = [column for column in task.columns if column not in cells]
    if missing:
        raise DataError(f"this source has no cells of the column {missing[0]}, so its targets cannot be packed")
    return {column: _type_cell(task, column, cells[column]) for column in task.columns}


def _type_cell(task: Task, column: str, cell: Cell) -> Any:
    kind = find_cell_kind(task, column)
    if kind == "list string":
        return split_tags(cell)
    if kind == "int8":
        return int(read_yes_or_no(column, cell))
    if is_empty(cell):
        return None
    if kind == "float64":
        number = read_number(column, cell)
        return None if math.isnan(number) else number
    return cell if isinstance(cell, str) else json.dumps(cell)
