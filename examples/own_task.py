"""A task of your own: how many things are on a photo?

    python examples/own_task.py

It trains a small model to count the squares on drawn images, in less than a minute on a laptop, and writes it to
runs/counter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

import vitrail
from vitrail.errors import DataError
from vitrail.inference.engine import open_engine
from vitrail.system.intervals import estimate_mean
from vitrail.tasks.cells import read_good_cells, read_number
from vitrail.tasks.number_metrics import estimate_r2, group_by_rank
from vitrail.tasks.registry import register_task
from vitrail.tasks.task import AnswerLine, Array, Cell, Measure, Targets, Task, TaskMeasures

COUNT = "count"
"""The name of the target: (N,) float32, NaN if it is not known."""


@register_task
class Counts(Task):
    """How many things are on an image. The model's one output is the logarithm of the expected number."""

    kind: Literal["counts"] = "counts"
    column: str = COUNT
    """The column of a table that has the counts."""

    @classmethod
    def learn(cls, columns: Mapping[str, Sequence[Cell]]) -> Self:
        if len(columns) != 1:
            raise DataError(f"counts stand in one column, not in {', '.join(columns)}: name it")
        ((column, cells),) = columns.items()
        task = cls(column=column)
        if np.isnan(read_good_cells(task.read_count, cells)).all():
            raise DataError(f"the column {column} has no count in any row")
        return task

    def read_count(self, cell: Cell) -> float:
        """Return the count in a cell, NaN if it is empty."""
        count = read_number(self.column, cell)
        if count < 0 or count % 1 > 0:
            raise DataError(f"{self.column} is {cell!r}: a count is 0, 1, 2, …")
        return count

    def encode(self, row: Mapping[str, Cell]) -> dict[str, Any]:
        return {COUNT: self.read_count(row.get(self.column))}

    def allocate(self, count: int) -> Targets:
        return {COUNT: np.full(count, np.nan, np.float32)}

    def stratify(self, targets: Targets) -> NDArray[np.int64]:
        return group_by_rank(targets[COUNT])

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def output_names(self) -> tuple[str, ...]:
        return (self.column,)

    def compute_losses(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Return −log of the probability that a Poisson distribution gives the count, up to a constant."""
        counts, is_known = targets[COUNT].nan_to_num(), ~targets[COUNT].isnan()
        losses = F.poisson_nll_loss(outputs[:, 0], counts, log_input=True, reduction="none")
        return torch.where(is_known, losses, 0)

    def count(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"MAE": (outputs[:, 0].exp() - targets[COUNT]).abs()}  # NaN is not counted

    def activate(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def answer(self, values: NDArray[np.float32], top: int = 5) -> dict[str, Any]:
        return {"count": round(float(values[0])), "expected": float(values[0])}

    def describe(self, values: NDArray[np.float32], top: int = 5) -> list[AnswerLine]:
        return [AnswerLine(self.column, str(round(float(values[0]))))]

    def flatten(self, values: NDArray[np.float32]) -> dict[str, str | float]:
        return {self.column: float(values[0])}

    def measure(self, values: Array, targets: Targets) -> TaskMeasures:
        is_known = ~np.isnan(targets[COUNT])
        truth, guess = targets[COUNT][is_known].astype(np.float64), values[is_known, 0]
        error = estimate_mean(np.abs(truth - guess))
        return TaskMeasures(
            (
                Measure("MAE", error, is_share=False, more_is_better=False),
                Measure("R²", estimate_r2(truth, guess), is_share=False),
            )
        )


def draw_squares(count: int, seed: int, most: int = 9) -> tuple[Tensor, Tensor]:
    """Return (count, 3, 32, 32) uint8 images of 0 to `most` bright squares, and how many there are."""
    rng = np.random.default_rng(seed)
    images, counts = np.full((count, 3, 32, 32), 40, np.uint8), rng.integers(0, most + 1, count)
    for image, squares in zip(images, counts, strict=True):
        for place in rng.choice(64, squares, replace=False):  # one of 8 × 8 cells, so that none hides another
            row, column = divmod(int(place), 8)
            image[:, 4 * row + 1 : 4 * row + 4, 4 * column + 1 : 4 * column + 4] = rng.integers(120, 256, (3, 1, 1))
    return torch.from_numpy(images), torch.from_numpy(counts.astype(np.float32))


def train_counter(folder: Path, steps: int) -> None:
    """Train a small model for a number of steps, and write it with its task."""
    torch.manual_seed(0)
    model = vitrail.create_model("Ti/8", image_size=32, width=64, depth=2, mlp_dim=128, num_heads=2, num_classes=0)
    model.give_task(Counts()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        pixels, counts = draw_squares(64, seed=step)
        losses = model.task.compute_losses(model(pixels / 127.5 - 1), {COUNT: counts})
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    vitrail.save(model, folder)


if __name__ == "__main__":
    train_counter(Path("runs/counter"), steps=300)
    engine = open_engine("runs/counter")  # its task comes from the folder
    pixels, counts = draw_squares(200, seed=1_000_000)
    values = engine.predict(pixels)
    print(engine.task.answer(values[0]))
    for name, estimate, *_ in engine.task.measure(values.astype(np.float64), {COUNT: counts.numpy()}).measures:
        print(f"{name} {estimate.value:.2f}, 95% interval {estimate.low:.2f} to {estimate.high:.2f}")
