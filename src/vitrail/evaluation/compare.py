"""Compare models as in the paper's table 2: how large, how fast, how accurate, and what their training cost."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from vitrail.config import TrainingCost
from vitrail.evaluation.evaluate import open_scored_part, score_model
from vitrail.inference.batches import InferenceOptions, single_rank
from vitrail.model.base import ImageModel
from vitrail.model.cost import compute_cost
from vitrail.system.device import device_name
from vitrail.system.events import Progress
from vitrail.system.intervals import Estimate
from vitrail.system.precision import choose_precision
from vitrail.system.ranks import require_one_process
from vitrail.weights.load import load

WARMUP = 2
"""Batches that run before the clock starts."""
LEAST, LEAST_SECONDS, MOST_SECONDS = 5, 1.0, 20.0
"""Time at least this many batches and this many seconds, but start no batch after `MOST_SECONDS`."""


@dataclass(frozen=True)
class ModelComparison:
    """One model's row in the table."""

    model: str
    parameters: int
    flops: int
    """Of the forward pass of one image at the model's own size."""
    images_per_second: float
    """Speed of the forward pass alone, measured on this machine."""
    top1: Estimate
    images: int
    left_out: int
    """Images that are not scored: the model does not know their class, or they cannot be read."""
    labels: str
    """How the model's classes were matched with those of the data."""
    training: TrainingCost | None
    device: str

    @property
    def notes(self) -> list[str]:
        """Sentences that a reader of the table needs."""
        notes = []
        if self.left_out:
            notes.append(f"{self.model}: scored without {self.left_out:,} of the images: {self.labels}")
        if self.training is None:
            notes.append(f"{self.model}: its weights do not tell what their training cost")
        elif not self.training.complete:
            notes.append(f"{self.model}: the cost is that of its trainings here, after weights of unknown cost")
        return notes

    def as_dict(self) -> dict[str, Any]:
        """Return the row as values that JSON can hold."""
        training = None if self.training is None else self.training.model_dump(mode="json")
        return {**vars(self), "top1": self.top1.as_dict(), "training": training}


def compare_model(
    model: str, data: str, split: str | None, options: InferenceOptions, progress: Progress | None = None
) -> ModelComparison:
    """Score a model on a data set, measure its speed, and return its row of the table.

    Args:
        model: MODEL, as for `vitrail.evaluation.evaluate.evaluate`.
        data: DATA, as there.
        split: train, val or test; by default test, else val, else everything.
        options: device, precision, batch size, worker processes.
        progress: called after each batch with the number of images done and of all images.
    """
    require_one_process("--compare")
    source, part = open_scored_part(data, split)
    loaded = load(model)
    report, _ = score_model(loaded, source, options=options, names=(model, data, part), progress=progress)
    return ModelComparison(
        model=model,
        parameters=sum(parameter.numel() for parameter in loaded.parameters()),
        flops=compute_cost(loaded.architecture).flops,
        images_per_second=measure_speed(loaded, options),
        top1=report.top1,
        images=report.images,
        left_out=report.left_out + report.broken,
        labels=report.labels,
        training=loaded.training_cost,
        device=device_name(single_rank(options).device),
    )


@torch.inference_mode()
def measure_speed(model: ImageModel, options: InferenceOptions) -> float:
    """Return images per second: the median over forward passes of a batch that is already on the device."""
    ranks = single_rank(options)
    precision = choose_precision(options.precision, ranks.device)
    dtype = next(model.parameters()).dtype
    model.to(ranks.device).eval()
    images = torch.randn(options.batch_size, model.in_channels, *model.image_size, device=ranks.device, dtype=dtype)
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
    return options.batch_size / statistics.median(seconds[WARMUP:])
