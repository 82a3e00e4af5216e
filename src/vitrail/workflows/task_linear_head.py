"""Fit a linear head for any task to the frozen features of a model: seconds on a CPU, nothing is trained.

Labels have their own way in closed form, see linear_head.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitrail.data.open import Data, name_data, open_training_images
from vitrail.data.sources.source import Source, compute_fingerprint
from vitrail.errors import VitrailError
from vitrail.evaluation.answered_images import AnsweredImages, read_outputs
from vitrail.evaluation.features import Features, extract_features
from vitrail.evaluation.linear_classifier import LinearClassifier
from vitrail.evaluation.task_head import TaskExamples, fit_task_head
from vitrail.inference.batches import InferenceOptions, open_model
from vitrail.model.base import ImageModel
from vitrail.model.create import copy_model
from vitrail.system.events import OnEvent, send_progress
from vitrail.system.files import hide_folders, short_name
from vitrail.system.ranks import require_one_process
from vitrail.tasks.task import Task, to_tensors
from vitrail.training.build import divide_validation, open_training_data
from vitrail.training.config import RunConfig
from vitrail.training.resolve import Settings, change_config
from vitrail.training.trained_model import linear_head_cost
from vitrail.workflows.finetune_result import TaskResult
from vitrail.workflows.finetune_settings import choose_holdout, summarise_data
from vitrail.workflows.linear_head import (
    check_head,
    fill_head,
    open_feature_engine,
    resolve_options,
    save_and_verify,
)
from vitrail.workflows.quick_folder import check_folder, check_same_task
from vitrail.workflows.run_report import write_inside_report, write_report, write_scored_report
from vitrail.workflows.start_model import name_model, open_start
from vitrail.workflows.task_measures import (
    JudgingImages,
    TaskJudgement,
    choose_judging_images,
    describe_judgement,
    judge_task,
    open_test,
)


class Part(NamedTuple):
    """Some images and their features."""

    source: Source
    features: Features

    @property
    def examples(self) -> TaskExamples:
        """The features with the targets."""
        targets, rows = to_tensors(self.source.targets(0, len(self.source))), self.features.indices
        return TaskExamples(self.features.values, {name: values[rows] for name, values in targets.items()})

    def answer(self, outputs: LinearClassifier) -> AnsweredImages:
        """Return what a head answers for these images."""
        computed = outputs.scores(self.features.values)
        return read_outputs(self.source.task, computed, dict(self.examples.targets), self.features.indices)


def fit_linear_task_head(
    data: Data,
    start: str | ImageModel,
    *,
    folder: str | Path | None,
    settings: Settings,
    listener: OnEvent,
    options: InferenceOptions | None = None,
) -> TaskResult:
    """Fit and save a head for a task: `finetune` with `quick`, for any task but labels.

    Images are held out as for a training. Half of them choose the strength of the penalty and tune the task; the other
    half, or the test split, is measured. Then the head is fitted again, to the held-out images too.

    Args:
        data: DATA with targets of a task.
        start: MODEL or a loaded model, whose features are used as they are.
        folder: where the model goes; by default runs/DATA-quick, or runs/DATA-quick-from-MODEL.
        settings: `image_size`, `folder`, `report`, `share` and `share_seed`.
        listener: called with what happens.
        options: where and in which precision the features are computed; by default in the fastest one that is close
            to fp32 on these images.

    Events:
        features: model, images, all_images (those that cannot be read too), classes (None), image_size, features (of
            each), precision.
        measures: images, remark, measures (each with name, value, low, high, is_share).
        report: folder, path, problem: the report's file, or None and why none could be made.
        progress: passes over images.
    """
    require_one_process("quick")
    began, data_name, name = time.perf_counter(), name_data(data), name_model(start)
    config = resolve_options(data_name, name, folder, settings)
    check_folder(config.run.folder)
    summary = summarise_data(data)
    config = change_config(config, {"data": {"divide_validation": "halves", **choose_holdout(summary)}})
    parts = open_training_data(config.data, data)
    check_same_task(config.run.folder, parts.training.task)
    network = open_start(start, config.model.image_size)
    engine, options = open_feature_engine(network, parts.training, options, listener)
    progress = send_progress(listener, "features")

    def extract(source: Source) -> Part:
        return Part(source, extract_features(engine, source, options, progress=progress))

    train = extract(parts.training)
    listener("features", {"precision": engine.precision, **_describe_features(network, name, train)})
    images = choose_judging_images(config, parts.evaluation, open_test(data, summary.has_test))
    tuning = None if images.tuning is None else extract(images.tuning)
    measured = tuning if images.flatters or images.measured is None else extract(images.measured)
    fitted = fit_task_head(train.source.task, train.examples, None if tuning is None else tuning.examples)
    judgement = _judge(fitted.outputs, tuning, measured, images, short_name(data_name))
    if judgement is not None:
        listener("measures", describe_judgement(judgement))
    held_out = [] if summary.has_validation else [tuning, None if summary.has_test or images.flatters else measured]
    everything = _join([train, *(part for part in held_out if part is not None)])
    outputs = fit_task_head(train.source.task, everything, strengths=[fitted.strength]).outputs
    fill_task_head(network, outputs, train.source.task if judgement is None else judgement.task)
    check_head(network, outputs, train.features, train.source, options)
    count, seconds = len(everything.values), time.perf_counter() - began
    network.training_cost = linear_head_cost(network, count, seconds, engine.device)
    has_all = not summary.has_validation and config.data.share is None
    network.learned_from = compute_fingerprint(open_training_images(data) if has_all else parts.training)
    network.chosen_by = None if parts.evaluation is None else compute_fingerprint(parts.evaluation)
    folder = config.run.folder
    folder.mkdir(parents=True, exist_ok=True)
    notes = (
        f"A linear head for {train.source.task.kind}, fitted to {count:,} images with a penalty of "
        f"{fitted.strength:.3g}; the rest is as it was in {hide_folders(name)}."
    )
    if judgement is not None:
        judgement.write(folder)
        notes += f"\n\n{judgement.describe()}"
    saved = save_and_verify(network, folder, train.features, train.source, options, notes)
    report = None
    if config.run.report:
        title = short_name(data_name)
        make = (
            partial(write_inside_report, network, folder, parts.training, title)
            if judgement is None
            else partial(write_scored_report, network, title, folder, judgement.scores)
        )
        report = write_report(folder, lambda on_event: make(on_event=on_event), listener)
    return TaskResult(
        model=network.cpu(),
        folder=folder,
        weights=saved,
        config=None,
        accuracy=None,
        evaluated=0 if judgement is None else judgement.images,
        flatters=images.flatters,
        report=report,
        judgement=judgement,
    )


def fit_start_task_head(network: ImageModel, config: RunConfig, data: Data, listener: OnEvent) -> ImageModel | None:
    """Return a copy of a model with a head that is fitted to the training images, at the size of the training.

    Training then improves a good model instead of a head of zeros. Of what is held out, only the images that choose
    the weights choose the strength of the penalty too.

    Returns:
        None if the model's head is not a linear layer on its representation.
    """
    parts = open_training_data(change_config(config, {"data": {"in_memory": False}}).data, data)
    fitted = copy_model(network)
    if config.model.image_size is not None:
        fitted.resize(config.model.image_size)
    options = InferenceOptions(batch_size=config.data.batch_size, device=config.run.device)
    engine, progress = open_model(fitted, options), send_progress(listener, "features")
    train, choosing = (
        None if source is None else Part(source, extract_features(engine, source, options, None, progress))
        for source in (parts.training, next(iter(divide_validation(config, parts.evaluation)), None))
    )
    assert train is not None
    try:
        outputs = fit_task_head(
            train.source.task, train.examples, None if choosing is None else choosing.examples
        ).outputs
        fill_task_head(fitted, outputs, train.source.task)
        check_head(fitted, outputs, train.features, train.source, options)
    except VitrailError:
        return None
    return fitted.cpu()


def fill_task_head(network: ImageModel, outputs: LinearClassifier, task: Task) -> None:
    """Give a model a head for a task, with fitted weights and biases.

    Raises:
        ConfigError: the model's head is not a linear layer on its representation.
    """
    network.give_task(task)
    fill_head(network, outputs)


def _judge(
    outputs: LinearClassifier, tuning: Part | None, measured: Part | None, images: JudgingImages, data: str
) -> TaskJudgement | None:
    """Measure a fitted head on features."""
    if tuning is None or measured is None:
        return None
    return judge_task(tuning.source.task, tuning.answer(outputs), measured.answer(outputs), images, data)


def _join(parts: Sequence[Part]) -> TaskExamples:
    """Return the examples of several parts as one."""
    examples = [part.examples for part in parts]
    names = examples[0].targets
    targets = {name: torch.cat([each.targets[name] for each in examples]) for name in names}
    return TaskExamples(torch.cat([each.values for each in examples]), targets)


def _describe_features(network: ImageModel, name: str, train: Part) -> dict[str, Any]:
    """Return the values of a `features` event."""
    return {
        "model": name,
        "images": len(train.features),
        "all_images": len(train.source),
        "classes": None,
        "image_size": list(network.image_size),
        "features": train.features.values.shape[1],
    }
