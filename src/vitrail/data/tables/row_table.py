"""The rows of a table about images, in memory, column by column."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitrail.data.sources.folder import LABEL_COLUMNS, FileSource
from vitrail.data.sources.image_files import make_printable
from vitrail.data.sources.source import Source
from vitrail.data.sources.split_columns import SplitColumnFinder
from vitrail.errors import DataError, did_you_mean
from vitrail.tasks.task import Cell, Task

MOST_CELLS = 100_000_000
"""Cells of a table that are kept in memory."""
MOST_COLUMNS = 20_000
MOST_SHARED = 1 << 16
"""Different texts of a column that are looked for, so that equal ones take memory once."""


class TablePlaces(Sequence[str]):
    """Where each row stands, such as "labels.csv, line 7"."""

    def __init__(self, title: str, unit: str, numbers: Sequence[int] | range) -> None:
        self.title, self.unit, self.numbers = title, unit, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        return f"{self.title}, {self.unit} {self.numbers[index]}"


class TableRows(Sequence[Mapping[str, Cell]]):
    """The rows of some columns; each is made when it is asked for."""

    def __init__(self, columns: Mapping[str, Sequence[Cell]], length: int) -> None:
        self.columns, self.length = columns, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Mapping[str, Cell]:  # type: ignore[override]
        if not -self.length <= index < self.length:
            raise IndexError(index)
        return {name: cells[index] for name, cells in self.columns.items()}


@dataclass
class RowTable:
    """What a table says about N images."""

    title: str
    """Its name in messages."""
    columns: dict[str, list[Cell]]
    """The N cells of each column that may be a target."""
    count: int
    """N."""
    open_images: Callable[[], Source]
    """Opens the N images; their labels are not used."""
    places: Sequence[str] | None = None
    """Where each row stands, for messages; None if the names of the images tell."""
    splits: list[str | None] | None = None
    """The split of each row as the table names it; None for a row that does not tell. None if there are no splits."""
    problems: dict[int, str] = field(default_factory=dict)
    """Why rows cannot be used whatever the task, by their numbers."""
    plain_labels: tuple[str, ...] = ()
    """Columns of labels that `open_data` reads by itself, so that data with such a column needs no table."""
    file: Path | None = None
    """The file of the table, if the names of the images are relative to its folder."""
    task: Task | None = None
    """The task that was stored with the data."""
    split_columns: dict[str, list[str]] = field(default_factory=dict)
    """Columns that tell splits and are not called split, and how each writes them; empty if there are splits."""

    def __len__(self) -> int:
        return self.count

    def select(self, names: Iterable[str]) -> TableRows:
        """Return the rows of some columns."""
        return TableRows({name: self.columns[name] for name in names}, len(self))

    def require(self, names: Iterable[str]) -> None:
        """Raise a DataError that names the nearest if there is no such column."""
        for name in names:
            if name not in self.columns:
                hint = did_you_mean(name, self.columns)
                there = f": there are {', '.join(self.columns)}" if self.columns else ": it has none"
                raise DataError(f"{self.title} has no column {name!r} to learn{hint or there}")


class RowCollector:
    """Collects the rows of a table about image files.

    Args:
        title: the name of the table in messages.
        keep: the columns to keep; all if empty.
        unit: what the numbers of rows count.
    """

    def __init__(self, title: str, keep: Sequence[str] = (), unit: str = "line") -> None:
        self.title, self.keep, self.unit = title, frozenset(keep), unit
        self.columns: dict[str, list[Cell]] = {}
        self.splits: list[str | None] = []
        self.lines, self.starts, self.names = array("q"), array("q", [0]), bytearray()
        self.problems: dict[int, str] = {}
        self.is_plain = True
        """Whether the names of the columns are as the table has them, without spaces around."""
        self._shared: dict[str, dict[str, str]] = {}
        self._split_columns = SplitColumnFinder()

    def add(self, line: int, image: object, split: str | None, cells: Mapping[str, Cell], problem: str = "") -> None:
        """Add a row. One that cannot be used is kept with the reason, so that it is counted."""
        index = len(self.lines)
        try:
            name = b"" if problem else encode_path(image)
        except DataError as error:
            name, problem = b"", str(error)
        if problem:
            self.problems[index], cells = problem, {}  # a row that is wrong teaches nothing
        self.lines.append(line)
        self.names += name
        self.starts.append(len(self.names))
        self.splits.append(split)
        self._split_columns.add(cells)
        for column in cells:
            if column not in self.columns and (not self.keep or column in self.keep):
                if len(self.columns) >= MOST_COLUMNS:
                    raise DataError(f"{self.title} has more than {MOST_COLUMNS:,} columns")
                self.columns[column], self._shared[column] = [None] * index, {}
        for column, values in self.columns.items():
            cell = cells.get(column)
            values.append(self._share(column, cell) if isinstance(cell, str) else cell)
        if (index + 1) * max(len(self.columns), 1) > MOST_CELLS:
            raise DataError(
                f"{self.title} has more than {MOST_CELLS:,} cells: name the columns to learn by labels (--labels)"
            )

    def _share(self, column: str, text: str) -> str:
        shared = self._shared[column]
        return shared.setdefault(text, text) if len(shared) < MOST_SHARED else shared.get(text, text)

    def finish(self, file: Path) -> RowTable:
        """Return the table of a file; the names of images are relative to its folder, or absolute."""
        if not self.lines:
            raise DataError(f"{self.title} lists no images")
        if len(self.problems) == len(self.lines):
            raise DataError(f"{self.title}: no row can be used; {self.unit} {self.lines[0]}: {self.problems[0]}")
        files = {
            "names": np.frombuffer(bytes(self.names), np.uint8),
            "starts": np.array(self.starts),
            "labels": np.full(len(self.lines), -1, np.int32),
        }
        splits = self.splits if any(split is not None for split in self.splits) else None
        is_plain = self.is_plain and file.suffix.lower() == ".csv"
        plain = [name for name in self.columns if name.lower() in LABEL_COLUMNS] if is_plain else []
        return RowTable(
            self.title,
            self.columns,
            len(self.lines),
            lambda: FileSource(file.parent, files, ()),
            TablePlaces(self.title, self.unit, self.lines),
            splits,
            self.problems,
            tuple(plain),
            file,
            split_columns=self._split_columns.find() if splits is None else {},
        )


def encode_path(image: object) -> bytes:
    """Return the bytes of a path in a table; raise a DataError if a cell is none."""
    if not isinstance(image, str) or not image:
        raise DataError(f"the image is {str(image)[:50]!r}, which is no path" if image else "there is no image")
    try:
        name = os.fsencode(image)
    except UnicodeError:
        name = b"\0"
    if b"\0" in name:
        raise DataError(f"the image is {image[:50]!a}, which no file can be called")
    return name


def name_table(path: Path) -> str:
    """Return the name of a table's file for messages."""
    return make_printable(path)
