"""Recognise the task that the columns of a table tell."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from vitrail.data.order import Indices
from vitrail.data.sources.folder import LABEL_COLUMNS, sort_classes
from vitrail.data.tables.row_table import RowTable
from vitrail.errors import ConfigError, DataError
from vitrail.tasks.cells import (
    SEPARATOR,
    explain_joined_tags,
    is_empty,
    is_joined,
    read_good_cells,
    read_name,
    read_number,
    read_yes_or_no,
    split_tags,
    suggest_point,
)
from vitrail.tasks.labels import Labels
from vitrail.tasks.registry import find_task
from vitrail.tasks.tags import Tags
from vitrail.tasks.task import Cell, Task

TAG_COLUMNS = ("tags", "labels", "keywords")
"""Columns that hold tags if no other is named."""
ALWAYS_TAGS = ("tags", "keywords")
"""Columns that hold tags even if no image has more than one."""
MANY_VALUES = 20
"""A column of whole numbers with more different ones is numbers, and not classes, unless it is called as labels are."""
MOSTLY = 0.9
"""The share of filled cells that must be numbers in a column of numbers, or 0 and 1 in one of a tag; the others are
mistakes."""
MORE_THAN_STRAY = 0.1
"""The share of filled cells in a column of labels that must be lists, or fractions, for it to hold no labels."""


@dataclass(frozen=True)
class ColumnFacts:
    """What the cells of a column look like."""

    filled: int
    lists: int
    """Cells with several tags: a list, a list in JSON, or `a|b`."""
    yes_or_no: int
    numbers: int
    fractions: int
    """Cells with a number that is not whole."""
    values: int
    """Different cells that are no lists."""
    comma_numbers: int
    """Cells with a number such as 12,5."""

    @property
    def has_fractions(self) -> bool:
        return self.fractions > 0

    @property
    def is_tags(self) -> bool:
        return self.lists > 0

    @property
    def is_yes_or_no(self) -> bool:
        return self.filled > 0 and self.yes_or_no >= MOSTLY * self.filled

    @property
    def is_numeric(self) -> bool:
        return self.filled > 0 and self.numbers >= MOSTLY * self.filled

    @property
    def has_comma_numbers(self) -> bool:
        """Whether it would be a column of numbers if they were written with points."""
        return self.filled > 0 and not self.is_numeric and self.numbers + self.comma_numbers >= MOSTLY * self.filled

    @property
    def is_measured(self) -> bool:
        """Whether the numbers are measurements, and not the numbers of classes."""
        return self.is_numeric and self.has_fractions

    def forget_stray_cells(self) -> ColumnFacts:
        """Return the facts without lists and fractions that are too few to say that a column of labels holds none."""
        fewest = MORE_THAN_STRAY * self.filled
        return replace(
            self,
            lists=self.lists if self.lists >= fewest else 0,
            fractions=self.fractions if self.fractions >= fewest else 0,
        )

    @property
    def has_many_numbers(self) -> bool:
        return self.is_numeric and (self.has_fractions or self.values > MANY_VALUES)


def inspect_column(column: str, cells: Sequence[Cell]) -> ColumnFacts:
    """Return what the cells of a column look like; equal cells are read once."""
    lists = sum(1 for cell in cells if isinstance(cell, list | tuple))
    counts = Counter(str(cell).strip() for cell in cells if not isinstance(cell, list | tuple) and not is_empty(cell))
    filled = lists + sum(counts.values())
    yes_or_no = numbers = fractions = comma_numbers = 0
    for text, count in counts.items():
        if SEPARATOR in text or _is_json_list(text):
            lists += count
            continue
        yes_or_no += count * _is_yes_or_no(column, text)
        number = _read_number(column, text)
        if number is not None:
            numbers += count
            fractions += count * (math.isfinite(number) and number != round(number))
        comma_numbers += count * bool(suggest_point(text))
    return ColumnFacts(filled, lists, yes_or_no, numbers, fractions, len(counts), comma_numbers)


def _is_json_list(text: str) -> bool:
    if not text.startswith("["):
        return False
    try:
        split_tags(text)
    except DataError:
        return False
    return True


def _is_yes_or_no(column: str, cell: Cell) -> bool:
    try:
        read_yes_or_no(column, cell)
    except DataError:
        return False
    return True


def _read_number(column: str, cell: Cell) -> float | None:
    try:
        return read_number(column, cell)
    except DataError:
        return None


class ColumnGuide:
    """Chooses the columns to learn, and the task, of a table.

    Args:
        table: the table.
        kind: the kind of the task; None to recognise it.
        named: the columns that the user names; empty to find them.
    """

    def __init__(self, table: RowTable, kind: str | None, named: Sequence[str]) -> None:
        table.require(named)
        self.table, self.kind, self.named = table, kind, tuple(named)
        self._facts: dict[str, ColumnFacts] = {}

    def facts(self, column: str) -> ColumnFacts:
        if column not in self._facts:
            self._facts[column] = inspect_column(column, self.table.columns[column])
        return self._facts[column]

    def choose(self) -> tuple[str, tuple[str, ...]]:
        """Return the kind of the task and its columns.

        Raises:
            ConfigError: the kind and the columns do not go together.
            DataError: the columns do not tell what to learn.
        """
        columns = self.named or self._find_columns()
        kind = self.kind or self._recognise(columns)
        self._check(kind, columns)
        return kind, columns

    def _find_columns(self) -> tuple[str, ...]:
        names = list(self.table.columns)
        if not names:
            raise DataError(f"{self.table.title} has no column beside the images: add one with what to learn")
        tags, labels = (
            next((name for name in names if name.lower() in known), None) for known in (TAG_COLUMNS, LABEL_COLUMNS)
        )
        named = (tags or labels) if self.kind == "tags" else (labels or tags)
        if self.kind == "numbers":
            named = named if named and self.facts(named).is_numeric else None
            named = named or self._find_single(lambda facts: facts.is_numeric)
        elif self.kind == "tags" and (named is None or named.lower() not in TAG_COLUMNS):
            switches = self._find_all(lambda facts: facts.is_yes_or_no)
            if len(switches) > 1:
                return switches
            named = self._find_single(lambda facts: facts.is_tags) or named
        elif self.kind == "attributes":
            named = None
        if named or len(names) == 1:
            return (named or names[0],)
        if self.kind is None:
            switches = self._find_all(lambda facts: facts.is_yes_or_no)
            if len(switches) > 1:
                return switches
            if named := self._find_single(lambda facts: facts.is_tags):
                return (named,)
        if self.kind in (None, "numbers") and len(self._find_all(lambda facts: facts.is_numeric)) == len(names):
            return tuple(names)
        if self.kind == "attributes" and not self._find_all(lambda facts: facts.is_tags or facts.has_many_numbers):
            return tuple(names)
        shown = ", ".join(names[:10]) + (" …" if len(names) > 10 else "")
        raise DataError(
            f"{self.table.title} has the columns {shown}: say which to learn, such as labels={names[0]!r} (--labels "
            f"{names[0]}), or several as {','.join(names[:2])!r}"
        )

    def _find_all(self, is_right: Callable[[ColumnFacts], bool]) -> tuple[str, ...]:
        return tuple(name for name in self.table.columns if is_right(self.facts(name)))

    def _find_single(self, is_right: Callable[[ColumnFacts], bool]) -> str | None:
        found = self._find_all(is_right)
        return found[0] if len(found) == 1 else None

    def _recognise(self, columns: tuple[str, ...]) -> str:
        facts = [self.facts(column) for column in columns]
        if len(columns) == 1:
            is_named = columns[0].lower() not in LABEL_COLUMNS
            only = facts[0] if is_named else facts[0].forget_stray_cells()
            if only.is_tags or columns[0].lower() in ALWAYS_TAGS:
                return "tags"
            return "numbers" if only.is_measured or (is_named and only.has_many_numbers) else "labels"
        if all(each.is_yes_or_no for each in facts):
            return "tags"
        if all(each.is_numeric for each in facts) and any(each.has_many_numbers for each in facts):
            return "numbers"
        return "attributes"

    def _check(self, kind: str, columns: tuple[str, ...]) -> None:
        """Raise an error that says what to do next if the columns are none of this kind of task."""
        facts = {column: self.facts(column) for column in columns}
        listed = ", ".join(columns)
        if kind in ("labels", "levels") and len(columns) > 1:
            other = "attributes learns several labels, tags several columns of 0 and 1, numbers several of numbers"
            raise ConfigError(f"task = {kind!r} learns one column, not {listed}: {other}; or name one by labels")
        if empty := [column for column, each in facts.items() if not each.filled]:
            raise DataError(f"{self.table.title}: nothing stands in the column {empty[0]}: fill it, or name another")
        if kind == "tags" and len(columns) > 1:
            for column, each in facts.items():
                if not each.is_yes_or_no:
                    raise ConfigError(
                        f"{listed} cannot be tags, for {column} holds more than 0 and 1: give one column with "
                        f"'a{SEPARATOR}b', or columns of 0 and 1; several labels an image are task 'attributes'"
                    )
        for column, each in facts.items():
            may_be_names = self.kind is None and column.lower() in LABEL_COLUMNS
            if kind == "numbers" or (self.kind is None and kind in ("labels", "attributes") and not may_be_names):
                self._refuse_comma_numbers(column, each)
        if kind == "numbers":
            for column, each in facts.items():
                if 2 * each.numbers < each.filled:
                    raise ConfigError(
                        f"{column} holds text, and task = 'numbers' learns numbers: leave it out of labels, or take "
                        "task 'labels' or 'attributes'"
                    )
        if kind in ("attributes", "labels", "levels") and self.kind is None:
            for column, each in facts.items():
                if each.is_tags and len(columns) > 1:
                    raise ConfigError(
                        f"{column} holds several tags an image, and {listed} together would be one label each: give "
                        f"labels={column!r} alone for tags, or leave it out"
                    )
                if each.has_many_numbers and len(columns) > 1:
                    raise ConfigError(
                        f"{column} holds numbers, and {listed} together would be labels: give labels={column!r} alone "
                        "for numbers, or leave it out; task='attributes' takes its numbers as names"
                    )

    def _refuse_comma_numbers(self, column: str, facts: ColumnFacts) -> None:
        if not facts.has_comma_numbers:
            return
        cells = self.table.columns[column]
        index = next(index for index, cell in enumerate(cells) if suggest_point(cell))
        place = self.table.title if self.table.places is None else self.table.places[index]
        raise DataError(f"{place}: {column} is {cells[index]!r}: write {suggest_point(cells[index])}")


def refuse_joined_tags(table: RowTable, column: str) -> None:
    """Raise a DataError if a column called tags or keywords holds mostly cells such as `indoor, cat`."""
    if column.lower() not in ALWAYS_TAGS:
        return
    cells = table.columns[column]
    joined = [cell for cell in cells if is_joined(cell)]
    if 2 * len(joined) > sum(not is_empty(cell) for cell in cells):
        raise DataError(f"{table.title}, column {column}: {explain_joined_tags(cells)}")


def learn_task(table: RowTable, kind: str, columns: Sequence[str], training: Indices | None = None) -> Task:
    """Return the task of a kind that columns tell. Cells that cannot be read teach nothing; their rows are bad.

    Args:
        table: the table.
        kind: the kind of the task.
        columns: the columns to learn.
        training: the rows to train on; None if there are no splits.
    """
    if kind == "tags" and len(columns) == 1 and inspect_column(columns[0], table.columns[columns[0]]).is_yes_or_no:
        return Tags(names=tuple(columns))
    try:
        if kind == "labels":
            names = set(read_good_cells(partial(read_name, columns[0]), table.columns[columns[0]])) - {""}
            return Labels(names=tuple(sort_classes(names)), column=columns[0])
        everything = range(len(table))
        rows = everything if training is None else training.tolist()
        kind_of_task = find_task(kind)
        task = kind_of_task.learn(take_rows(table, columns, everything if kind_of_task.learns_names else rows))
        return task.learn_values(take_rows(table, columns, [row for row in rows if row not in table.problems]))
    except DataError as error:
        raise DataError(f"{table.title}: {error}") from None


def take_rows(table: RowTable, columns: Iterable[str], rows: Iterable[int]) -> dict[str, list[Cell]]:
    """Return the cells that some rows have in some columns."""
    rows = list(rows)
    return {column: [table.columns[column][row] for row in rows] for column in columns}


def fit_columns(task: Task, table: RowTable, named: Sequence[str]) -> Task:
    """Return a task with the columns of this table: a model's task may have been learned from another layout.

    Raises:
        DataError: the table has no such columns.
    """
    if not named and all(column in table.columns for column in task.columns):
        return task
    if set(named) == set(task.columns):
        table.require(named)
        return task
    if isinstance(task, Tags) and all(name in table.columns for name in (named or task.names)):
        return _fit_tags(task, table, named)
    if "column" not in type(task).model_fields:
        missing = next((column for column in task.columns if column not in table.columns), None)
        table.require(task.columns if missing else named)
        raise DataError(f"the model learned {', '.join(task.columns)}: leave out labels = {','.join(named)!r}")
    kind, columns = ColumnGuide(table, task.kind, named or (_find_similar_column(task, table),)).choose()
    if len(columns) > 1:
        raise DataError(f"the model learned one column of {kind}, not {', '.join(columns)}: name one by labels")
    return task.model_copy(update={"column": columns[0]})


def _find_similar_column(task: Task, table: RowTable) -> str:
    """Return the column that surely holds what the model learned, though it has another name.

    One that is called as labels are, such as species, holds tags only if it holds lists of them.

    Raises:
        DataError: there is no such column.
    """
    tags, labels = ([name for name in table.columns if name.lower() in known] for known in (TAG_COLUMNS, LABEL_COLUMNS))
    if task.kind == "tags":
        labels = [name for name in labels if inspect_column(name, table.columns[name]).is_tags]
    if found := (tags + labels if task.kind == "tags" else labels + tags):
        return found[0]
    missing = next(name for name in task.columns if name not in table.columns)
    there = ", ".join(table.columns) or "none"
    raise DataError(
        f"{table.title} has no column {missing!r}, which the model learned, but {there}: say which holds the "
        f"{task.kind}, as labels='NAME' (--labels NAME)"
    )


def _fit_tags(task: Tags, table: RowTable, named: Sequence[str]) -> Task:
    if not named or set(named) == set(task.names):
        return task.model_copy(update={"column": None})
    if len(named) > 1:
        raise DataError(f"the model knows the tags {', '.join(task.names)}, not {', '.join(named)}: leave out labels")
    return task.model_copy(update={"column": named[0]})
