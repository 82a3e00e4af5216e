"""Turn predictions into a report: how often the model is right, how sure it is, and where it goes wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.sources.source import Source
from vitrail.evaluation.labels import LabelMap
from vitrail.evaluation.predictions import PredictionTable
from vitrail.inference.class_names import annotate_wnid
from vitrail.system.intervals import (
    LEVEL,
    NO_ESTIMATE,
    Estimate,
    estimate_mean,
    estimate_mean_share,
    estimate_share,
    estimate_sum_of_gaps,
)
from vitrail.system.results import Result, Rows

TOP = 5
BINS = 15
"""Bins of the calibration error: the usual number in the literature."""
F1_DRAWS = 500
"""Resamples of the images from which the interval of the macro F1 score is read."""
MISTAKES = 100
"""Mistakes in a report: the most confident ones."""
MOST_SHOWN = 10
"""Largest number of classes and of confusions in a table; `EvaluationReport.classes` and `confusions` have all."""


@dataclass(frozen=True)
class ClassScore:
    """The accuracy on one class of the data."""

    name: str
    images: int
    hits: int
    accuracy: Estimate


@dataclass(frozen=True)
class CalibrationBin:
    """The images whose guess has a probability in (low, high]."""

    low: float
    high: float
    images: int
    confidence: float
    """Mean probability of their guesses."""
    accuracy: float


@dataclass(frozen=True)
class Mistake:
    """An image with a wrong guess."""

    index: int
    image: str
    label: str
    guess: str
    confidence: float


@dataclass(frozen=True)
class RealAccuracy:
    """The accuracy against ReaL labels: a guess is right if it is one of the image's labels."""

    accuracy: Estimate
    images: int
    without_labels: int
    """Images without any ReaL label, which are not counted."""


@dataclass(frozen=True, repr=False)
class EvaluationReport(Result):
    """Everything measured of one model on one data set."""

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
    top1: Estimate
    top5: Estimate | None
    """None if there are five classes or fewer."""
    likelihood: Estimate
    """The mean negative log-likelihood."""
    calibration: Estimate
    """The expected calibration error."""
    classes: tuple[ClassScore, ...]
    confusion: np.ndarray = field(compare=False)
    """(classes, classes + 1) counts: a row for each label, a column for each guess. The last column counts guesses of
    classes that the data does not have."""
    confusions: tuple[tuple[str, str, int], ...]
    """(label, wrong guess, count), the most frequent first."""
    bins: tuple[CalibrationBin, ...]
    mistakes: tuple[Mistake, ...]
    real: RealAccuracy | None = None
    about: dict[str, Any] = field(default_factory=dict)
    """Device, precision, the library that computed, time."""
    was_trained_on: bool = False
    """Whether the model is known to have learned from these images."""
    chose_weights: bool = False
    """Whether the model's weights are known to be those of a training that were best on these images."""
    files: tuple[Path, ...] = ()
    """report.json and the figures, if they were written."""
    balanced: Estimate = NO_ESTIMATE
    """The balanced accuracy: the mean of the classes' recalls, so that rare classes count as much as frequent ones."""
    macro_f1: Estimate = NO_ESTIMATE
    """The mean of the classes' F1 scores. Classes that are neither labels nor guesses of any image are left out."""

    @property
    def worst_class(self) -> ClassScore | None:
        """The class with the lowest recall; of several the one with the most images. None if there are no images."""
        scored = [score for score in self.classes if score.images]
        return min(scored, key=lambda score: (score.accuracy.value, -score.images), default=None)

    @property
    def accuracy(self) -> Estimate:
        """The top-1 accuracy."""
        return self.top1

    @property
    def foreign_guesses(self) -> int:
        """The number of guesses of classes that the data does not have."""
        return int(self.confusion[:, -1].sum())

    def measures(self) -> list[tuple[str, Estimate, bool]]:
        """Return the name and the value of each measure, and whether it is a share, which is shown in percent."""
        measures = [("top-1 accuracy", self.top1, True)]
        if self.top5 is not None:
            measures.append(("top-5 accuracy", self.top5, True))
        if self.real is not None:
            measures.append((f"ReaL accuracy, {self.real.images:,} images", self.real.accuracy, True))
        if (worst := self.worst_class) is not None:
            measures += [("balanced accuracy", self.balanced, True), ("macro F1", self.macro_f1, True)]
            measures.append((f"recall of the worst class, {annotate_wnid(worst.name)}", worst.accuracy, True))
        return [
            *measures,
            ("negative log-likelihood", self.likelihood, False),
            ("calibration error", self.calibration, False),
        ]

    def summary(self) -> Rows:
        """Return what was evaluated, the measures with their intervals, and what a reader must know."""
        rows = [("model", self.model), ("data", f"{self.data}, {self.part}" if self.part else self.data)]
        rows.append(("images", f"{self.images:,}"))
        for name, measured, is_share in self.measures():
            value, low, high = format_estimate(measured, is_share)
            rows.append((name, f"{value} (95% interval {low} to {high})"))
        rows.append(("classes", self.labels))
        if self.about:
            rows.append(("computed", describe_engine(self.about)))
        if self.left_out or self.broken:
            rows.append(("left out", f"{self.left_out:,} of unknown classes, {self.broken:,} that cannot be read"))
        if self.was_trained_on:
            rows.append(("warning", "the model has learned from these very images"))
        if self.chose_weights:
            rows.append(("warning", "these images chose the weights: on new ones it will do a little worse"))
        return [*rows, *(("written", str(path)) for path in self.files[:1])]

    def tables(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """Return the accuracy of the classes and the most frequent confusions, `MOST_SHOWN` of each."""
        scored = [score for score in self.classes if score.images]
        worst = sorted(scored, key=lambda score: (score.accuracy.value, -score.images))[:MOST_SHOWN]
        classes = [
            (annotate_wnid(score.name), f"{score.images:,}", *format_estimate(score.accuracy, True)) for score in worst
        ]
        title = "Classes, the worst first" if len(scored) > MOST_SHOWN else "Classes"
        tables: dict[str, Sequence[Sequence[str]]] = {
            title: [("class", "images", "accuracy", "95% from", "to"), *classes]
        }
        if self.confusions:
            pairs = self.confusions[:MOST_SHOWN]
            confusions = [(annotate_wnid(label), annotate_wnid(guess), f"{count:,}") for label, guess, count in pairs]
            tables["What is taken for what"] = [("label", "guess", "images"), *confusions]
        return tables

    def figures(self) -> Sequence[Path]:
        """Return the figures, if they were written."""
        return [path for path in self.files if path.suffix == ".png"]

    def to_dict(self) -> dict[str, Any]:
        """Return what report.json holds. The confusion matrix is a list of its entries [label, guess, count]."""
        rows, columns = np.nonzero(self.confusion)
        entries = zip(rows.tolist(), columns.tolist(), self.confusion[rows, columns].tolist(), strict=True)
        plain = ("model", "data", "part", "images", "left_out", "broken", "labels")
        return {
            **{name: getattr(self, name) for name in plain},
            "top1": self.top1.to_dict(),
            "top5": None if self.top5 is None else self.top5.to_dict(),
            "balanced_accuracy": self.balanced.to_dict(),
            "macro_f1": self.macro_f1.to_dict(),
            "worst_class": None if (worst := self.worst_class) is None else _plain_class(worst),
            "negative_log_likelihood": self.likelihood.to_dict(),
            "calibration_error": self.calibration.to_dict(),
            "real": None if self.real is None else {**asdict(self.real), "accuracy": self.real.accuracy.to_dict()},
            "classes": [_plain_class(score) for score in self.classes],
            "confusion": [list(entry) for entry in entries],
            "confusions": [list(each) for each in self.confusions],
            "calibration_bins": [asdict(each) for each in self.bins],
            "most_confident_mistakes": [asdict(each) for each in self.mistakes],
            "about": self.about,
        }


def format_estimate(measured: Estimate, is_share: bool) -> list[str]:
    """Return value, low and high as text: shares in percent, others with four digits, and "–" if unknown."""
    form = ".2%" if is_share else ".4f"
    return [f"{value:{form}}" if math.isfinite(value) else "–" for value in measured]


def describe_engine(about: Mapping[str, Any]) -> str:
    """Return what computed a report, in words: "in int8 by PyTorch on 1 × CPU"."""
    precision = "as exported" if about["precision"] == "exported" else f"in {about['precision']}"
    return f"{precision} by {about['runtime']} on {about['device']}"


def make_report(
    predictions: PredictionTable,
    source: Source,
    labels: LabelMap,
    model_labels: Sequence[str] | None,
    num_guessable: int,
    **other_fields: Any,
) -> EvaluationReport:
    """Compute everything in a report that follows from the predictions for the scored images, `source`.

    `num_guessable` is the number of classes that a guess is chosen from; `other_fields` are those of
    `EvaluationReport` that do not follow from the predictions.
    """
    count = max(source.num_classes, len(labels.accepted))
    names = [*(source.classes or [str(number) for number in range(count)])]
    bins, calibration = measure_calibration(predictions.confidences, predictions.hits)
    translator = _GuessTranslator(labels, names, model_labels)
    classes = _score_classes(predictions, names)
    confusion = _count_confusion(predictions, translator, count)
    top5_hits = int((predictions.right_ranks <= TOP).sum())
    return EvaluationReport(
        images=len(predictions),
        broken=len(source) - len(predictions),
        labels=labels.explanation,
        top1=estimate_share(int(predictions.hits.sum()), len(predictions)),
        top5=estimate_share(top5_hits, len(predictions)) if num_guessable > TOP else None,
        likelihood=estimate_mean(predictions.losses),
        calibration=calibration,
        classes=classes,
        balanced=estimate_mean_share(np.array([s.hits for s in classes]), np.array([s.images for s in classes])),
        macro_f1=estimate_macro_f1(confusion),
        confusion=confusion,
        confusions=_list_confusions(predictions, translator),
        bins=bins,
        mistakes=_list_mistakes(predictions, source, translator),
        **other_fields,
    )


def measure_calibration(confidences: np.ndarray, hits: np.ndarray) -> tuple[tuple[CalibrationBin, ...], Estimate]:
    """(N,) confidences and (N,) hits → the non-empty bins of equal width, and the expected calibration error."""
    place = np.clip(np.ceil(confidences * BINS).astype(int) - 1, 0, BINS - 1)
    images = np.bincount(place, minlength=BINS)
    sure = np.bincount(place, confidences, BINS)
    right = np.bincount(place, hits.astype(float), BINS)
    filled = np.flatnonzero(images)
    n = images[filled]
    means = zip(filled, n.tolist(), (sure[filled] / n).tolist(), (right[filled] / n).tolist(), strict=True)
    bins = tuple(CalibrationBin(b / BINS, (b + 1) / BINS, *measured) for b, *measured in means)
    # The deviation of a share of hits, with two hits and two misses added: a bin without a miss is not certain.
    likely = (right[filled] + 2) / (n + 4)
    deviations = np.sqrt(likely * (1 - likely) / n)
    gaps = (sure[filled] - right[filled]) / n
    return bins, estimate_sum_of_gaps(n / max(images.sum(), 1), gaps, deviations)


def compute_macro_f1(confusion: np.ndarray) -> float:
    """(K, K or more) counts, a row for each label → the mean F1 score of the classes that are a label or a guess."""
    count = len(confusion)
    totals = confusion.sum(axis=1) + confusion[:, :count].sum(axis=0)
    present = totals > 0
    return float((2 * np.diagonal(confusion)[present] / totals[present]).mean()) if present.any() else math.nan


def estimate_macro_f1(confusion: np.ndarray) -> Estimate:
    """Return the macro F1 score of (K, K or more) counts with its bootstrap interval: images are drawn as cells."""
    images, (rows, columns) = int(confusion.sum()), np.nonzero(confusion)
    if not images:
        return NO_ESTIMATE
    rng, shares = np.random.default_rng(0), confusion[rows, columns] / images
    drawn = []
    for _ in range(F1_DRAWS):
        sample = np.zeros_like(confusion)
        sample[rows, columns] = rng.multinomial(images, shares)
        drawn.append(compute_macro_f1(sample))
    value = compute_macro_f1(confusion)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, min(float(low), value), max(float(high), value))


def _plain_class(score: ClassScore) -> dict[str, Any]:
    """Return a class for JSON."""
    return {**asdict(score), "accuracy": score.accuracy.to_dict()}


@dataclass(frozen=True)
class _GuessTranslator:
    """Translates a guess, a class of the model, into classes of the data."""

    labels: LabelMap
    names: Sequence[str]
    """Of the data's classes."""
    model_labels: Sequence[str] | None

    def find_class(self, label: int, guess: int) -> int:
        """Return the data's class that a guess stands for: the image's own label if possible; −1 if there is none."""
        if guess in self.labels.accepted[label]:
            return label
        return self.labels.standing_for.get(guess, -1)

    def find_name(self, label: int, guess: int) -> str:
        """Return the name of a guess among the data's classes, else among the model's, else its number."""
        number = self.find_class(label, guess)
        return self.names[number] if number >= 0 else self.model_labels[guess] if self.model_labels else str(guess)


def _score_classes(predictions: PredictionTable, names: Sequence[str]) -> tuple[ClassScore, ...]:
    images = np.bincount(predictions.labels, minlength=len(names))
    hits = np.bincount(predictions.labels, predictions.hits, minlength=len(names)).astype(int)
    return tuple(
        ClassScore(name, n, h, estimate_share(h, n))
        for name, n, h in zip(names, images.tolist(), hits.tolist(), strict=True)
    )


def _count_confusion(predictions: PredictionTable, translator: _GuessTranslator, count: int) -> np.ndarray:
    pairs = zip(predictions.labels.tolist(), predictions.guesses.tolist(), strict=True)
    guesses = np.array([translator.find_class(label, guess) for label, guess in pairs], int)
    matrix = np.zeros((count, count + 1), np.int64)
    np.add.at(matrix, (predictions.labels, np.where(guesses < 0, count, guesses)), 1)
    return matrix


def _list_confusions(predictions: PredictionTable, translator: _GuessTranslator) -> tuple[tuple[str, str, int], ...]:
    wrong = np.stack([predictions.labels, predictions.guesses])[:, ~predictions.hits]
    pairs, counts = np.unique(wrong, axis=1, return_counts=True)
    confusions = [
        (translator.names[label], translator.find_name(label, guess), count)
        for label, guess, count in zip(*pairs.tolist(), counts.tolist(), strict=True)
    ]
    return tuple(sorted(confusions, key=lambda each: (-each[2], each[0], each[1])))


def _list_mistakes(predictions: PredictionTable, source: Source, translator: _GuessTranslator) -> tuple[Mistake, ...]:
    wrong = np.flatnonzero(~predictions.hits)
    surest = wrong[np.argsort(-predictions.confidences[wrong], kind="stable")][:MISTAKES]
    mistakes = []
    for row in surest:
        columns = (predictions.labels, predictions.guesses, predictions.indices)
        label, guess, index = (int(column[row]) for column in columns)
        names = (translator.names[label], translator.find_name(label, guess))
        mistakes.append(Mistake(index, source.display_name(index), *names, float(predictions.confidences[row])))
    return tuple(mistakes)
