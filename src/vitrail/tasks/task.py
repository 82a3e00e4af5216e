"""The interface of a task: what a target looks like, its loss, its metrics, and how outputs become an answer.

A task is a small record that is stored with the weights. Data, training, evaluation, export and serving ask it what
they need to know, so a new task is one file here and an entry in `registry.py`; outside of the package it is one file
that calls `register_task`, such as examples/own_task.py.

    cells of a row ─ encode ─► targets ─┐
    images ─ model ─► outputs ──────────┴─ compute_losses ─► loss
                         └─ activate ─► values ─ answer ─► JSON;  values, targets ─ measure ─► metrics with intervals

Shapes: N or B images, K outputs of the model, V values of an answer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import model_validator
from torch import Tensor

from vitrail.config import Config
from vitrail.system.intervals import LEVEL, NO_ESTIMATE, Estimate, compute_share_limits

Array = NDArray[Any]
Cell = str | int | float | bool | Sequence[Any] | None
"""What a table holds for an image in one column: text, a number, a list, or nothing."""
Targets = dict[str, Array]
"""Arrays by name; the first axis is that of the images."""
DRAWS = 500
"""Resamples of the images from which an interval is read."""
MOST_CELLS, FEWEST_DRAWS = 200_000_000, 100
"""Intervals of many values of many images come from fewer resamples."""


class AnswerLine(NamedTuple):
    """One line of an answer as people see it: in a terminal, in a report, or as a bar on the page."""

    name: str
    text: str
    """The value in words, such as "93.1%" or "34.2 years"."""
    share: float | None = None
    """The length of a bar, from 0 to 1; None for a line without one."""
    is_chosen: bool = True
    """Whether this is a part of the answer, and not only something that was considered."""


class Measure(NamedTuple):
    """A metric with its interval."""

    name: str
    estimate: Estimate
    is_share: bool
    """Whether it is shown in per cent."""
    more_is_better: bool = True


@dataclass(frozen=True)
class TaskMeasures:
    """All metrics of a task on some images."""

    measures: tuple[Measure, ...]
    """The most important first."""
    tables: dict[str, list[list[Any]]] = field(default_factory=dict)
    """For each title a head and rows, such as a row for each tag."""


class Task(Config):
    """What a target is. Each kind of task is a subclass, whose field `kind` names it in files and on the command line.

    Fields are what must travel with the weights: names of tags, the mean of numbers.
    """

    kind: str
    choosing_metric: ClassVar[str] = "loss"
    """The sum in `count` that decides which of two evaluations is better: "accuracy", or the lower "loss"."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for names in (self.output_names, self.value_names):
            if self.kind != "labels" and (not names or len(set(names)) < len(names)):
                raise ValueError(f"the {self.kind} are {', '.join(names) or 'none'}: give one or more different names")
        return self

    def __hash__(self) -> int:
        """Hash what is stored, so that tasks with lists and dictionaries have one too."""
        return hash((type(self), self.model_dump_json()))

    # What a target looks like

    learns_names: ClassVar[bool] = False
    """Whether `learn` reads nothing but names, which those who evaluate need too. Otherwise it also reads values, and
    does not see the rows of val and test."""

    @classmethod
    @abstractmethod
    def learn(cls, columns: Mapping[str, Sequence[Cell]]) -> Self:
        """Return the task of some data: its tags, its range, … `columns` are the cells of its rows.

        Raises:
            DataError: nothing can be learned from them, and why.
        """

    def learn_values(self, columns: Mapping[str, Sequence[Cell]]) -> Self:
        """Return the task with what else the cells of the rows to train on tell; by default the same task.

        For a task with `learns_names`, whose `learn` also sees the rows of val and test.
        """
        return self

    @abstractmethod
    def encode(self, row: Mapping[str, Cell]) -> dict[str, Any]:
        """Return the targets of one image by name, for arrays as of `allocate`.

        Raises:
            DataError: the cells are no target of this task, and why. The caller knows the file and the line.
        """

    @abstractmethod
    def allocate(self, count: int) -> Targets:
        """Return arrays for the targets of so many images, with values that can be computed with until they are set."""

    @abstractmethod
    def stratify(self, targets: Targets) -> NDArray[np.int64]:
        """Return (N,) numbers of groups with similar targets, and −1 for images of which nothing is known.

        Every part of the data gets an equal share of each group, and `data.balance` shows rare groups more often.
        """

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns that a target is read from."""

    # What a model learns

    @property
    @abstractmethod
    def output_names(self) -> tuple[str, ...]:
        """A name for each of the K outputs of the model's head."""

    @abstractmethod
    def compute_losses(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Return the (B,) losses of (B, K) outputs. Targets that are not known cost nothing."""

    def count(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return (B,) measurements by name whose means training shows beside the loss; none by default.

        NaN stands for an image without a known target, and is not counted.
        """
        return {}

    # What a model answers

    @property
    def value_names(self) -> tuple[str, ...]:
        """A name for each of the V values that `activate` gives; by default those of the outputs."""
        return self.output_names

    @property
    def value_scales(self) -> tuple[float, ...] | None:
        """How much each of the V values varies in the data, if they are in its units; None for probabilities.

        A comparison of an export with its model judges differences by it: 0.5 is little for a price, and much for a
        share.
        """
        return None

    @property
    def gives_probabilities(self) -> bool:
        """Whether the values are probabilities, and not numbers in the units of the data."""
        return self.value_scales is None

    @abstractmethod
    def activate(self, outputs: Tensor) -> Tensor:
        """(…, K) outputs → (…, V) values: probabilities, or numbers in the units of the data. Exports contain it."""

    @abstractmethod
    def answer(self, values: NDArray[np.float32], top: int = 5) -> dict[str, Any]:
        """Return the answer for one image's (V,) values as plain data for JSON."""

    @abstractmethod
    def describe(self, values: NDArray[np.float32], top: int = 5) -> list[AnswerLine]:
        """Return the answer for one image's (V,) values as lines for people, the most important first."""

    @abstractmethod
    def flatten(self, values: NDArray[np.float32]) -> dict[str, str | float]:
        """Return the answer for one image's (V,) values as columns of a table, the same for all images."""

    def make_example(self) -> NDArray[np.float32]:
        """Return the (V,) values of a model that knows nothing, for an answer whose form matters."""
        values: NDArray[np.float32] = self.activate(torch.zeros(len(self.output_names))).numpy()
        return values

    def summarise(self) -> str:
        """Return what is answered in a few words, such as "12 tags"."""
        count = len(self.value_names)
        return f"{count:,} {self.kind.removesuffix('s') if count == 1 else self.kind}"

    def describe_values(self) -> str:
        """Return a sentence about what `learn_values` found, for people; by default nothing."""
        return ""

    # What an evaluation says

    worst_words: ClassVar[str] = "the images with the largest loss"
    """Which images `rank_errors` puts first, for the title of their list."""

    @abstractmethod
    def measure(self, values: Array, targets: Targets) -> TaskMeasures:
        """Return the metrics of (N, V) float64 values, which do not depend on the order of the images.

        Only images with a known target count; a metric that is not defined is NaN.
        """

    def rank_errors(self, values: Array, targets: Targets, losses: Array) -> Array:
        """Return (N,) numbers: the larger, the worse the answer; 0 or NaN for an answer that is no mistake.

        Args:
            values: (N, V) float64.
            targets: what is true.
            losses: (N,), as of `compute_losses`; they are the errors by default.
        """
        return losses

    def describe_target(self, target: Mapping[str, Any]) -> str:
        """Return what is true of one image in words; `target` is what `encode` returned for it."""
        return ", ".join(f"{name} {np.asarray(value).tolist()}" for name, value in target.items())

    def draw(self, values: Array, targets: Targets, folder: Path) -> list[Path]:
        """Draw the figures of an evaluation into a folder and return the .png files; none by default."""
        return []

    def tune(self, values: Array, targets: Targets) -> Self:
        """Return the task with what is chosen by images, such as a threshold for each tag. By default nothing is."""
        return self

    def compare(self, expected: Array, found: Array) -> float:
        """Return how well (N, V) values of an export agree with the model's: the share of images with the same answer.

        By default answers are the same if the chosen lines of `describe` are: the names of those with a share, whatever
        their shares, and the names and texts of the others.
        """
        answers = [
            [
                {(line.name, line.text if line.share is None else "") for line in self.describe(row) if line.is_chosen}
                for row in values
            ]
            for values in (expected, found)
        ]
        return float(np.mean([a == b for a, b in zip(*answers, strict=True)]))


def format_share(share: float) -> str:
    """Return a share in per cent, such as "93.1%" or "0.02%": with more digits if it is small."""
    digits = 0 if share >= 0.9995 else 1 if share >= 0.001 or share == 0 else 2
    return f"{share:.{digits}%}"


def shorten_names(names: Sequence[str], most: int = 5) -> str:
    """Return the first names in a line, such as "Birman, Bombay, … (37 in all)"."""
    return ", ".join(names[:most]) + (f", … ({len(names)} in all)" if len(names) > most else "")


def slice_parts(sizes: Iterable[int]) -> tuple[slice, ...]:
    """Return the slices of parts that follow each other: sizes 2 and 3 are 0:2 and 2:5."""
    return tuple(slice(*ends) for ends in pairwise(accumulate(sizes, initial=0)))


def estimate_by_resampling(measure: Callable[[NDArray[np.int64]], float], count: int, draws: int = DRAWS) -> Estimate:
    """Return a metric of images with the interval of its bootstrap distribution (percentiles).

    If all resamples have the same value, such as a perfect one, they say nothing about other images. The interval is
    then that of a share with this value of as many images; there is none for a metric below 0 or above 1.

    Args:
        measure: the metric of the images with these numbers; a number may occur several times.
        count: the number of images.
        draws: how often images are drawn.
    """
    value = float(measure(np.arange(count))) if count else float("nan")
    if not np.isfinite(value):
        return NO_ESTIMATE
    rng = np.random.default_rng(0)
    drawn = np.array([measure(rng.integers(count, size=count)) for _ in range(draws)], dtype=float)
    drawn = drawn[np.isfinite(drawn)]
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) if len(drawn) else (value, value)
    if low < high:
        return Estimate(value, min(float(low), value), max(float(high), value))
    limits = compute_share_limits(value, count) if 0 <= value <= 1 else (float("nan"), float("nan"))
    return Estimate(value, *limits)


def choose_draws(cells: int) -> int:
    """Return how many resamples are worth their time for a metric of so many values."""
    return int(np.clip(MOST_CELLS / max(cells, 1), FEWEST_DRAWS, DRAWS))


def to_tensors(targets: Targets) -> dict[str, Tensor]:
    """Return the arrays as tensors that share their memory."""
    return {name: torch.from_numpy(array) for name, array in targets.items()}
