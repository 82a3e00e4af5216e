"""Check the targets of a task: names that are probably misspelt, empty rows, constant columns, numbers far off.

It looks at the cells of the table, not at images.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitrail.data.check.finding import DataFinding
from vitrail.data.check.near_names import find_misspelt
from vitrail.data.sources.annotated import find_bad_rows, find_row_place
from vitrail.data.sources.source import Source
from vitrail.errors import DataError
from vitrail.system.results import format_count
from vitrail.tasks.cells import explain_joined_tags, is_empty, read_name, read_number, read_yes_or_no, split_tags
from vitrail.tasks.tags import Tags
from vitrail.tasks.task import Cell, Task

FAR = 10
"""How many deviations from the median a number is that is probably wrong."""
MOST_FAR = 0.01
"""If a larger share of the numbers is so far, they are of that kind."""
NORMAL = 1.4826
"""The standard deviation of a normal distribution, in median distances from its median."""
LEAST_NUMBERS = 10
"""Fewer numbers do not tell which of them is far off."""

Row = tuple[str, int, Mapping[str, Cell]]
"""A split, the number of an image in it, and its cells."""


@dataclass
class TargetReport:
    """What is strange about targets, and how often each occurs."""

    findings: list[DataFinding] = field(default_factory=list)
    tables: dict[str, list[list[Any]]] = field(default_factory=dict)
    """For each title a head and rows: the images of each tag, or the range of each number."""
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_targets(sources: Mapping[str, Source]) -> TargetReport | None:
    """Return what is strange about the targets of all splits; None for images without a table."""
    task = next(iter(sources.values())).task
    rows: list[Row] = []
    for split, source in sources.items():
        bad = find_bad_rows(source)
        rows += [(split, index, source.cells(index)) for index in range(len(source)) if index not in bad]
    if not rows or any(column not in rows[0][2] for column in task.columns):
        return None
    checker = _TargetChecker(task, sources, rows)
    if isinstance(task, Tags):
        checker.check_tags(task)
    elif task.kind == "numbers":
        checker.check_numbers()
    else:
        checker.check_names()
    return checker.report


def list_untaught(what: str, counts: Mapping[str, Counter[str]], splits: Sequence[str]) -> list[DataFinding]:
    """Return a finding for each name that images of other splits have and none to train on; none without "train".

    Args:
        what: what the names are, such as "the tag".
        counts: how many images of each split have each name.
        splits: the splits of the data.
    """
    findings = []
    for name, each in counts.items() if "train" in splits else ():
        if not each["train"] and (images := sum(each.values())):
            where = " and ".join(split for split in splits if each[split])
            has = f"{format_count(images, 'image')} of {where} {'has' if images == 1 else 'have'} it"
            findings.append(DataFinding("untaught", "all", f"{what} {name!r}", f"{has}, and none of train"))
    return findings


class _TargetChecker:
    """Collects the findings about the rows of all splits that can be used."""

    def __init__(self, task: Task, sources: Mapping[str, Source], rows: Sequence[Row]) -> None:
        self.task, self.sources, self.rows, self.report = task, sources, rows, TargetReport()

    def check_tags(self, task: Tags) -> None:
        if task.column is None:
            tags = [[n for n in task.names if read_yes_or_no(n, cells[n])] for _, _, cells in self.rows]
        else:
            tags = [split_tags(cells[task.column]) for _, _, cells in self.rows]
            if joined := explain_joined_tags(cells[task.column] for _, _, cells in self.rows):
                self._add("joined", None, task.column, joined)
        counts = self._count(tags, task.names)
        self._add_misspelt("tag", counts, tags)
        for name, each in counts.items():
            if sum(each.values()) in (0, len(self.rows)):
                who = "every image has it" if sum(each.values()) else "no image has it"
                self._add("constant", None, f"the tag {name!r}", f"{who}, so there is nothing to learn")
        self.report.findings += list_untaught("the tag", counts, list(self.sources))
        self._add_empty([not each for each in tags], "has no tag")
        self._tabulate("tag", "tags", counts)

    def check_names(self) -> None:
        """Check columns with one name an image: labels, levels, attributes, or those of another task."""
        columns = {
            column: [_read_name(column, cells[column]) for *_, cells in self.rows] for column in self.task.columns
        }
        for column, names in columns.items():
            lists = [[name] if name else [] for name in names]
            counts = self._count(lists, ())
            self._add_misspelt(column, counts, lists)
            self._add_missing(column, [not name for name in names], "nothing")
            if len(counts) == 1:
                self._add_constant(column, next(iter(counts)))
            self.report.findings += list_untaught(column, counts, list(self.sources))
            self._tabulate(column, f"values of {column}", counts)
        self._add_empty([not any(names) for names in zip(*columns.values(), strict=True)], "has nothing to learn")

    def check_numbers(self) -> None:
        table: list[list[Any]] = [["column", "images", "missing", "least", "median", "mean", "most"]]
        columns = {
            column: np.array([read_number(column, cells[column]) for *_, cells in self.rows])
            for column in self.task.columns
        }
        for column, numbers in columns.items():
            known = numbers[~np.isnan(numbers)]
            self._add_missing(column, np.isnan(numbers).tolist(), "no number")
            if not len(known):
                continue
            middle = float(np.median(known))
            table.append(
                [
                    *(column, len(known), len(numbers) - len(known), float(known.min()), middle),
                    *(float(known.mean()), float(known.max())),
                ]
            )
            if known.min() == known.max():
                self._add_constant(column, f"{middle:g}")
            self._add_far(column, numbers, middle)
            count = format_count(len(known), "number")
            self.report.lines.append(f"{column}: {count} from {known.min():g} to {known.max():g}, median {middle:g}")
        self._add_empty(np.isnan(np.stack(list(columns.values()))).all(axis=0).tolist(), "has no number")
        self.report.tables["Numbers"] = table

    def _count(self, names: Sequence[Sequence[str]], known: Sequence[str]) -> dict[str, Counter[str]]:
        """Return how many images of each split have each name."""
        counts: dict[str, Counter[str]] = {name: Counter() for name in known}
        for (split, *_), each in zip(self.rows, names, strict=True):
            for name in set(each):
                counts.setdefault(name, Counter())[split] += 1
        return counts

    def _add_misspelt(self, what: str, counts: Mapping[str, Counter[str]], names: Sequence[Sequence[str]]) -> None:
        totals = {name: sum(each.values()) for name, each in counts.items()}
        misspelt = find_misspelt(totals)
        for row, each in zip(self.rows, names, strict=True):
            for name in each:
                if name in misspelt:
                    meant = misspelt[name]
                    sentence = (
                        f"the {what} {name!r} of {format_count(totals[name], 'image')} is probably "
                        f"{meant!r}, as of {format_count(totals[meant], 'image')}"
                    )
                    self._add("misspelt", row, "", sentence)

    def _add_missing(self, column: str, is_missing: Sequence[bool], what: str) -> None:
        places = [index for index, missing in enumerate(is_missing) if missing]
        if places:
            such = self._locate(self.rows[places[0]])
            share = f"{len(places):,} of {format_count(len(self.rows), 'row')}"
            self._add("missing", None, column, f"{share} have {what} there, such as {such}")

    def _add_empty(self, is_empty_row: Sequence[bool], sentence: str) -> None:
        if 2 * sum(is_empty_row) > len(self.rows):
            share = f"{sum(is_empty_row):,} of {format_count(len(self.rows), 'row')}"
            self.report.notes.append(f"{share} have nothing to learn: is the table whole?")
            return
        for row, empty in zip(self.rows, is_empty_row, strict=True):
            if empty:
                self._add("empty", row, "", sentence)

    def _add_constant(self, column: str, value: str) -> None:
        self._add("constant", None, column, f"is always {value}, so there is nothing to learn")

    def _add_far(self, column: str, numbers: Any, middle: float) -> None:
        known = numbers[~np.isnan(numbers)]
        deviation = NORMAL * float(np.median(np.abs(known - middle))) or float(known.std())
        if len(known) < LEAST_NUMBERS or not deviation:
            return
        distances = np.nan_to_num(np.abs(numbers - middle) / deviation)
        far = np.flatnonzero(distances > FAR)
        if len(far) > max(MOST_FAR * len(known), 1):
            self.report.notes.append(
                f"{column}: {format_count(len(far), 'number')} far from the median: it is that kind"
            )
            return
        for index in far.tolist():
            how_far = f"{distances[index]:,.0f} deviations from the median {middle:g}"
            self._add("outlier", self.rows[index], "", f"{column} is {numbers[index]:g}, {how_far}")

    def _tabulate(self, what: str, title: str, counts: Mapping[str, Counter[str]]) -> None:
        splits = list(self.sources)
        by_count = sorted(counts, key=lambda name: (sum(counts[name].values()), name))
        head: list[Any] = [what, *splits, *(["all"] if len(splits) > 1 else [])]
        rows = [
            [
                name,
                *(counts[name][split] for split in splits),
                *([sum(counts[name].values())] if len(splits) > 1 else []),
            ]
            for name in by_count
        ]
        self.report.tables[title[:1].upper() + title[1:]] = [head, *rows]
        if by_count:
            sides = [f"{name} ({sum(counts[name].values()):,})" for name in (by_count[0], by_count[-1])]
            self.report.lines.append(f"{title}: {len(by_count):,}, from {sides[0]}, the rarest, to {sides[1]}")

    def _locate(self, row: Row) -> str:
        """Return where a row stands, or the name of its image."""
        split, index, _ = row
        return find_row_place(self.sources[split], index) or self.sources[split].display_name(index)

    def _add(self, kind: str, row: Row | None, name: str, sentence: str) -> None:
        split = row[0] if row else next(iter(self.sources)) if len(self.sources) == 1 else "all"
        self.report.findings.append(DataFinding(kind, split, self._locate(row) if row else name, sentence))


def _read_name(column: str, cell: Cell) -> str:
    try:
        return read_name(column, cell)
    except DataError:  # a list, of a task of someone's own
        return str(cell)


def describe_cells(task: Task, cells: Mapping[str, Cell]) -> str:
    """Return the cells of a task's columns on one line."""
    return ", ".join(f"{column} {'nothing' if is_empty(cells[column]) else cells[column]}" for column in task.columns)
