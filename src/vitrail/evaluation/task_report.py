"""What an evaluation says of a model with any other task than one label: tags, numbers, levels, attributes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail.errors import ConfigError, did_you_mean
from vitrail.evaluation.report import describe_engine, format_estimate
from vitrail.system.intervals import Estimate
from vitrail.system.results import Result, Rows, format_value, to_plain
from vitrail.tasks.task import AnswerLine, Measure, TaskMeasures

MOST_ROWS = 10
"""Rows of a table, of the worst images and of the broken ones that a person sees; `to_dict` has all."""


@dataclass(frozen=True)
class WorstImage:
    """An image with one of the worst answers."""

    index: int
    """Its number in the source."""
    image: str
    error: float
    """How wrong the answer is, as of `Task.rank_errors`."""
    truth: str
    """What is true, in words."""
    lines: tuple[AnswerLine, ...]
    """What the model answers."""
    answer: Mapping[str, Any]
    """The same as plain data, as `vitrail predict --json` gives it."""

    @property
    def words(self) -> str:
        """The answer on one line: what was chosen, with its value."""
        return join_chosen(self.lines)


@dataclass(frozen=True)
class UnusedImage:
    """An image that could not be used: it cannot be read, or its row in the table is no target."""

    index: int
    image: str
    reason: str


@dataclass(frozen=True, repr=False)
class TaskReport(Result):
    """Everything measured of one model on one data set, for any task but one label an image."""

    model: str
    data: str
    part: str | None
    kind: str
    """The task: tags, numbers, levels or attributes."""
    images: int
    """Images that were scored."""
    left_out: tuple[UnusedImage, ...]
    """Images that could not be used, and why."""
    measured: TaskMeasures
    """The measures with their intervals, the most important first, and tables."""
    worst: tuple[WorstImage, ...]
    """The images with the worst answers, the worst first."""
    worst_words: str
    """Which images these are, in words."""
    about: dict[str, Any] = field(default_factory=dict)
    """Device, precision, the library that computed, time."""
    was_trained_on: bool = False
    """Whether the model is known to have learned from these images."""
    chose_weights: bool = False
    """Whether the model's weights are known to be those of a training that were best on these images."""
    files: tuple[Path, ...] = ()
    """report.json and the figures, if they were written."""

    @property
    def broken(self) -> int:
        """The number of images that could not be used."""
        return len(self.left_out)

    @property
    def first(self) -> Measure:
        """The most important measure."""
        return self.measured.measures[0]

    def __getitem__(self, name: str) -> Estimate:
        """Return a measure by its name, such as `report["mAP"]`."""
        found = {measure.name: measure.estimate for measure in self.measured.measures}
        if name not in found:
            hint = did_you_mean(name, found) or ":"
            raise ConfigError(f"there is no measure {name!r}{hint} there are {', '.join(found)}")
        return found[name]

    def measures(self) -> list[tuple[str, Estimate, bool]]:
        """Return the name and the value of each measure, and whether it is a share, which is shown in percent."""
        return [(measure.name, measure.estimate, measure.is_share) for measure in self.measured.measures]

    def summary(self) -> Rows:
        """Return what was evaluated, the measures with their intervals, and what a reader must know."""
        rows = [("model", self.model), ("data", f"{self.data}, {self.part}" if self.part else self.data)]
        rows += [("task", self.kind), ("images", f"{self.images:,}")]
        for name, estimate, is_share in self.measures():
            value, low, high = format_estimate(estimate, is_share)
            rows.append((name, f"{value} (95% interval {low} to {high})"))
        if self.about:
            rows.append(("computed", describe_engine(self.about)))
        if self.left_out:
            rows.append(("left out", "; ".join(self.describe_left_out())))
        if self.was_trained_on:
            rows.append(("warning", "the model has learned from these very images"))
        if self.chose_weights:
            rows.append(("warning", "these images chose the weights: on new ones it will do a little worse"))
        return [*rows, *(("written", str(path)) for path in self.files[:1])]

    def describe_left_out(self) -> list[str]:
        """Return a line for each of the first images that could not be used, and one for the rest."""
        lines = [f"{each.image}: {each.reason}" for each in self.left_out[:MOST_ROWS]]
        rest = self.broken - len(lines)
        return [*lines, f"and {rest:,} more; `vitrail data check` names them all"] if rest else lines

    def tables(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """Return the task's tables and the worst images, `MOST_ROWS` rows of each."""
        tables: dict[str, Sequence[Sequence[str]]] = {}
        for title, (head, *rows) in self.measured.tables.items():
            cells = [[format_cell(cell) for cell in row] for row in rows[:MOST_ROWS]]
            more = f" ({MOST_ROWS} of {len(rows):,})" if len(rows) > MOST_ROWS else ""
            tables[title + more] = [[str(cell) for cell in head], *cells]
        if self.worst:
            rows = [[each.image, each.words, each.truth] for each in self.worst[:MOST_ROWS]]
            tables[self.worst_words] = [["image", "answer", "truth"], *rows]
        return tables

    def figures(self) -> Sequence[Path]:
        """Return the figures, if they were written."""
        return [path for path in self.files if path.suffix == ".png"]

    def to_dict(self) -> dict[str, Any]:
        """Return what report.json holds."""
        plain = ("model", "data", "part", "images", "broken")
        measures = [
            {"name": measure.name, **measure.estimate.to_dict(), "more_is_better": measure.more_is_better}
            for measure in self.measured.measures
        ]
        worst = [
            {"index": each.index, "image": each.image, "error": each.error, "answer": each.answer, "truth": each.truth}
            for each in self.worst
        ]
        return {
            "task": self.kind,
            **{name: getattr(self, name) for name in plain},
            "left_out": to_plain(self.left_out),
            "measures": measures,
            "tables": to_plain(self.measured.tables),
            "worst_images": to_plain(worst),
            "was_trained_on": self.was_trained_on,
            "chose_weights": self.chose_weights,
            "about": self.about,
        }


def format_cell(cell: Any) -> str:
    """Return a cell of a task's table as text; "–" for what is not known."""
    return "–" if cell is None or (isinstance(cell, float) and not math.isfinite(cell)) else format_value(cell)


def join_chosen(lines: Sequence[AnswerLine]) -> str:
    """Return the chosen lines of an answer as one, such as "indoor 93.1%, cat 80.4%"; "none" if nothing is."""
    return ", ".join(f"{line.name} {line.text}" for line in lines if line.is_chosen) or "none"
