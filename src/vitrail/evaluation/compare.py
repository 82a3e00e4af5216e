"""Compare models as in the paper's table 2: how large, how fast, how accurate, and what their training cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.config import TrainingCost
from vitrail.data.open import Data, add_labels_from, name_data
from vitrail.data.sources.source import Source
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.evaluation.evaluate import open_scored_part, score_model
from vitrail.evaluation.report import ClassScore, format_estimate
from vitrail.evaluation.score_task import read_as_task, require_same_task, score_task
from vitrail.inference.batches import InferenceOptions, open_model
from vitrail.inference.engine import Engine, Model, name_model
from vitrail.model.base import ImageModel
from vitrail.model.cost import compute_cost
from vitrail.system.device import device_name
from vitrail.system.events import OnEvent, Progress, open_listener, send_messages, send_progress
from vitrail.system.intervals import Estimate
from vitrail.system.ranks import require_one_process
from vitrail.system.results import Result, Rows, to_plain
from vitrail.tasks.task import Measure

BEFORE, AFTER = ("model", "parameters", "GFLOPs", "images/s", "images"), ("training exaFLOPs", "device-hours")
"""Columns of the table before the measure and after it."""
TOP1 = "top-1"
WARMUP = 2
"""Batches that run before the clock starts."""
LEAST, LEAST_SECONDS, MOST_SECONDS = 5, 1.0, 20.0
"""Time at least this many batches and this many seconds, but start no batch after `MOST_SECONDS`."""


@dataclass(frozen=True)
class ModelComparison:
    """One model's row in the table."""

    model: str
    parameters: int | None
    """None for an exported file."""
    flops: int | None
    """Of the forward pass of one image at the model's own size; None for an exported file."""
    images_per_second: float
    """Speed of the forward pass alone, measured on this machine."""
    top1: Estimate | None
    """None for a model with another task than one label."""
    images: int
    left_out: int
    """Images that are not scored: the model does not know their class, or they cannot be read."""
    labels: str
    """How the model's classes were matched with those of the data."""
    training: TrainingCost | None
    device: str
    measure: Measure
    """The measure that the models are compared by: top-1 accuracy, or the first one of another task."""
    balanced: Estimate | None = None
    """The balanced accuracy; None for a model with another task than one label."""
    worst_class: ClassScore | None = None
    """The class with the lowest recall, likewise."""

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

    def to_dict(self) -> dict[str, Any]:
        """Return the row as values that JSON can hold."""
        training = None if self.training is None else self.training.model_dump(mode="json")
        return {
            **vars(self),
            "top1": None if self.top1 is None else self.top1.to_dict(),
            "training": training,
            "measure": {"name": self.measure.name, **self.measure.estimate.to_dict()},
            "balanced": None if self.balanced is None else self.balanced.to_dict(),
            "worst_class": None if self.worst_class is None else to_plain(self.worst_class),
        }

    @property
    def columns(self) -> tuple[str, ...]:
        """The heads of `format_cells`."""
        macro = () if self.balanced is None else ("balanced", "worst class")
        return (*BEFORE, self.measure.name, "95% from", "to", *macro, *AFTER)

    def format_cells(self) -> list[str]:
        """Return the row as text; "–" for what is not known."""
        speed = self.images_per_second
        return [
            self.model,
            "–" if self.parameters is None else f"{self.parameters:,}",
            "–" if self.flops is None else f"{self.flops / 1e9:,.3g}",
            f"{speed:,.0f}" if speed >= 10 else f"{speed:.2f}",
            f"{self.images:,}",
            *format_estimate(self.measure.estimate, self.measure.is_share),
            *self._format_macro(),
            "–" if self.training is None else f"{self.training.exaflops:.3g}",
            "–" if self.training is None else f"{self.training.device_hours:.3g}",
        ]

    def _format_macro(self) -> list[str]:
        if self.balanced is None:
            return []
        worst = "–" if self.worst_class is None else format_estimate(self.worst_class.accuracy, is_share=True)[0]
        return [format_estimate(self.balanced, is_share=True)[0], worst]


@dataclass(frozen=True, repr=False)
class ComparisonResult(Result):
    """Models side by side on one data set."""

    data: str
    rows: tuple[ModelComparison, ...]
    """The models that were compared, in the order given."""
    failures: tuple[tuple[str, str], ...]
    """(model, reason) for each model that could not be compared."""

    @property
    def notes(self) -> list[str]:
        """Sentences that a reader of the table needs."""
        return [note for row in self.rows for note in row.notes]

    def summary(self) -> Rows:
        """Return the accuracy or the first measure of each model, or why it has none."""
        accuracies = []
        for row in self.rows:
            value, low, high = format_estimate(row.measure.estimate, row.measure.is_share)
            named = "" if row.measure.name == TOP1 else f"{row.measure.name} "
            accuracies.append((row.model, f"{named}{value} (95% interval {low} to {high})"))
        return [("data", self.data), *accuracies, *((model, f"failed: {reason}") for model, reason in self.failures)]

    def tables(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """Return the table, and the notes below it."""
        if not self.rows:
            return {}
        tables: dict[str, Sequence[Sequence[str]]] = {
            f"On {self.data}": [self.rows[0].columns, *(row.format_cells() for row in self.rows)]
        }
        return {**tables, "Notes": [("note",), *((note,) for note in self.notes)]} if self.notes else tables

    def to_dict(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "rows": [row.to_dict() for row in self.rows],
            "failures": [{"model": model, "reason": reason} for model, reason in self.failures],
        }


def compare_models(
    models: Sequence[Model],
    data: Data,
    split: str | None = None,
    *,
    labels: str | Sequence[str] | None = None,
    labels_from: str | None = None,
    batch_size: int = 64,
    workers: int = 0,
    device: str = "auto",
    precision: str = "fp32",
    on_event: OnEvent | None = None,
) -> ComparisonResult:
    """Score models on a data set and measure their speed. A model that fails does not end the comparison.

    Models with one label an image are compared by their accuracy, others by the first measure of their task, such as
    mAP. A model with another task than the first one fails.

    Events: `message` (text) while a faster precision is prepared; the progress of a task "evaluating MODEL" for each;
    `compared`, a model's row as a dictionary; `failed` (model, reason).

    Args:
        models: loaded models, names for `vitrail.load`, or exported .onnx or .xml files.
        data: anything that `open_data` takes.
        split: train, val or test; by default test, else val, else everything.
        labels: the columns of the data that hold what is true, if they have other names than in the training data.
        labels_from: where the class stands in the names of a folder's images: "NAME_*" for cat_1.jpg, or a regular
            expression with one group.
        batch_size: images at a time, also when the speed is measured.
        workers: processes that read images; 0 reads them in this process.
        device: cpu, cuda, mps, …; auto takes a GPU if the machine has one.
        precision: as for `evaluate`. Exported files have their own, and fail with any other word than fp32.
        on_event: called with what happens; by default a terminal or notebook shows a bar.

    Raises:
        ConfigError: an argument is wrong, or several processes were started.
        DataError: the data cannot be read.
    """
    require_one_process("--compare")
    if not models or isinstance(models, str | Path | ImageModel):
        raise ConfigError("models: give a list of one or more")
    options = InferenceOptions(batch_size, workers, device, precision)
    data = add_labels_from(data, labels_from)
    rows, failures = list[ModelComparison](), list[tuple[str, str]]()
    kinds, unopened = list[str](), list[DataError]()
    with open_listener(on_event) as listener:
        for model in models:
            name = name_model(model)
            try:
                engine = open_model(model, options, on_message=send_messages(listener))
                _require_same_measure(rows, engine, kinds)
                try:
                    source, part = open_scored_part(read_as_task(data, engine.task, labels), split)
                    require_same_task(engine.task, source.task)
                except DataError as error:
                    unopened.append(error)
                    raise
                progress = send_progress(listener, f"evaluating {name}")
                row = measure_model(engine, source, options, (name, name_data(data), part), progress)
            except VitrailError as error:  # the other models are still compared
                failures.append((name, str(error)))
                listener("failed", {"model": name, "reason": str(error)})
                continue
            rows.append(row)
            kinds.append(engine.task.kind)
            listener("compared", to_plain(row.to_dict()))
    if len(unopened) == len(models):  # the data is at fault, not the models
        raise unopened[0]
    return ComparisonResult(name_data(data), tuple(rows), tuple(failures))


def measure_model(
    engine: Engine,
    source: Source,
    options: InferenceOptions,
    names: tuple[str, str, str | None],
    progress: Progress | None = None,
) -> ModelComparison:
    """Score a model, measure its speed, and return its row of the table.

    Args:
        engine: the model.
        source: images with labels.
        options: batch size and worker processes.
        names: of the model, the data and its split.
        progress: called after each batch with the number of images done and of all images.
    """
    loaded = getattr(engine, "model", None)
    network = loaded if isinstance(loaded, ImageModel) else None  # an exported file has none
    return ModelComparison(
        model=names[0],
        parameters=None if network is None else sum(parameter.numel() for parameter in network.parameters()),
        flops=None if network is None else compute_cost(network.architecture).flops,
        training=None if network is None else network.training_cost,
        device=device_name(engine.device),
        **_measure_quality(engine, source, options, names, progress),
        images_per_second=measure_throughput(engine, options.batch_size),
    )


def _measure_quality(
    engine: Engine,
    source: Source,
    options: InferenceOptions,
    names: tuple[str, str, str | None],
    progress: Progress | None,
) -> dict[str, Any]:
    """Return the fields of a `ModelComparison` that say how good a model is."""
    if engine.task.kind != "labels":
        found, _ = score_task(engine, source, options=options, names=names, progress=progress)
        return {
            "top1": None,
            "images": found.images,
            "left_out": found.broken,
            "labels": "; ".join(found.describe_left_out()),
            "measure": found.first,
        }
    report, _ = score_model(engine, source, options=options, names=names, progress=progress)
    return {
        "top1": report.top1,
        "images": report.images,
        "left_out": report.left_out + report.broken,
        "labels": report.labels,
        "measure": Measure(TOP1, report.top1, is_share=True),
        "balanced": report.balanced,
        "worst_class": report.worst_class,
    }


def _require_same_measure(rows: Sequence[ModelComparison], engine: Engine, kinds: Sequence[str]) -> None:
    """Raise a ConfigError if a model has another task than those before it: their measures cannot be compared."""
    if rows and engine.task.kind != kinds[0]:
        raise ConfigError(
            f"it answers with {engine.task.kind}, and {rows[0].model} with {kinds[0]}: compare models of one task"
        )


def measure_throughput(engine: Engine, batch_size: int) -> float:
    """Return images per second: the median over batches, from pixels that are on the device to logits."""
    pixels = engine.make_blank(batch_size).to(engine.device)
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) <= WARMUP or (
        (elapsed := time.perf_counter() - began) < MOST_SECONDS
        and (len(seconds) < WARMUP + LEAST or elapsed < LEAST_SECONDS)
    ):
        start = time.perf_counter()
        engine.compute(pixels)
        if engine.device.type != "cpu":
            torch.accelerator.synchronize(engine.device)
        seconds.append(time.perf_counter() - start)
    return batch_size / statistics.median(seconds[WARMUP:])
