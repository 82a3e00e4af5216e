"""The report of every finished run, and of a classifier that was made without one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vitrail.data.open import Data
from vitrail.data.sources.source import Source
from vitrail.errors import VitrailError
from vitrail.inspection.image_choice import choose_from_source, choose_photographs
from vitrail.inspection.images import MOST
from vitrail.inspection.inspect import REPORT, inspect_loaded, name_models, open_run_images
from vitrail.inspection.score_images import LabelledImages, score_images
from vitrail.inspection.scores import AnyScores
from vitrail.model.base import ImageModel
from vitrail.model.cost import compute_cost
from vitrail.system.device import choose_device
from vitrail.system.events import OnEvent, ignore_event, send_messages
from vitrail.training.result import TrainingResult

CPU_OPERATIONS, QUICK_OPERATIONS = 2e12, 2.5e10
"""Operations that a CPU may spend on one pass over the images: about ten seconds, and less than one."""
LEAST = 8
"""Images that are measured on even where they take longer."""
STOPPED = "stopped"
"""The problem of a report that a KeyboardInterrupt ended."""


def write_run_report(
    result: TrainingResult,
    *,
    source: Data | None = None,
    scores: AnyScores | None = None,
    is_brief: bool = False,
    on_event: OnEvent = ignore_event,
) -> TrainingResult:
    """Write the report of a finished run into its folder, and return the result with the report's path.

    An error never spoils the run: it is told as an event.

    Args:
        result: The run. Without `run.report`, and on all ranks but the first, there is no report.
        source: The images of the run, if no name opens them.
        scores: How good the model is. If None, a classifier is scored on the images that the run was validated on: on
            as many of them, evenly spread, as take about 15 seconds.
        is_brief: Whether it must be made within seconds: the inside is measured on few images.
        on_event: Called with what happens.

    Events:
        report: folder, path, problem: the report's file, or None and why none could be made.
        progress: the passes over images.
        message: why the model could not be scored.
    """
    if not result.config.run.report or os.environ.get("RANK", "0") != "0":
        return result
    values = {"folder": str(result.folder), "path": None, "problem": ""}
    try:
        result = replace(result, report=_inspect_run(result, source, scores, is_brief, on_event))
        values["path"] = str(result.report)
    except KeyboardInterrupt:
        values["problem"] = STOPPED
    except Exception as error:  # the trained model must not be lost for a report
        is_known = isinstance(error, VitrailError | OSError)
        values["problem"] = str(error) if is_known else f"{type(error).__name__}: {error}"
    on_event("report", values)
    return result


def _inspect_run(
    result: TrainingResult, source: Data | None, scores: AnyScores | None, is_brief: bool, on_event: OnEvent
) -> Path:
    device, names = choose_device(result.config.run.device), [str(result.folder)]
    images = open_run_images(result.config, source)
    choice = choose_photographs() if images is None else images.choice
    path = result.folder / REPORT
    try:
        model = result.model.to(device)
        if scores is None and images is not None and images.labelled is not None:
            scores = _score_run(model, images.labelled, name_models(names)[0], on_event)
        most = _count_affordable(model, QUICK_OPERATIONS if is_brief else CPU_OPERATIONS)
        return inspect_loaded(names, [model], choice, path, most, on_event, [scores]).report
    finally:
        result.model.cpu()


def _score_run(model: ImageModel, images: LabelledImages, name: str, on_event: OnEvent) -> AnyScores | None:
    """Score the model. If that fails, the rest of the report is still worth having."""
    try:
        return score_images(model, images, name, on_event=on_event)
    except VitrailError as error:
        send_messages(on_event)(f"the report is without the accuracy: {error}")
        return None


def write_report(folder: Path, make: Callable[[OnEvent], Path], listener: OnEvent) -> Path | None:
    """Make the report of a model that was fitted without a training run, and tell it as an event.

    An error never spoils the model: it is told as an event too, and there is no report.
    """
    path, problem = None, ""
    try:
        path = make(listener)
    except Exception as error:  # the model must not be lost for a report
        problem = str(error) if isinstance(error, VitrailError | OSError) else f"{type(error).__name__}: {error}"
    listener("report", {"folder": str(folder), "path": None if path is None else str(path), "problem": problem})
    return path


def write_inside_report(
    model: ImageModel, folder: Path, images: Source, data: str, on_event: OnEvent = ignore_event
) -> Path:
    """Write `folder`/report.html about the inside of a model that was made without a training run; return its path.

    Args:
        model: The model, on any device.
        folder: Where the report goes. If the weights lie in it, the report shows their card.
        images: It looks inside the model on so few of them that this takes seconds.
        data: The name of the data and of the model in the report, which strangers may read.
        on_event: Called with `progress` events.
    """
    most = _count_affordable(model, QUICK_OPERATIONS)
    choice, path = choose_from_source(images, data), folder / REPORT
    return inspect_loaded([str(folder)], [model], choice, path, most, on_event, [None], [data]).report


def write_scored_report(
    model: ImageModel, name: str, folder: Path, scores: AnyScores, *, on_event: OnEvent = ignore_event
) -> Path:
    """Write `folder`/report.html about a classifier that was made without a training run, and return its path.

    It looks inside the model on images of `scores.source`, on so few that this takes seconds.

    Args:
        model: The classifier, on any device.
        name: Its name in the report, which strangers may read.
        folder: Where the report goes. If the weights lie in it, the report shows their card.
        scores: How good the model is.
        on_event: Called with `progress` events.

    Raises:
        ConfigError: The report cannot be written.
        DataError: None of the images can be read.
    """
    choice = choose_from_source(scores.source, scores.report.data)
    most = _count_affordable(model, QUICK_OPERATIONS)
    path = folder / REPORT
    return inspect_loaded([str(folder)], [model], choice, path, most, on_event, [scores], [name]).report


def _count_affordable(model: ImageModel, operations: float) -> int:
    """Return the number of images to measure on: on a CPU as many as so many operations allow."""
    if next(model.parameters()).device.type == "cuda":
        return MOST
    return min(max(int(operations / compute_cost(model.architecture).flops), LEAST), MOST)
