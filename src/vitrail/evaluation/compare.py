"""Models side by side, as in the paper's table 2: how large, how fast, how good, and what their training took."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from vitrail.config import TrainingCost
from vitrail.evaluation.intervals import Measured
from vitrail.evaluation.report import Report
from vitrail.inference.batches import How, alone
from vitrail.model.base import ImageModel
from vitrail.model.cost import cost
from vitrail.system.device import device_name
from vitrail.system.precision import choose_precision

WARMUP = 2
"""Batches before the clock runs."""
LEAST, LEAST_SECONDS, MOST_SECONDS = 5, 1.0, 20.0
"""Batches that are timed at least, for so many seconds at least; but no more are begun after so many."""


@dataclass(frozen=True)
class Compared:
    """A row of the table."""

    model: str
    parameters: int
    flops: int
    """For one image, at the model's own size."""
    images_per_second: float
    """Of the forward pass alone, measured here."""
    top1: Measured
    images: int
    left_out: int
    """Images of classes that it does not know, and those that cannot be read."""
    labels: str
    """How its classes were matched with the data's."""
    training: TrainingCost | None
    device: str

    @property
    def notes(self) -> list[str]:
        """What a reader of the table must know."""
        said = []
        if self.left_out:
            said.append(f"{self.model}: scored without {self.left_out:,} of the images: {self.labels}")
        if self.training is None:
            said.append(f"{self.model}: its weights do not tell what their training cost")
        elif not self.training.complete:
            said.append(f"{self.model}: the cost is that of its trainings here, after weights of unknown cost")
        return said

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        training = None if self.training is None else self.training.model_dump(mode="json")
        return {**vars(self), "top1": self.top1.as_dict(), "training": training}


def compared(model: ImageModel, report: Report, how: How) -> Compared:
    """A model with what was measured of it before; its speed is measured now."""
    return Compared(
        model=report.model,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        flops=cost(model.architecture).flops,
        images_per_second=speed(model, how),
        top1=report.top1,
        images=report.images,
        left_out=report.left_out + report.broken,
        labels=report.labels,
        training=model.training_cost,
        device=device_name(alone(how).device),
    )


@torch.inference_mode()
def speed(model: ImageModel, how: How) -> float:
    """Images a second of forward passes over batches that lie on the device already; the median of several."""
    ranks = alone(how)
    precision = choose_precision(how.precision, ranks.device)
    dtype = next(model.parameters()).dtype
    model.to(ranks.device).eval()
    images = torch.randn(how.batch_size, model.in_channels, *model.image_size, device=ranks.device, dtype=dtype)
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) <= WARMUP or (
        (elapsed := time.perf_counter() - began) < MOST_SECONDS
        and (len(seconds) < WARMUP + LEAST or elapsed < LEAST_SECONDS)
    ):
        start = time.perf_counter()
        with nullcontext() if precision == torch.float32 else torch.autocast(ranks.device.type, precision):
            model(images)
        if ranks.device.type != "cpu":
            torch.accelerator.synchronize(ranks.device)
        seconds.append(time.perf_counter() - start)
    return how.batch_size / statistics.median(seconds[WARMUP:])
