"""How good a model is at a task, by images that did not choose it: what `finetune` reports, for any task but labels.

The images that chose the weights also tune the task, such as a threshold for each tag. Others are measured: those of
the test split, or the second half of the validation images.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.data.open import Data, open_data
from vitrail.data.sources.source import Source
from vitrail.evaluation.answered_images import AnsweredImages, answer_all
from vitrail.evaluation.score_task import make_task_report
from vitrail.evaluation.task_report import TaskReport
from vitrail.inference.batches import InferenceOptions, open_model, single_rank
from vitrail.inspection.scores import TaskModelScores
from vitrail.model.base import ImageModel
from vitrail.system.events import OnEvent, send_progress
from vitrail.system.files import write_whole
from vitrail.system.intervals import Estimate
from vitrail.system.results import format_count, to_plain
from vitrail.tasks.task import Measure, Task, TaskMeasures
from vitrail.training.build import divide_validation
from vitrail.training.config import RunConfig

MEASURES_FILE = "measures.json"
"""The file, in the folder of a run, with the measures of its model."""


class JudgingImages(NamedTuple):
    """The images that tune a task, and those that are measured."""

    tuning: Source | None
    measured: Source | None
    remark: str
    """A sentence about those that are measured."""
    flatters: bool = False
    """Whether they also chose, because there are no others."""


@dataclass(frozen=True)
class TaskJudgement:
    """A task as its images have tuned it, and the measures on others."""

    task: Task
    report: TaskReport
    source: Source
    """The images that were measured."""
    remark: str
    flatters: bool

    @property
    def measures(self) -> TaskMeasures:
        return self.report.measured

    @property
    def images(self) -> int:
        """The number of images that were measured."""
        return self.report.images

    @property
    def scores(self) -> TaskModelScores:
        """What the page about the model says of them."""
        return TaskModelScores(self.report, self.source, self.remark)

    def list_measures(self) -> list[dict[str, Any]]:
        """Return name, value and interval of each measure, for JSON."""
        return [
            {"name": each.name, **to_plain(each.estimate), "is_share": each.is_share} for each in self.measures.measures
        ]

    def describe(self) -> str:
        """Return what the model card says."""
        measured = ", ".join(f"{each.name} {describe_estimate(each)}" for each in self.measures.measures)
        return f"{self.remark} {measured}."

    def write(self, folder: Path) -> None:
        """Write the measures as JSON."""
        content = {**describe_judgement(self), "tables": to_plain(self.measures.tables)}
        write_whole(folder / MEASURES_FILE, json.dumps(content, indent=1, ensure_ascii=False).encode())


def describe_judgement(judgement: TaskJudgement) -> dict[str, Any]:
    """Return the values of a `measures` event."""
    return {
        "task": judgement.task.kind,
        "images": judgement.images,
        "remark": judgement.remark,
        "flatters": judgement.flatters,
        "measures": judgement.list_measures(),
    }


def describe_estimate(measure: Measure) -> str:
    """Return the value of a measure with its interval as text."""
    estimate, form = measure.estimate, "{:.1%}" if measure.is_share else "{:.4g}"
    if not isinstance(estimate, Estimate) or estimate.value != estimate.value:
        return "not known"
    value, low, high = (form.format(number) for number in (estimate.value, estimate.low, estimate.high))
    return f"{value} (95% interval {low} to {high})"


def choose_judging_images(config: RunConfig, evaluation: Source | None, test: Source | None) -> JudgingImages:
    """Return the images that tune and those that are measured.

    Args:
        config: says how the validation images are divided.
        evaluation: the validation images, which chose the weights.
        test: the images of the test split, if they chose nothing.
    """
    parts = divide_validation(config, evaluation)
    if test is not None:
        images = format_count(len(test), "image")
        remark = f"Measured on {images} of the test split, which neither trained nor chose anything."
        return JudgingImages(evaluation, test, remark)
    if len(parts) > 1:
        remark = f"Measured on {format_count(len(parts[1]), 'image')} that neither trained nor chose anything."
        return JudgingImages(parts[0], parts[1], remark)
    remark = "The images were not trained on, but chose the weights: the measures may flatter."
    return JudgingImages(evaluation, evaluation, remark, flatters=True)


def judge_task(
    task: Task, tuning: AnsweredImages | None, measured: AnsweredImages | None, images: JudgingImages, data: str
) -> TaskJudgement | None:
    """Tune a task on some images and measure it on others; return None if there are none to measure.

    `data` is the name of the data, and of the model, on the page about it.
    """
    if measured is None or not len(measured) or images.measured is None:
        return None
    if tuning is not None and len(tuning):
        task = task.tune(tuning.values, tuning.targets)
    report = make_task_report(task, measured, images.measured, (data, data, None))
    return TaskJudgement(task, report, images.measured, images.remark, images.flatters)


def judge_model(
    model: ImageModel, images: JudgingImages, options: InferenceOptions, data: str, listener: OnEvent
) -> TaskJudgement | None:
    """Measure a model on the images that judge it; return None if there are none."""
    progress = send_progress(listener, "measuring")
    engine, ranks = open_model(model, options), single_rank(options)
    tuning, measured = (
        None if source is None else answer_all(engine, source, options, ranks, progress)
        for source in (images.tuning, images.measured)
    )
    return judge_task(model.task, tuning, measured, images, data)


def open_test(data: Data, is_wanted: bool) -> Source | None:
    """Open the test split, if the model is to be measured on it."""
    return open_data(data, "test") if is_wanted else None
