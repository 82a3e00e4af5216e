"""Read the lines of a CSV; one that a spreadsheet saved in another form is an error that says how to save it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from vitrail.errors import DataError
from vitrail.system.files import open_regular_file

SEPARATORS = {";": "';'", "\t": "tabs"}
"""What stands between the cells of tables that are no CSV, and its name in messages."""


def read_csv_lines(file: BinaryIO, title: str) -> Iterator[str]:
    """Yield the lines of a CSV, and close it.

    Raises:
        DataError: the head has no comma, but ";" or tabs.
    """
    with io.TextIOWrapper(file, newline="", encoding="utf-8-sig") as lines:
        head = next(lines, "")
        found = next((name for mark, name in SEPARATORS.items() if mark in head), None)
        if found and "," not in head:
            raise DataError(f"{title}, line 1: the cells are separated by {found}: save it with commas")
        yield head
        yield from lines


def explain_encoding(path: Path, title: str) -> str:
    """Return a sentence that names the first line of a CSV that is not UTF-8."""
    with open_regular_file(path) as file:
        number = next((number for number, line in enumerate(file, start=1) if not _is_utf8(line)), 1)
    return f"{title}, line {number} cannot be read, for it is not UTF-8: save it as CSV UTF-8"


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
