"""Read the cells of a table: tags, yes and no, numbers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from vitrail.errors import DataError
from vitrail.tasks.task import Cell

SEPARATOR = "|"
YES, NO = ("1", "true", "yes"), ("0", "false", "no")
LARGEST = 1e30
"""Numbers and their squares must fit what a model computes with."""
Read = TypeVar("Read")
_DECIMAL_COMMA, _THOUSANDS = re.compile(r"[+-]?\d*,\d+"), re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")


def read_good_cells(read: Callable[[Cell], Read], cells: Iterable[Cell]) -> list[Read]:
    """Return what is in cells, without those that cannot be read: a row that is wrong must not spoil all others.

    Raises:
        DataError: none can be read, and why the first cannot.
    """
    found, first_error = list[Read](), None
    for cell in cells:
        try:
            found.append(read(cell))
        except DataError as error:
            first_error = first_error or error
    if first_error is not None and not found:
        raise first_error
    return found


def is_empty(cell: Cell) -> bool:
    """Return whether a cell holds nothing: None, NaN, or a text of spaces at most."""
    return cell is None or (isinstance(cell, str) and not cell.strip()) or (isinstance(cell, float) and cell != cell)


def read_name(column: str, cell: Cell) -> str:
    """Return the name in a cell as text without spaces around it; "" if it is empty. 4.0 is 4, as in a table of text.

    Raises:
        DataError: it is a list.
    """
    if is_empty(cell):
        return ""
    if isinstance(cell, Sequence) and not isinstance(cell, str):
        raise DataError(f"{column} is {str(cell)[:50]!r}: give one name; several names of an image are tags")
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell).strip()


def split_tags(cell: Cell) -> list[str]:
    """Return the tags of a cell such as `indoor|cat`, `["indoor", "cat"]` as a list or as JSON; none if it is empty."""
    if is_empty(cell):
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
    names = [str(name).strip() for name in cell if not is_empty(name)]
    if wrong := next((name for name in names if SEPARATOR in name), None):
        raise DataError(f"the tag {wrong[:50]!r} holds {SEPARATOR}, which stands between tags: give it another name")
    return names


def is_joined(cell: Cell) -> bool:
    """Return whether a cell looks like several tags in one, such as `indoor, cat` or `indoor;cat`."""
    return (
        isinstance(cell, str)
        and ("," in cell or ";" in cell)
        and SEPARATOR not in cell
        and not cell.strip().startswith("[")
    )


def explain_joined_tags(cells: Iterable[Cell]) -> str:
    """Return a sentence on the cells of a column that look like several tags in one; "" if there are none."""
    filled = [cell for cell in cells if not is_empty(cell)]
    joined = [str(cell).strip() for cell in filled if is_joined(cell)]
    if not joined:
        return ""
    return (
        f"{len(joined):,} of {len(filled):,} cells look like several tags separated by ',' or ';', such as "
        f"{joined[0][:50]!r}: write a{SEPARATOR}b, or a list"
    )


def read_yes_or_no(column: str, cell: Cell) -> bool:
    """Return whether a cell says yes: 1, true or yes; 0, false, no and nothing say no."""
    text = "" if cell is None else str(cell).strip().lower()
    if text not in (*YES, *NO, "", "1.0", "0.0"):
        raise DataError(f"{column} is {str(cell)[:50]!r}: a tag with a column of its own is 1 or 0")
    return text in YES or text == "1.0"


def read_number(column: str, cell: Cell) -> float:
    """Return the number in a cell, NaN if it is empty. 1_000 is no number in a table, though it is one in Python."""
    if is_empty(cell):
        return math.nan
    try:
        number = float(str(cell).replace("_", "?"))
    except ValueError:
        point = suggest_point(cell)
        problem = f": write {point}" if point else ", which is no number"
        raise DataError(f"{column} is {str(cell)[:50]!r}{problem}") from None
    if abs(number) > LARGEST:
        raise DataError(f"{column} is {str(cell)[:50]!r}: give a number from {-LARGEST:g} to {LARGEST:g}")
    return number


def suggest_point(cell: Cell) -> str:
    """Return how to write a number with a comma: 12.5 for 12,5, and 1.234 or 1234 for 1,234; "" for other cells."""
    text = cell.strip()[:50] if isinstance(cell, str) else ""
    if not _DECIMAL_COMMA.fullmatch(text):
        return ""
    point = text.replace(",", ".")
    return f"{point} or {text.replace(',', '')}" if _THOUSANDS.fullmatch(text) else point
