"""Score a classifier on a data set: `evaluate` takes names and writes a report, `score_model` takes loaded objects."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import vitrail
from vitrail.data.open import choose_test_split, list_splits, open_data
from vitrail.data.sources.source import Source, compute_fingerprint
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.figures import draw_report
from vitrail.evaluation.labels import LabelMap, match_classes, read_label_map
from vitrail.evaluation.predictions import PredictionTable, predict_all, select_known_images
from vitrail.evaluation.real import count_real_hits, read_real_labels
from vitrail.evaluation.report import EvaluationReport, RealAccuracy, make_report
from vitrail.inference import class_names
from vitrail.inference.batches import InferenceOptions, single_rank
from vitrail.model.base import ImageModel
from vitrail.system.device import device_name
from vitrail.system.events import Progress
from vitrail.system.files import short_name, write_whole
from vitrail.system.intervals import estimate_share
from vitrail.system.ranks import Ranks, join_ranks
from vitrail.weights.load import load

TIMEOUT = 1800.0
"""Seconds that a rank waits for the others."""


@dataclass(frozen=True)
class SavedReport:
    """A report and the files that hold it."""

    report: EvaluationReport
    files: tuple[Path, ...]
    is_first: bool
    """Whether this process is the first rank, which writes the files and prints."""
    was_trained_on: bool
    """Whether the model is known to have learned from these images."""


def evaluate(
    model: str,
    data: str,
    split: str | None = None,
    *,
    real: Path | None = None,
    mapping: Path | None = None,
    among: bool = False,
    options: InferenceOptions | None = None,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> SavedReport:
    """Score a model on a data set, on all ranks together. The first rank writes report.json and the figures.

    Args:
        model: MODEL: a folder or file of weights, a run, hf:owner/name, timm:name, pane.
        data: DATA: a folder, a file, hf:owner/name, digits.
        split: train, val or test; by default test, else val, else everything.
        real: the file real.json; ImageNet is then scored against its ReaL labels as well.
        mapping: a CSV or JSON file that says which classes of the model are right for which of the data.
        among: choose each guess among the classes of the data instead of all classes of the model.
        options: device, precision, batch size, worker processes.
        folder: where to write; in ./runs by default.
        progress: called after each batch with the number of images done and of all images.
    """
    options = options or InferenceOptions()
    source, part = open_scored_part(data, split)
    loaded = load(model)
    labels = None
    if mapping is not None:
        labels = read_label_map(mapping, loaded.labels, loaded.num_classes, source.classes, source.num_classes)
    name = "-".join(["evaluate", short_name(data), *([part] if part else []), short_name(model)])
    folder = folder or Path("runs") / name
    _make_folder(folder)
    with join_ranks(options.device, TIMEOUT) as ranks:
        was_trained_on = learned_from(loaded, source, data)
        report, scored = score_model(
            loaded,
            source,
            options=options,
            ranks=ranks,
            labels=labels,
            among=among,
            real=real,
            names=(model, data, part),
            progress=progress if ranks.is_first else None,
        )
        files = _write_report(report, scored, folder) if ranks.is_first else ()
        return SavedReport(report, files, ranks.is_first, was_trained_on)


def score_model(
    model: ImageModel,
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
        model: a model with a classification head.
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
    options = options or InferenceOptions()
    ranks = ranks or single_rank(options)
    if not model.num_classes:
        raise ConfigError("the model has no head to classify with: `vitrail fewshot` measures its representation")
    if labels is None:
        labels = match_classes(model.labels, model.num_classes, source.classes, source.num_classes)
    scored = select_known_images(source, labels)
    if not len(scored):
        raise DataError("none of the images is of a class that the model knows")
    score_real = None if real is None else _make_real_scorer(real, scored, model)
    began = time.perf_counter()
    predictions = predict_all(model, scored, labels, options, ranks=ranks, among=among, progress=progress)
    seconds = time.perf_counter() - began
    report = make_report(
        predictions,
        scored,
        labels,
        model.labels,
        len({guess for classes in labels.accepted for guess in classes}) if among else model.num_classes,
        model=names[0],
        data=names[1],
        part=names[2],
        left_out=len(source) - len(scored),
        real=None if score_real is None else score_real(predictions),
        about={
            "among_the_classes_of_the_data": among,
            "device": f"{ranks.size} × {device_name(ranks.device)}",
            "precision": options.precision,
            "seconds": seconds,
            "images_per_second": len(scored) / seconds,
            "torch": torch.__version__,
            "vitrail": vitrail.__version__,
        },
    )
    return report, scored


def learned_from(model: ImageModel, source: Source, data: str) -> bool:
    """Return whether the model is known to have been trained on these images, or on a data set that holds them."""
    if model.learned_from is None:
        return False
    whole = [] if list_splits(data) else [open_data(data)]
    return model.learned_from in {compute_fingerprint(each) for each in (source, *whole)}


def open_scored_part(data: str, split: str | None) -> tuple[Source, str | None]:
    """Open the given split, else the one for testing, else everything; return it with its name."""
    split = split or choose_test_split(data) or ("train" if "train" in list_splits(data) else None)
    return open_data(data, split), split


def _make_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is a file: give a folder")
    try:
        if os.environ.get("RANK", "0") == "0":
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror}): give another folder by --out") from None


def _write_report(report: EvaluationReport, source: Source, folder: Path) -> tuple[Path, ...]:
    path = folder / "report.json"
    write_whole(path, (json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n").encode())
    return (path, *draw_report(report, source, folder))


def _make_real_scorer(path: Path, source: Source, model: ImageModel) -> Callable[[PredictionTable], RealAccuracy]:
    """Read ReaL labels. Report what is wrong with them, or with the images' names, before anything is computed."""
    numbers = class_names.find_class_numbers(model.labels, model.num_classes)
    if numbers is None:
        raise ConfigError("--real is for models with ImageNet's 1000 classes, and this model has others")
    labels = read_real_labels(path)
    count_real_hits(labels, [source.name(0)], [None])

    def score(predictions: PredictionTable) -> RealAccuracy:
        names = (source.name(index) for index in predictions.indices.tolist())
        guesses = (numbers[guess] for guess in predictions.guesses.tolist())
        hits, counted, empty = count_real_hits(labels, names, guesses)
        return RealAccuracy(estimate_share(hits, counted), counted, empty)

    return score
