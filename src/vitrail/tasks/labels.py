"""One label an image: classification, as in the paper.

Its loss has options (smoothing, sigmoid, mixing), so training uses `objectives/classification.py`; its report knows
synonyms and ImageNet's other labels, so evaluation uses `evaluation/report.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import DataError, did_you_mean
from vitrail.system.intervals import estimate_share
from vitrail.tasks.cells import read_good_cells, read_name
from vitrail.tasks.task import AnswerLine, Array, Cell, Measure, Targets, Task, TaskMeasures, format_share

LABEL = "label"
"""The name of the target."""


class Labels(Task):
    """One of several classes."""

    kind: Literal["labels"] = "labels"
    names: tuple[str, ...]
    """The classes, in the order of the outputs."""
    column: str = LABEL
    learns_names: ClassVar[bool] = True
    choosing_metric: ClassVar[str] = "accuracy"

    @classmethod
    def learn(cls, columns: Mapping[str, Sequence[Cell]]) -> Self:
        if len(columns) != 1:
            raise DataError(f"labels stand in one column, not in {', '.join(columns)}: name it, or learn attributes")
        ((column, cells),) = columns.items()
        names = set(read_good_cells(partial(read_name, column), cells)) - {""}
        if not names:
            raise DataError(f"the column {column} has no label in any row")
        return cls(names=tuple(sorted(names)), column=column)

    def encode(self, row: Mapping[str, Cell]) -> dict[str, Any]:
        name = read_name(self.column, row.get(self.column))
        if not name:
            raise DataError(f"there is no {self.column}")
        if name not in self.names:
            raise DataError(f"{self.column} is {name!r}, which is no class{did_you_mean(name, self.names)}")
        return {LABEL: self.names.index(name)}

    def allocate(self, count: int) -> Targets:
        return {LABEL: np.zeros(count, np.int64)}

    def stratify(self, targets: Targets) -> NDArray[np.int64]:
        return targets[LABEL]

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.names

    def compute_losses(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs, targets[LABEL], reduction="none")

    def count(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": outputs.argmax(dim=1) == targets[LABEL]}

    def activate(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(dim=-1)

    def answer(self, values: NDArray[np.float32], top: int = 5) -> dict[str, Any]:
        best = np.argsort(-values, kind="stable")[:top]
        return {"labels": [{"label": self.names[k], "probability": float(values[k])} for k in best]}

    def describe(self, values: NDArray[np.float32], top: int = 5) -> list[AnswerLine]:
        best = np.argsort(-values, kind="stable")[:top]
        shares = [float(values[k]) for k in best]
        lines = zip(best, shares, strict=True)
        return [AnswerLine(self.names[k], format_share(p), p, place == 0) for place, (k, p) in enumerate(lines)]

    def flatten(self, values: NDArray[np.float32]) -> dict[str, str | float]:
        best = int(values.argmax())
        return {"label": self.names[best], "probability": float(values[best])}

    def summarise(self) -> str:
        return f"{len(self.names):,} class" + ("" if len(self.names) == 1 else "es")

    def measure(self, values: Array, targets: Targets) -> TaskMeasures:
        hits = values.argmax(axis=1) == targets[LABEL]
        return TaskMeasures((Measure("top-1", estimate_share(int(hits.sum()), len(hits)), is_share=True),))

    def compare(self, expected: Array, found: Array) -> float:
        """Return the share of images with the same first guess."""
        return float(np.mean(expected.argmax(axis=1) == found.argmax(axis=1)))

    def describe_target(self, target: Mapping[str, Any]) -> str:
        return self.names[int(target[LABEL])]
