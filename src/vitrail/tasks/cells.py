"""Read the cells of a table: tags, yes and no, numbers."""

from __future__ import annotations

import json
import math

from vitrail.errors import DataError
from vitrail.tasks.task import Cell

SEPARATOR = "|"
YES, NO = ("1", "true", "yes"), ("0", "false", "no")


def split_tags(cell: Cell) -> list[str]:
    """Return the tags of a cell such as `indoor|cat`, `["indoor", "cat"]` as a list or as JSON; none if it is empty."""
    if cell is None:
        return []
    if isinstance(cell, str):
        text = cell.strip()
        if text.startswith("["):
            try:
                cell = json.loads(text)
            except (ValueError, RecursionError):
                raise DataError(f'{text[:50]!r} is no list in JSON: write ["a", "b"], or a{SEPARATOR}b') from None
        else:
            cell = text.split(SEPARATOR)
    if not isinstance(cell, list | tuple):
        cell = [cell]
    if not all(isinstance(name, str | int | float) for name in cell):
        raise DataError(f"{str(cell)[:50]!r} holds something that is no tag: give names")
    return [name for name in (str(name).strip() for name in cell) if name]


def read_yes_or_no(column: str, cell: Cell) -> bool:
    """Return whether a cell says yes: 1, true or yes; 0, false, no and nothing say no."""
    text = "" if cell is None else str(cell).strip().lower()
    if text not in (*YES, *NO, "", "1.0", "0.0"):
        raise DataError(f"{column} is {str(cell)[:50]!r}: a tag with a column of its own is 1 or 0")
    return text in YES or text == "1.0"


def read_number(column: str, cell: Cell) -> float:
    """Return the number in a cell, NaN if it is empty."""
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return math.nan
    try:
        number = float(str(cell))
    except ValueError:
        raise DataError(f"{column} is {str(cell)[:50]!r}, which is no number") from None
    if math.isinf(number):
        raise DataError(f"{column} is {str(cell)[:50]!r}: give a finite number")
    return number
