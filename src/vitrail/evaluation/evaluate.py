"""Score a model on a data set: `evaluate` is what people call, `score_model` what it does on data that is open.

What a model is asked is its task: one label an image here, any other in `score_task.py`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

import vitrail
from vitrail.data.open import Data, add_labels_from, choose_test_split, list_splits, name_data, open_data
from vitrail.data.sources.source import Source, compute_fingerprint
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.figures import draw_report, draw_task_report
from vitrail.evaluation.labels import LabelMap, match_classes, read_label_map
from vitrail.evaluation.predictions import PredictionTable, predict_all, select_known_images
from vitrail.evaluation.real import count_real_hits, read_real_labels
from vitrail.evaluation.report import EvaluationReport, RealAccuracy, make_report
from vitrail.evaluation.score_task import read_as_task, require_same_task, score_task
from vitrail.evaluation.task_report import TaskReport
from vitrail.inference import class_names
from vitrail.inference.batches import InferenceOptions, open_model, single_rank
from vitrail.inference.engine import Engine, Model, name_model
from vitrail.system.device import device_name
from vitrail.system.events import OnEvent, Progress, ignore_event, open_listener, send_messages, send_progress
from vitrail.system.files import describe_reason, short_name, write_whole
from vitrail.system.intervals import estimate_share
from vitrail.system.ranks import Ranks, join_ranks

TIMEOUT = 1800.0
"""Seconds that a rank waits for the others."""
HELD_OUT_SHARES = (0.1, 0.2)
"""The shares that trainings hold out of data without splits, unless a setting says otherwise."""
AUTO = "auto"
"""As a folder: one in ./runs that is named after the data and the model."""


def evaluate(
    model: Model,
    data: Data,
    split: str | None = None,
    *,
    labels: str | Sequence[str] | None = None,
    labels_from: str | None = None,
    real: str | Path | None = None,
    mapping: str | Path | None = None,
    among: bool = False,
    batch_size: int = 64,
    workers: int = 0,
    device: str = "auto",
    precision: str = "fp32",
    folder: str | Path | None = None,
    on_event: OnEvent | None = None,
) -> EvaluationReport | TaskReport:
    """Score a model on a data set, by what it answers: a label, tags, numbers, levels or attributes.

    Started by torchrun, all ranks share the work and each gets the same report.

    Events: `message` (text) while a faster precision is prepared, and the progress of the task "evaluating".

    Args:
        model: a loaded model, anything that `vitrail.load` takes, or an exported .onnx or .xml file.
        data: anything that `open_data` takes: a folder, a file, hf:owner/name, digits, a list of (image, label) pairs.
        split: train, val or test; by default test, else val, else everything.
        labels: the columns of the data that hold what is true, such as "colour,shape", if they have other names than
            in the data that the model has learned from.
        labels_from: where the class stands in the names of a folder's images: "NAME_*" for cat_1.jpg, or a regular
            expression with one group.
        real: the file real.json; ImageNet is then scored against its ReaL labels as well.
        mapping: a CSV or JSON file that says which classes of the model are right for which of the data.
        among: choose each guess among the classes of the data instead of all classes of the model. `real`, `mapping`
            and `among` are for models with one label an image.
        batch_size: images at a time, over all ranks together.
        workers: processes that read images; 0 reads them in this process.
        device: cpu, cuda, mps, …; auto takes a GPU if the machine has one.
        precision: fp32, or faster and less exact: bf16, fp16 and fp8 (GPU), int8 (CPU); auto takes the fastest here.
        folder: where report.json and the figures are written; "auto" is a folder in ./runs, and None writes nothing.
        on_event: called with what happens; by default a terminal or notebook shows a bar.

    Returns:
        For a model that answers with one label an `EvaluationReport`: accuracy, balanced accuracy, likelihood and
        calibration with intervals, every class, confusions and mistakes. For any other task a `TaskReport`: its
        measures with intervals, its tables, and the images with the worst answers.

    Raises:
        ConfigError: an argument is wrong, or the model has no head.
        DataError: the data cannot be read, has other targets, or its classes cannot be matched with the model's.
        WeightsError: the model cannot be read, or computes values that are not finite.
    """
    options = InferenceOptions(batch_size, workers, device, precision)
    data = add_labels_from(data, labels_from)
    is_first = os.environ.get("RANK", "0") == "0"
    with (
        open_listener(on_event if is_first else ignore_event) as listener,
        join_ranks(options.device, TIMEOUT) as ranks,
    ):
        engine = open_model(model, options, ranks, on_message=send_messages(listener))
        if engine.num_classes and engine.task.kind != "labels":
            _refuse_label_options(engine.task.kind, {"real": real, "mapping": mapping, "among": among or None})
        data = read_as_task(data, engine.task, labels)
        source, part = open_scored_part(data, split, engine)
        require_same_task(engine.task, source.task)
        names = (name_model(model), name_data(data), part)
        place = _choose_folder(folder, names, engine.precision)
        progress = send_progress(listener, "evaluating")
        was_trained_on, chose_weights = has_learned_from(engine, source, data), was_chosen_by(engine, source)
        is_writer = place is not None and ranks.is_first
        if engine.task.kind != "labels":
            measured, answered = score_task(
                engine, source, options=options, ranks=ranks, names=names, progress=progress
            )
            measured = replace(measured, was_trained_on=was_trained_on, chose_weights=chose_weights)
            if place is None or not is_writer:
                return measured
            figures = draw_task_report(measured, engine.task, answered, source, place)
            return replace(measured, files=(_write_json(measured, place), *figures))
        matched = None
        if mapping is not None:
            matched = read_label_map(
                Path(mapping), engine.class_names, engine.num_classes, source.classes, source.num_classes
            )
        report, scored = score_model(
            engine,
            source,
            options=options,
            ranks=ranks,
            labels=matched,
            among=among,
            real=None if real is None else Path(real),
            names=names,
            progress=progress,
        )
        report = replace(report, was_trained_on=was_trained_on, chose_weights=chose_weights)
        if place is None or not is_writer:
            return report
        return replace(report, files=(_write_json(report, place), *draw_report(report, scored, place)))


def _refuse_label_options(kind: str, options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{name} is for models that answer with one label, and this one answers with {kind}")


def score_model(
    model: Model | Engine,
    source: Source,
    *,
    options: InferenceOptions | None = None,
    ranks: Ranks | None = None,
    labels: LabelMap | None = None,
    among: bool = False,
    real: Path | None = None,
    names: tuple[str, str, str | None] = ("the model", "the data", None),
    progress: Progress | None = None,
) -> tuple[EvaluationReport, Source]:
    """Return a report on a model, and the images that were scored. Every rank gets the same report.

    Args:
        model: a model with a classification head: loaded, as an engine, or its name.
        source: images with labels.
        options: device, precision, batch size, worker processes.
        ranks: the processes that share the work; by default this process alone.
        labels: which classes of the model are right for which of the data; by default they are matched by name.
        among: choose each guess among the classes of the data instead of all classes of the model.
        real: the file of ReaL labels of ImageNet's validation images, to score against as well.
        names: of the model, the data and its split, for the report.
        progress: called after each batch with the number of images done and of all images.

    Raises:
        ConfigError: the model has no head, or `real` is given and the classes are not ImageNet's.
        DataError: the classes cannot be matched, or none of the images can be scored.
    """
    if not len(source):
        raise DataError("the data has no images")
    options = options or InferenceOptions()
    ranks = ranks or single_rank(options)
    engine = open_model(model, options, ranks)
    if not engine.num_classes:
        raise ConfigError("the model has no head to classify with: `vitrail fewshot` measures its representation")
    if labels is None:
        labels = match_classes(engine.class_names, engine.num_classes, source.classes, source.num_classes)
    scored = select_known_images(source, labels)
    if not len(scored):
        raise DataError("none of the images is of a class that the model knows")
    score_real = None if real is None else _make_real_scorer(real, scored, engine)
    began = time.perf_counter()
    predictions = predict_all(engine, scored, labels, options, ranks=ranks, among=among, progress=progress)
    seconds = time.perf_counter() - began
    report = make_report(
        predictions,
        scored,
        labels,
        engine.class_names,
        len({guess for classes in labels.accepted for guess in classes}) if among else engine.num_classes,
        model=names[0],
        data=names[1],
        part=names[2],
        left_out=len(source) - len(scored),
        real=None if score_real is None else score_real(predictions),
        about={
            "among_the_classes_of_the_data": among,
            "device": f"{ranks.size} × {device_name(engine.device)}",
            "runtime": engine.runtime,
            "precision": engine.precision,
            "seconds": seconds,
            "images_per_second": len(scored) / seconds,
            "torch": torch.__version__,
            "vitrail": vitrail.__version__,
        },
    )
    return report, scored


def has_learned_from(engine: Engine, source: Source, data: Data) -> bool:
    """Return whether the model is known to have been trained on these images, or on a data set that holds them."""
    learned = getattr(getattr(engine, "model", None), "learned_from", None)  # an exported file does not tell
    if learned is None:
        return False
    known = [source]
    if not list_splits(data):
        whole = open_data(data)
        known.append(whole)
        if len(source) == len(whole):  # it holds what a training takes of it by default
            known += [open_data(data, "train", share) for share in HELD_OUT_SHARES]
    return learned in map(compute_fingerprint, known)


def was_chosen_by(engine: Engine, source: Source) -> bool:
    """Return whether the model is known to be the one of several, of a training, that was best on these images."""
    chosen = getattr(getattr(engine, "model", None), "chosen_by", None)
    return chosen is not None and chosen == compute_fingerprint(source)


def open_scored_part(data: Data, split: str | None, engine: Engine | None = None) -> tuple[Source, str | None]:
    """Open the given split, else the one for testing, else everything; return it with its name.

    Of data without splits, `val` is what the training of the model in `engine` held out, if that is known; else a tenth
    of every class.
    """
    splits = list_splits(data)
    split = split or choose_test_split(data) or ("train" if "train" in splits else None)
    if split == "val" and not splits and engine is not None:
        for share in HELD_OUT_SHARES:
            held_out = open_data(data, "val", share)
            if was_chosen_by(engine, held_out) or has_learned_from(engine, open_data(data, "train", share), data):
                return held_out, split
    return open_data(data, split), split


def _choose_folder(folder: str | Path | None, names: tuple[str, str, str | None], precision: str) -> Path | None:
    """Return the folder to write into, after it was made; None if nothing is to be written."""
    if folder is None:
        return None
    model, data, part = names
    faster = [] if precision in ("fp32", "exported") else [precision]
    name = "-".join(["evaluate", short_name(data), *([part] if part else []), short_name(model), *faster])
    place = Path("runs") / name if folder == AUTO else Path(folder)
    if place.exists() and not place.is_dir():
        raise ConfigError(f"{place} is a file: give a folder for the report")
    try:
        if os.environ.get("RANK", "0") == "0":
            place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{place} cannot be made ({describe_reason(error)}): give another folder for the report"
        ) from None
    return place


def _write_json(report: EvaluationReport | TaskReport, folder: Path) -> Path:
    path = folder / "report.json"
    write_whole(path, (json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n").encode())
    return path


def _make_real_scorer(path: Path, source: Source, engine: Engine) -> Callable[[PredictionTable], RealAccuracy]:
    """Read ReaL labels. Report what is wrong with them, or with the images' names, before anything is computed."""
    numbers = class_names.find_class_numbers(engine.class_names, engine.num_classes)
    if numbers is None:
        raise ConfigError("ReaL labels (--real) are for models with ImageNet's 1000 classes, and this model has others")
    labels = read_real_labels(path)
    count_real_hits(labels, [source.name(0)], [None])

    def score(predictions: PredictionTable) -> RealAccuracy:
        names = (source.name(index) for index in predictions.indices.tolist())
        guesses = (numbers[guess] for guess in predictions.guesses.tolist())
        hits, counted, empty = count_real_hits(labels, names, guesses)
        return RealAccuracy(estimate_share(hits, counted), counted, empty)

    return score
