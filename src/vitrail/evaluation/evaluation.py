"""A classifier on a data set: from a model and images to a report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

import vitrail
from vitrail.data.sources.source import Source
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.answers import Answers, ask, scored_part
from vitrail.evaluation.intervals import share
from vitrail.evaluation.labels import LabelMap, match
from vitrail.evaluation.real import Real as RealLabels
from vitrail.evaluation.real import read_real, score
from vitrail.evaluation.report import Real, Report, make_report
from vitrail.inference import class_names as imagenet
from vitrail.inference.batches import How, Progress, alone
from vitrail.model.base import ImageModel
from vitrail.system.device import device_name
from vitrail.system.ranks import Ranks


def evaluate(
    model: ImageModel,
    source: Source,
    *,
    how: How | None = None,
    ranks: Ranks | None = None,
    labels: LabelMap | None = None,
    among: bool = False,
    real: Path | None = None,
    names: tuple[str, str, str | None] = ("the model", "the data", None),
    progress: Progress | None = None,
) -> tuple[Report, Source]:
    """Everything about a model on a data set, and the images that were scored; the same on every rank.

    Args:
        model: with a head.
        source: images with labels.
        how: device, precision, batch size.
        ranks: the processes that share the work; this one alone if None.
        labels: which of the model's classes are right for which of the data's; found by their names if None.
        among: take guesses among the classes that the data has, not among all of the model's.
        real: the file of ReaL's labels of ImageNet's validation images, to score against too.
        names: of the model, of the data and of its part, for the report.
        progress: told how many images are done.
    """
    how = how or How()
    ranks = ranks or alone(how)
    if not model.num_classes:
        raise ConfigError("the model has no head to classify with: `vitrail fewshot` measures its representation")
    if labels is None:
        labels = match(model.labels, model.num_classes, source.classes, source.num_classes)
    scored = scored_part(source, labels)
    if not len(scored):
        raise DataError("none of the images is of a class that the model knows")
    reassessed = None if real is None else _reassessed(real, scored, model)
    began = time.perf_counter()
    answers = ask(model, scored, labels, how, ranks=ranks, among=among, progress=progress)
    seconds = time.perf_counter() - began
    report = make_report(
        answers,
        scored,
        labels,
        model.labels,
        len({guess for classes in labels.accepted for guess in classes}) if among else model.num_classes,
        model=names[0],
        data=names[1],
        part=names[2],
        left_out=len(source) - len(scored),
        real=None if reassessed is None else _real(reassessed, answers, scored),
        about={
            "among_the_classes_of_the_data": among,
            "device": f"{ranks.size} × {device_name(ranks.device)}",
            "precision": how.precision,
            "seconds": seconds,
            "images_per_second": len(scored) / seconds,
            "torch": torch.__version__,
            "vitrail": vitrail.__version__,
        },
    )
    return report, scored


@dataclass(frozen=True)
class _Reassessed:
    labels: RealLabels
    numbers: tuple[int | None, ...]
    """In ImageNet, of each of the model's classes."""


def _reassessed(path: Path, source: Source, model: ImageModel) -> _Reassessed:
    """ReaL's labels. What is wrong with them, or with the images' names, is said before anything is computed."""
    numbers = imagenet.numbers_of(model.labels, model.num_classes)
    if numbers is None:
        raise ConfigError("--real is for models with ImageNet's 1000 classes, and this model has others")
    labels = read_real(path)
    score(labels, [source.name(0)], [None])
    return _Reassessed(labels, numbers)


def _real(real: _Reassessed, answers: Answers, source: Source) -> Real:
    names = (source.name(index) for index in answers.indices.tolist())
    guesses = (real.numbers[guess] for guess in answers.predictions.tolist())
    hits, counted, empty = score(real.labels, names, guesses)
    return Real(share(hits, counted), counted, empty)
