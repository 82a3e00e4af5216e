"""Numbers: one or several measurements of an image, such as an age, or a width and a height (regression).

In a table, each number has a column. An empty cell is not known: the image still teaches the other columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import DataError
from vitrail.system.intervals import estimate_mean
from vitrail.tasks.cells import LARGEST, read_good_cells, read_number
from vitrail.tasks.draw_measures import draw_scatter
from vitrail.tasks.number_metrics import estimate_r2, estimate_spearman, group_by_rank
from vitrail.tasks.task import AnswerLine, Array, Cell, Measure, Targets, Task, TaskMeasures, choose_draws

NUMBERS = "numbers"
"""The name of the target: (N, C) float32 in units of the data, NaN if it is not known."""
FENCES = 3
LEAST_STEPS = 100
"""How many float32 numbers there must be within a standard deviation of a column."""
SAME = 0.1
"""Two answers agree if they differ by less than this share of a standard deviation."""


class Numbers(Task):
    """A number for each of several columns. The model's outputs are in standard deviations from the mean."""

    kind: Literal["numbers"] = "numbers"
    names: Annotated[tuple[str, ...], Field(min_length=1)]
    """The columns, in the order of the outputs."""
    means: tuple[Annotated[float, Field(allow_inf_nan=False)], ...]
    deviations: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...]
    """The mean and the standard deviation of each column; the deviation is 1 where all numbers are equal."""

    worst_words: ClassVar[str] = "the images with the largest errors"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not len(self.names) == len(self.means) == len(self.deviations):
            counts = f"{len(self.names)} columns, {len(self.means)} means and {len(self.deviations)} deviations"
            raise ValueError(f"there are {counts}: give one for each column")
        return self

    @classmethod
    def learn(cls, columns: Mapping[str, Sequence[Cell]]) -> Self:
        means, deviations, are_constant = list[float](), list[float](), list[bool]()
        for column, cells in columns.items():
            numbers = np.array(read_good_cells(partial(read_number, column), cells), np.float64)
            numbers = numbers[~np.isnan(numbers)]
            if not len(numbers):
                raise DataError(f"the column {column} has no number in any row")
            are_constant.append(bool(numbers.min() == numbers.max()) or float(numbers.std()) < 1 / LARGEST)
            if not are_constant[-1]:
                check_digits(column, numbers)
            numbers = clip_outliers(numbers)
            means.append(float(numbers.mean()))
            deviations.append(1.0 if are_constant[-1] else float(numbers.std()))
        if all(are_constant):
            found = ", ".join(f"{name} is always {mean:g}" for name, mean in zip(columns, means, strict=True))
            raise DataError(f"there is nothing to learn: {found}; give a column whose numbers differ")
        return cls(names=tuple(columns), means=tuple(means), deviations=tuple(deviations))

    def encode(self, row: Mapping[str, Cell]) -> dict[str, Any]:
        return {NUMBERS: np.array([read_number(name, row.get(name)) for name in self.names], np.float32)}

    def allocate(self, count: int) -> Targets:
        return {NUMBERS: np.full((count, len(self.names)), np.nan, np.float32)}

    def stratify(self, targets: Targets) -> NDArray[np.int64]:
        """Return the tenth in which the sum of an image's standardised numbers lies."""
        distances = (targets[NUMBERS].astype(np.float64) - self.means) / self.deviations
        return group_by_rank(np.where(np.isnan(distances).all(axis=1), np.nan, np.nansum(distances, axis=1)))

    @property
    def columns(self) -> tuple[str, ...]:
        return self.names

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.names

    @property
    def value_scales(self) -> tuple[float, ...]:
        return self.deviations

    def compute_losses(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Return smooth L1 losses: squared below one standard deviation, and linear beyond.

        So a cell that was typed wrongly, such as an age of 340, cannot outweigh all others in its batch.
        """
        expected, is_known = self._standardise(targets[NUMBERS])
        return torch.where(is_known, F.smooth_l1_loss(outputs, expected, reduction="none"), 0).mean(dim=1)

    def count(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        expected, is_known = self._standardise(targets[NUMBERS])
        errors = torch.where(is_known, (outputs - expected).abs(), torch.nan).nanmean(dim=1)
        return {"MAE": errors * self.deviations[0]} if len(self.names) == 1 else {"standardised-MAE": errors}

    def _standardise(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return numbers as the model gives them, 0 for those that are not known, and which are known."""
        scales = zip(numbers.nan_to_num().unbind(dim=-1), self.means, self.deviations, strict=True)
        return torch.stack([(each - mean) / deviation for each, mean, deviation in scales], dim=-1), ~numbers.isnan()

    def activate(self, outputs: Tensor) -> Tensor:
        # By plain numbers, not by a tensor of them: a CUDA graph must not copy from the CPU while it is recorded.
        scales = zip(outputs.unbind(dim=-1), self.means, self.deviations, strict=True)
        return torch.stack([each * deviation + mean for each, mean, deviation in scales], dim=-1)

    def answer(self, values: NDArray[np.float32], top: int = 5) -> dict[str, Any]:
        return {"numbers": self.flatten(values)}

    def describe(self, values: NDArray[np.float32], top: int = 5) -> list[AnswerLine]:
        lines = zip(self.names, values, self.deviations, strict=True)
        return [AnswerLine(name, format_number(float(value), deviation)) for name, value, deviation in lines]

    def flatten(self, values: NDArray[np.float32]) -> dict[str, str | float]:
        return {name: float(value) for name, value in zip(self.names, values, strict=True)}

    def measure(self, values: Array, targets: Targets) -> TaskMeasures:
        numbers, draws = targets[NUMBERS].astype(np.float64), choose_draws(values.size)
        measures = list[Measure]()
        table: list[list[Any]] = [["column", "images", "MAE", "R²", "Spearman"]]
        for column, name in enumerate(self.names):
            is_known = ~np.isnan(numbers[:, column])
            truth, guess = numbers[is_known, column], values[is_known, column]
            of = f" of {name}" if len(self.names) > 1 else ""
            measures += [
                Measure(f"MAE{of}", estimate_mean(np.abs(truth - guess)), is_share=False, more_is_better=False),
                Measure(f"R²{of}", estimate_r2(truth, guess, draws), is_share=False),
                Measure(f"Spearman{of}", estimate_spearman(truth, guess, draws), is_share=False),
            ]
            table.append([name, int(is_known.sum()), *(float(each.estimate) for each in measures[-3:])])
        return TaskMeasures(tuple(measures), {"numbers": table})

    def rank_errors(self, values: Array, targets: Targets, losses: Array) -> Array:
        """Return the largest error among an image's numbers, in standard deviations; 0 if none is known."""
        errors = np.abs(values - targets[NUMBERS]) / self.deviations
        largest: Array = np.nan_to_num(errors).max(axis=1)
        return largest

    def describe_target(self, target: Mapping[str, Any]) -> str:
        known = [
            each for each in zip(self.names, target[NUMBERS], self.deviations, strict=True) if not np.isnan(each[1])
        ]
        return ", ".join(f"{name} {format_number(float(value), scale)}" for name, value, scale in known) or "not known"

    def draw(self, values: Array, targets: Targets, folder: Path) -> list[Path]:
        title = f"Predicted and true numbers of {len(values):,} images"
        return draw_scatter(folder / "numbers.png", title, self.names, targets[NUMBERS], values)

    def compare(self, expected: Array, found: Array) -> float:
        """Return the share of images all of whose numbers differ by less than a tenth of a standard deviation."""
        return float((np.abs(expected - found) < SAME * np.asarray(self.deviations)).all(axis=1).mean())


def check_digits(column: str, numbers: Array) -> None:
    """Raise a DataError if numbers are too large for what they differ by: float32 could not tell them apart."""
    largest, spread = float(np.abs(numbers).max()), float(clip_outliers(numbers).std())
    if 0 < spread < LEAST_STEPS * float(np.spacing(np.float32(largest))):
        raise DataError(
            f"the numbers in the column {column} are as large as {largest:.4g} and differ by about {spread:.2g}, which "
            f"float32 cannot tell apart: subtract {numbers.min():.6g} from all of them"
        )


def clip_outliers(numbers: Array) -> Array:
    """Return numbers with those beyond the fences moved onto them, so that a cell typed wrongly sets no scale.

    The fences lie three times the distance of the quartiles beyond these.
    """
    low, high = np.quantile(numbers, [0.25, 0.75])
    reach = FENCES * (high - low)
    clipped: Array = np.clip(numbers, low - reach, high + reach) if reach > 0 else numbers
    return clipped


def format_number(number: float, deviation: float) -> str:
    """Return a number with as many digits as tell: about a hundredth of the standard deviation."""
    decimals = max(2 - math.floor(math.log10(deviation)), 0)
    return f"{number:z.{decimals}f}" if decimals < 8 and abs(number) < 1e15 else f"{number:.4g}"
