"""Score a model on labelled images for its report: in a bounded time, and as `vitrail evaluate` does it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vitrail.data.open import Data, list_splits, open_data
from vitrail.data.sources.image_files import IMAGE_SUFFIXES
from vitrail.data.sources.source import Source, Subset, compute_fingerprint
from vitrail.data.task_data import TaskData
from vitrail.data.transforms.decode import open_image
from vitrail.errors import DataError, VitrailError
from vitrail.evaluation.evaluate import open_scored_part, score_model
from vitrail.evaluation.labels import LabelMap, match_classes
from vitrail.evaluation.score_task import read_as_task, require_same_task, score_task
from vitrail.inference.batches import InferenceOptions
from vitrail.inference.engine import Engine, open_engine
from vitrail.inference.prepare import is_one_image
from vitrail.inspection.image_choice import Images, describe_count, name_place
from vitrail.inspection.images import spread_evenly
from vitrail.inspection.scores import AnyScores, ModelScores, TaskModelScores
from vitrail.model.base import ImageModel
from vitrail.model.cost import compute_cost
from vitrail.system.events import OnEvent, ignore_event, send_progress
from vitrail.tasks.task import Task

SECONDS = 15.0
"""How long scoring may take, by an estimate."""
OPERATIONS_PER_SECOND = {"cpu": 2e11, "cuda": 2e13}
SECONDS_PER_IMAGE, SECONDS_PER_PIXEL = 3e-4, 15e-9
"""To read an image and fit it to a model, by its pixels."""
LEAST_IMAGES = 10
"""Fewer labelled images say nothing about a model."""
LEAST_KNOWN = 0.5
"""The share of the data's classes that the model must know; else most of its mistakes would not be its own."""
BATCH = 32
SAMPLED = 3
"""Images whose size is looked at for the estimate."""


class LabelledImages(NamedTuple):
    """Images with labels that a model may be scored on."""

    source: Source
    name: str
    """What they are images of, in the report: "photos (test)"."""
    whole: tuple[Source, ...] = ()
    """Data sets that hold these images; a model that has learned from one of them has learned from these."""


def open_labelled_images(images: Images, task: Task | None = None) -> LabelledImages | None:
    """Open the images that are given for a report as labelled data; None if they have no labels, or too few.

    With another task than one label, they are opened as data with the targets of this task.
    """
    if isinstance(images, str | os.PathLike):
        images = os.fspath(images)
        if Path(images).name.lower().endswith(IMAGE_SUFFIXES):
            return None
    elif not isinstance(images, Source | Mapping | TaskData) and (
        is_one_image(images) or not _is_list_of_pairs(images)
    ):
        return None
    data: Any = images
    try:
        if task is not None and task.kind != "labels":
            data = read_as_task(data, task)
            source, part = open_scored_part(data, None)
            labelled = np.arange(len(source))
        else:
            source, part = open_scored_part(data, None)
            labelled = np.flatnonzero(source.labels(0, len(source)) >= 0)
        whole = _open_whole(data)
    except (VitrailError, OSError):  # such as a folder of photos without classes
        return None
    if len(labelled) < LEAST_IMAGES:
        return None
    chosen = source if len(labelled) == len(source) else Subset(source, labelled)
    name = name_place(data)
    return LabelledImages(chosen, f"{name} ({part})" if part else name, whole)


def _is_list_of_pairs(images: Any) -> bool:
    return isinstance(images, list | tuple) and all(isinstance(each, tuple) and len(each) == 2 for each in images)


def _open_whole(data: Data) -> tuple[Source, ...]:
    """Open the data as a run may have been trained on it: everything, and all but what is held out by default."""
    return () if list_splits(data) else (open_data(data), open_data(data, "train"))


def score_images(
    model: ImageModel,
    images: LabelledImages,
    name: str,
    *,
    seconds: float = SECONDS,
    on_event: OnEvent = ignore_event,
) -> AnyScores | None:
    """Score a model on labelled images, or on as many of them, evenly spread, as take about so many seconds.

    Args:
        model: the model, on any device; it is not changed.
        images: the images.
        name: the model's name in the report.
        seconds: how long it may take, by an estimate.
        on_event: called with the progress of the task "evaluating".

    Returns:
        The scores; None if the model has no classes, the labels are not certainly classes of the model, or the data
        has another task than the model.
    """
    device = next(model.parameters()).device
    engine = open_engine(model, device=device, batch=BATCH)
    if engine.num_classes and engine.task.kind != "labels":
        return _score_answers(model, engine, images, name, seconds, on_event)
    if images.source.task.kind != "labels":
        return None
    labels = _match_labels(engine, images.source)
    if labels is None:
        return None
    every = images.source.labels(0, len(images.source))
    known = np.flatnonzero((every >= 0) & ~np.isin(every, labels.unmatched))
    if len(known) < LEAST_IMAGES:
        return None
    most = max(estimate_affordable(model, images.source, seconds), LEAST_IMAGES)
    chosen = Subset(images.source, known[spread_evenly(len(known), most)])
    report, scored = score_model(
        engine,
        chosen,
        options=InferenceOptions(BATCH, device=str(device)),
        labels=labels,
        names=(name, images.name, None),
        progress=send_progress(on_event, "evaluating"),
    )
    report = replace(report, was_trained_on=_has_learned_from(model, images))
    return ModelScores(report, scored, _describe_scored(images, len(known), len(chosen)))


def _score_answers(
    model: ImageModel, engine: Engine, images: LabelledImages, name: str, seconds: float, on_event: OnEvent
) -> TaskModelScores | None:
    """Score a model with another task than one label, as `score_images` does; None if the data has another task."""
    try:
        require_same_task(engine.task, images.source.task)
    except DataError:
        return None
    count, most = len(images.source), max(estimate_affordable(model, images.source, seconds), LEAST_IMAGES)
    if count < LEAST_IMAGES:
        return None
    chosen = Subset(images.source, np.array(spread_evenly(count, most)))
    report, _ = score_task(
        engine,
        chosen,
        options=InferenceOptions(BATCH, device=str(engine.device)),
        names=(name, images.name, None),
        progress=send_progress(on_event, "evaluating"),
    )
    report = replace(report, was_trained_on=_has_learned_from(model, images))
    return TaskModelScores(report, chosen, _describe_scored(images, count, len(chosen)))


def _describe_scored(images: LabelledImages, count: int, chosen: int) -> str:
    rest = ", evenly spread; vitrail evaluate measures on all of them" if chosen < count else ""
    return describe_count(count, images.name, chosen) + rest


def _has_learned_from(model: ImageModel, images: LabelledImages) -> bool:
    return model.learned_from in {compute_fingerprint(each) for each in (images.source, *images.whole)}


def estimate_affordable(model: ImageModel, source: Source, seconds: float) -> int:
    """Return on how many images of a source a model can be scored in so many seconds, by its operations."""
    kind = next(model.parameters()).device.type
    computing = compute_cost(model.architecture).flops / OPERATIONS_PER_SECOND.get(kind, OPERATIONS_PER_SECOND["cpu"])
    return int(seconds / (computing + SECONDS_PER_IMAGE + SECONDS_PER_PIXEL * _measure_pixels(source)))


def _measure_pixels(source: Source) -> float:
    """Return the mean number of pixels of a few images; 0 if none of them can be read."""
    sizes: list[int] = []
    for index in spread_evenly(len(source), SAMPLED):
        try:
            content = source.read(index).content
            sizes.append(content[0].numel() if isinstance(content, Tensor) else int(np.prod(open_image(content).size)))
        except (DataError, OSError):
            continue
    return float(np.mean(sizes)) if sizes else 0.0


def _match_labels(engine: Engine, source: Source) -> LabelMap | None:
    if not engine.num_classes:
        return None
    try:
        labels = match_classes(engine.class_names, engine.num_classes, source.classes, source.num_classes)
    except DataError:
        return None
    known = len(labels.accepted) - len(labels.unmatched)
    return labels if known >= LEAST_KNOWN * len(labels.accepted) else None
