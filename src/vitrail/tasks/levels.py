"""Levels: one of several grades in order, such as 1 to 5 stars (ordinal regression).

The model answers L − 1 questions for L levels: is the image above level 0, above level 1, …? So a guess that is off by
one level costs less than one that is far off.
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
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import DataError, did_you_mean
from vitrail.system.intervals import estimate_mean, estimate_share
from vitrail.tasks.cells import read_good_cells
from vitrail.tasks.draw_measures import draw_confusion_matrix
from vitrail.tasks.level_order import read_level, sort_levels
from vitrail.tasks.number_metrics import estimate_kappa, estimate_spearman
from vitrail.tasks.recalls import estimate_balanced_accuracy
from vitrail.tasks.task import AnswerLine, Array, Cell, Measure, Targets, Task, TaskMeasures, format_share

LEVEL = "level"
"""The name of the target: (N,) int64, the place of the level, −1 if it is not known."""
MOST_LEVELS = 100
UNKNOWN = -1


class Levels(Task):
    """One of several levels that have an order."""

    kind: Literal["levels"] = "levels"
    names: Annotated[tuple[str, ...], Field(min_length=2)]
    """The levels, the lowest first."""
    column: str = LEVEL
    learns_names: ClassVar[bool] = True
    worst_words: ClassVar[str] = "the images with answers that are the most levels off"

    @classmethod
    def learn(cls, columns: Mapping[str, Sequence[Cell]]) -> Self:
        if len(columns) != 1:
            raise DataError(f"levels stand in one column, not in {', '.join(columns)}: name it")
        ((column, cells),) = columns.items()
        found = set(read_good_cells(partial(read_level, column), cells)) - {""}
        if not 2 <= len(found) <= MOST_LEVELS:
            advice = "learn them as numbers" if found else "fill it"
            raise DataError(f"the column {column} has {len(found)} levels: give 2 to {MOST_LEVELS}, or {advice}")
        return cls(names=sort_levels(column, found), column=column)

    def encode(self, row: Mapping[str, Cell]) -> dict[str, Any]:
        name = read_level(self.column, row.get(self.column))
        if name and name not in self.names:
            hint = did_you_mean(name, self.names) or f": the levels are {', '.join(self.names)}"
            raise DataError(f"{self.column} is {name!r}, which is no level{hint}")
        return {LEVEL: self.names.index(name) if name else UNKNOWN}

    def allocate(self, count: int) -> Targets:
        return {LEVEL: np.full(count, UNKNOWN, np.int64)}

    def stratify(self, targets: Targets) -> NDArray[np.int64]:
        return targets[LEVEL]

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(f"above {name}" for name in self.names[:-1])

    @property
    def value_names(self) -> tuple[str, ...]:
        return self.names

    def compute_losses(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        levels = targets[LEVEL][:, None]
        is_above = (levels > torch.arange(outputs.shape[1], device=outputs.device)).to(outputs.dtype)
        losses = F.binary_cross_entropy_with_logits(outputs, is_above, reduction="none").mean(dim=1)
        return losses * (levels[:, 0] != UNKNOWN)

    def count(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        errors = ((outputs > 0).sum(dim=1) - targets[LEVEL]).abs().float()
        errors = torch.where(targets[LEVEL] == UNKNOWN, torch.nan, errors)
        return {"level-error": errors, "level-accuracy": torch.where(errors.isnan(), errors, (errors == 0).float())}

    def activate(self, outputs: Tensor) -> Tensor:
        """(…, K) outputs → (…, L) probabilities of the levels.

        Being above a level must never be likelier than being above a lower one. Outputs may contradict that, so they
        are sorted: no other order is nearer to the truth (Chernozhukov and others, arXiv 0708.1627).
        """
        above = outputs.sigmoid().sort(dim=-1, descending=True).values
        certain = torch.ones_like(above[..., :1])
        return torch.cat([certain, above], dim=-1) - torch.cat([above, torch.zeros_like(certain)], dim=-1)

    def decide(self, values: Array) -> NDArray[np.int64]:
        """(…, L) probabilities → (…): the median level, as likely too high as too low. It has the least mean error."""
        decided: NDArray[np.int64] = (np.cumsum(values, axis=-1)[..., :-1] < 0.5).sum(axis=-1)
        return decided

    def answer(self, values: NDArray[np.float32], top: int = 5) -> dict[str, Any]:
        named = {name: float(value) for name, value in zip(self.names, values, strict=True)}
        return {"level": self.names[self.decide(values)], "probabilities": named}

    def describe(self, values: NDArray[np.float32], top: int = 5) -> list[AnswerLine]:
        best = int(self.decide(values))
        others = [int(k) for k in np.argsort(-values, kind="stable") if k != best]
        shown = [best, *others][:top]
        return [AnswerLine(self.names[k], format_share(float(values[k])), float(values[k]), k == best) for k in shown]

    def flatten(self, values: NDArray[np.float32]) -> dict[str, str | float]:
        level = int(self.decide(values))
        return {"level": self.names[level], "probability": float(values[level])}

    def measure(self, values: Array, targets: Targets) -> TaskMeasures:
        is_known = targets[LEVEL] != UNKNOWN
        values, truth = values[is_known], targets[LEVEL][is_known]
        decided, count = self.decide(values), len(self.names)
        errors = np.abs(decided - truth)
        spearman = estimate_spearman(truth, values @ np.arange(count))
        measures = (
            Measure("quadratic kappa", estimate_kappa(truth, decided, count), is_share=False),
            Measure("accuracy", estimate_share(int((errors == 0).sum()), len(truth)), is_share=True),
            Measure("balanced accuracy", estimate_balanced_accuracy(truth, errors == 0, count), is_share=True),
            Measure("MAE in levels", estimate_mean(errors.astype(np.float64)), is_share=False, more_is_better=False),
            Measure("Spearman of the mean level", spearman, is_share=False),
        )
        table: list[list[Any]] = [["level", "images", "share right", "share at most one off"]]
        for level, name in enumerate(self.names):
            here = errors[truth == level]
            shares = [float((here <= most).mean()) if len(here) else math.nan for most in (0, 1)]
            table.append([name, len(here), *shares])
        return TaskMeasures(measures, {"levels": table})

    def rank_errors(self, values: Array, targets: Targets, losses: Array) -> Array:
        """Return how many levels an answer is off, and of equal ones more for the surer answer; 0 if it is right."""
        truth, rows = targets[LEVEL], np.arange(len(values))
        decided = self.decide(values)
        is_wrong = (truth != UNKNOWN) & (decided != truth)
        errors: Array = np.where(is_wrong, np.abs(decided - truth) + values[rows, decided] / 2, 0.0)
        return errors

    def describe_target(self, target: Mapping[str, Any]) -> str:
        level = int(target[LEVEL])
        return "not known" if level == UNKNOWN else self.names[level]

    def draw(self, values: Array, targets: Targets, folder: Path) -> list[Path]:
        title = f"What is taken for what, of {len(values):,} images"
        is_known = targets[LEVEL] != UNKNOWN
        truth, decided = targets[LEVEL][is_known], self.decide(values[is_known])
        return draw_confusion_matrix(folder / "confusion.png", title, self.names, truth, decided)
