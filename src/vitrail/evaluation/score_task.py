"""Score a model on data with any other task than one label an image: all values and targets, then the task's measures.

Shapes: N images, B images of a batch, V values of an answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import vitrail
from vitrail.data.loader import BrokenSample
from vitrail.data.open import Data, add_task
from vitrail.data.sources.source import Source
from vitrail.data.task_data import TaskData, recognise_data
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.answered_images import AnsweredImages, answer_all
from vitrail.evaluation.task_report import TaskReport, UnusedImage, WorstImage
from vitrail.inference.batches import InferenceOptions, open_model, single_rank
from vitrail.inference.engine import Engine, Model
from vitrail.system.device import device_name
from vitrail.system.events import Progress
from vitrail.system.ranks import Ranks
from vitrail.tasks.task import Task, shorten_names

MOST_WORST = 100
"""Images with the worst answers in a report."""


def score_task(
    model: Model | Engine,
    source: Source,
    *,
    options: InferenceOptions | None = None,
    ranks: Ranks | None = None,
    names: tuple[str, str, str | None] = ("the model", "the data", None),
    progress: Progress | None = None,
) -> tuple[TaskReport, AnsweredImages]:
    """Return a report on a model, and what it answered. Every rank gets the same.

    Args:
        model: a model with a head: loaded, as an engine, or its name.
        source: images with targets of the model's task.
        options: device, precision, batch size, worker processes.
        ranks: the processes that share the work; by default this process alone.
        names: of the model, the data and its split, for the report.
        progress: called after each batch with the number of images done and of all images.

    Raises:
        ConfigError: the model has no head.
        DataError: the data has another task, or none of the images can be used.
        WeightsError: the model computes values that are not finite.
    """
    if not len(source):
        raise DataError("the data has no images")
    options = options or InferenceOptions()
    ranks = ranks or single_rank(options)
    engine = open_model(model, options, ranks)
    require_same_task(engine.task, source.task)
    began = time.perf_counter()
    answered = answer_all(engine, source, options, ranks, progress)
    seconds = time.perf_counter() - began
    if not len(answered):
        raise DataError(f"none of the images can be used; the first, {_say_broken(answered.broken[0])}")
    report = make_task_report(
        engine.task,
        answered,
        source,
        names,
        about={
            "device": f"{ranks.size} × {device_name(engine.device)}",
            "runtime": engine.runtime,
            "precision": engine.precision,
            "seconds": seconds,
            "images_per_second": len(source) / seconds,
            "torch": torch.__version__,
            "vitrail": vitrail.__version__,
        },
    )
    return report, answered


def make_task_report(
    task: Task,
    answered: AnsweredImages,
    source: Source,
    names: tuple[str, str, str | None],
    about: dict[str, Any] | None = None,
) -> TaskReport:
    """Return a report on answers for images of a source; the other arguments are those of `score_task`."""
    return TaskReport(
        model=names[0],
        data=names[1],
        part=names[2],
        kind=task.kind,
        images=len(answered),
        left_out=tuple(UnusedImage(each.index, each.name, each.reason) for each in answered.broken),
        measured=task.measure(answered.values, answered.targets),
        worst=list_worst(task, answered, source),
        worst_words=task.worst_words,
        about=about or {},
    )


def read_as_task(data: Data, task: Task, labels: str | Sequence[str] | None = None) -> Data:
    """Return data as a model reads it, so that whatever opens it finds the model's targets.

    Args:
        data: anything that `open_data` takes. A Source is open already, and must have this task.
        task: of the model: its tags, its columns.
        labels: the columns that hold the targets, if they have other names than in the training data.

    Raises:
        ConfigError: the columns do not exist, or the data is open already and `labels` is given.
        DataError: the data cannot be read, or has other targets.
    """
    if isinstance(data, Source):
        if labels is not None:
            raise ConfigError("labels: this data is open already; name its columns where it is opened")
        require_same_task(task, data.task)
        return data
    if task.kind == "labels":
        if labels is not None:
            return add_task(data, "labels", labels)
        found = recognise_data(data)  # a table may have its labels in a column of any name
        return found if isinstance(found, TaskData) and found.kind == "labels" else data
    return add_task(data, task, labels)


def require_same_task(wanted: Task, found: Task) -> None:
    """Raise a DataError if targets of one task are no targets of the other: another kind, or other names."""
    if found.kind != wanted.kind:
        raise DataError(
            f"the model answers with {wanted.kind}, and the data has {found.kind}: give data with {wanted.kind}"
        )
    names = [(task.output_names, task.value_names) for task in (wanted, found)]
    if wanted.kind != "labels" and names[0] != names[1]:
        ours, theirs = (shorten_names(task.value_names) for task in (wanted, found))
        raise DataError(
            f"the model's {wanted.kind} are {ours}, and the data's are {theirs}: give data with the model's, in the "
            "same order"
        )


def list_worst(task: Task, answered: AnsweredImages, source: Source, most: int = MOST_WORST) -> tuple[WorstImage, ...]:
    """Return the images with the worst answers, the worst first; none without a mistake."""
    errors = np.nan_to_num(task.rank_errors(answered.values, answered.targets, answered.losses), nan=0.0)
    worst = []
    for row in np.argsort(-errors, kind="stable")[:most]:
        if errors[row] <= 0:
            break
        index, values = int(answered.indices[row]), answered.values[row].astype(np.float32)
        truth = task.describe_target({name: each[row] for name, each in answered.targets.items()})
        name, lines = source.display_name(index), tuple(task.describe(values))
        worst.append(WorstImage(index, name, float(errors[row]), truth, lines, task.answer(values)))
    return tuple(worst)


def _say_broken(broken: BrokenSample) -> str:
    return f"{broken.name}: {broken.reason}"
