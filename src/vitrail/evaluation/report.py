"""From a model's answers to what a person wants to know: how often it is right, how sure it is, where it goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from vitrail.data.sources.source import Source
from vitrail.evaluation.answers import Answers
from vitrail.evaluation.intervals import Measured, mean, share, sum_of_gaps
from vitrail.evaluation.labels import LabelMap

TOP = 5
BINS = 15
"""Of a calibration error: the number that everyone takes."""
MISTAKES = 100
"""Kept in a report; the most confident ones."""


@dataclass(frozen=True)
class ClassScore:
    """Of one class of the data."""

    name: str
    images: int
    hits: int
    accuracy: Measured


@dataclass(frozen=True)
class Bin:
    """The images whose first guess has a probability in a range."""

    low: float
    high: float
    images: int
    confidence: float
    """Their mean probability."""
    accuracy: float


@dataclass(frozen=True)
class Mistake:
    """An image with a wrong first guess."""

    index: int
    image: str
    label: str
    guess: str
    confidence: float


@dataclass(frozen=True)
class Real:
    """Against the reassessed labels of ImageNet: a hit where the first guess is one of an image's."""

    accuracy: Measured
    images: int
    without_labels: int
    """Images whose set of labels is empty, which are not counted."""


@dataclass(frozen=True)
class Report:
    """Everything about a model on a data set."""

    model: str
    data: str
    part: str | None
    images: int
    left_out: int
    """Images of classes that the model does not know."""
    broken: int
    """Images that could not be read."""
    labels: str
    """How the data's classes were matched with the model's."""
    top1: Measured
    top5: Measured | None
    """None where there are not more classes than that."""
    likelihood: Measured
    """The mean negative log-likelihood."""
    calibration: Measured
    """The expected calibration error."""
    classes: tuple[ClassScore, ...]
    confusion: np.ndarray
    """(classes, classes + 1) counts: the data's classes down, guesses across, the last those of other classes."""
    confusions: tuple[tuple[str, str, int], ...]
    """(class, wrong guess, how often), the most frequent first; a guess may be a class that the data does not have."""
    bins: tuple[Bin, ...]
    mistakes: tuple[Mistake, ...]
    real: Real | None = None
    about: dict[str, Any] = field(default_factory=dict)
    """Device, precision, time."""

    @property
    def strangers(self) -> int:
        """Guesses of classes that the data does not have."""
        return int(self.confusion[:, -1].sum())

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Of the confusion matrix only what is not zero, as [class, guess, number]; the last guess number is
        one that the data does not have."""
        rows, columns = np.nonzero(self.confusion)
        entries = zip(rows.tolist(), columns.tolist(), self.confusion[rows, columns].tolist(), strict=True)
        return {
            "model": self.model,
            "data": self.data,
            "part": self.part,
            "images": self.images,
            "left_out": self.left_out,
            "broken": self.broken,
            "labels": self.labels,
            "top1": self.top1.as_dict(),
            "top5": None if self.top5 is None else self.top5.as_dict(),
            "negative_log_likelihood": self.likelihood.as_dict(),
            "calibration_error": self.calibration.as_dict(),
            "real": None if self.real is None else {**asdict(self.real), "accuracy": self.real.accuracy.as_dict()},
            "classes": [{**asdict(score), "accuracy": score.accuracy.as_dict()} for score in self.classes],
            "confusion": [list(entry) for entry in entries],
            "confusions": [list(each) for each in self.confusions],
            "calibration_bins": [asdict(each) for each in self.bins],
            "most_confident_mistakes": [asdict(each) for each in self.mistakes],
            "about": self.about,
        }


def make_report(
    answers: Answers,
    source: Source,
    labels: LabelMap,
    model_labels: Sequence[str] | None,
    guesses: int,
    **told: Any,
) -> Report:
    """Everything that follows from the answers.

    `source`: what was asked about; `guesses`: classes that a guess is one of; `told`: the other fields of Report.
    """
    count = max(source.num_classes, len(labels.accepted))
    names = [*(source.classes or [str(number) for number in range(count)])]
    bins, calibration = calibrate(answers.confidences, answers.hits)
    return Report(
        images=len(answers),
        broken=len(source) - len(answers),
        labels=labels.how,
        top1=share(int(answers.hits.sum()), len(answers)),
        top5=share(int((answers.places <= TOP).sum()), len(answers)) if guesses > TOP else None,
        likelihood=mean(answers.likelihoods),
        calibration=calibration,
        classes=_classes(answers, names),
        confusion=_confusion(answers, labels, count),
        confusions=_confusions(answers, labels, names, model_labels),
        bins=bins,
        mistakes=_mistakes(answers, source, labels, names, model_labels),
        **told,
    )


def calibrate(confidences: np.ndarray, hits: np.ndarray) -> tuple[tuple[Bin, ...], Measured]:
    """Bins of equal width, those that hold images, and the expected calibration error over them."""
    place = np.clip(np.ceil(confidences * BINS).astype(int) - 1, 0, BINS - 1)
    images = np.bincount(place, minlength=BINS)
    sure = np.bincount(place, confidences, BINS)
    right = np.bincount(place, hits.astype(float), BINS)
    held = np.flatnonzero(images)
    bins = tuple(
        Bin(b / BINS, (b + 1) / BINS, int(images[b]), float(sure[b] / images[b]), float(right[b] / images[b]))
        for b in held
    )
    n = images[held]
    # The deviation of a share of hits, with two hits and two misses added: a bin without a miss is not certain.
    likely = (right[held] + 2) / (n + 4)
    deviations = np.sqrt(likely * (1 - likely) / n)
    gaps = (sure[held] - right[held]) / n
    return bins, sum_of_gaps(n / max(images.sum(), 1), gaps, deviations)


def _classes(answers: Answers, names: Sequence[str]) -> tuple[ClassScore, ...]:
    images = np.bincount(answers.labels, minlength=len(names))
    hits = np.bincount(answers.labels, answers.hits, minlength=len(names)).astype(int)
    return tuple(
        ClassScore(name, n, h, share(h, n)) for name, n, h in zip(names, images.tolist(), hits.tolist(), strict=True)
    )


def _confusion(answers: Answers, labels: LabelMap, count: int) -> np.ndarray:
    guesses = np.array([_guessed(labels, label, guess) for label, guess in zip(*_pairs(answers), strict=True)], int)
    matrix = np.zeros((count, count + 1), np.int64)
    np.add.at(matrix, (answers.labels, np.where(guesses < 0, count, guesses)), 1)
    return matrix


def _confusions(
    answers: Answers, labels: LabelMap, names: Sequence[str], model_labels: Sequence[str] | None
) -> tuple[tuple[str, str, int], ...]:
    wrong = np.stack([answers.labels, answers.predictions])[:, ~answers.hits]
    pairs, counts = np.unique(wrong, axis=1, return_counts=True)
    found = [
        (names[label], _said(labels, label, guess, names, model_labels), count)
        for label, guess, count in zip(*pairs.tolist(), counts.tolist(), strict=True)
    ]
    return tuple(sorted(found, key=lambda each: (-each[2], each[0], each[1])))


def _said(labels: LabelMap, label: int, guess: int, names: Sequence[str], model_labels: Sequence[str] | None) -> str:
    """A guess in the data's words, else in the model's."""
    place = _guessed(labels, label, guess)
    return names[place] if place >= 0 else model_labels[guess] if model_labels else str(guess)


def _mistakes(
    answers: Answers,
    source: Source,
    labels: LabelMap,
    names: Sequence[str],
    model_labels: Sequence[str] | None,
) -> tuple[Mistake, ...]:
    wrong = np.flatnonzero(~answers.hits)
    surest = wrong[np.argsort(-answers.confidences[wrong], kind="stable")][:MISTAKES]
    found = []
    for row in surest:
        label, guess, index = (int(column[row]) for column in (answers.labels, answers.predictions, answers.indices))
        said = _said(labels, label, guess, names, model_labels)
        found.append(Mistake(index, source.called(index), names[label], said, float(answers.confidences[row])))
    return tuple(found)


def _pairs(answers: Answers) -> tuple[list[int], list[int]]:
    return answers.labels.tolist(), answers.predictions.tolist()


def _guessed(labels: LabelMap, label: int, guess: int) -> int:
    """The data's class that a class of the model stands for: the image's own where it does, −1 where none."""
    if guess in labels.accepted[label]:
        return label
    return labels.standing_for.get(guess, -1)
