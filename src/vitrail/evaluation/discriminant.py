"""A linear classifier in closed form: Gaussian classes with one covariance (linear discriminant analysis), shrunk.

Every class is a Gaussian around its mean, and all share the covariance W within classes. The log-probability of a class
is then linear in the features: weight_c = (W + shrinkage·I)⁻¹ mean_c, and the bias holds the class's share of the
images, or less of it where rare classes are to count more (`balance`). A fit needs only sums over images, so leaving
out a fold is a subtraction. That makes cross-validation cheap: no step is iterated, and even the choice of the
shrinkage can be repeated without each fold.

Shapes: N images, D features, R principal axes of them, K classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import DataError
from vitrail.evaluation.linear_classifier import BLOCK, LinearClassifier, Standardisation
from vitrail.evaluation.linear_probe import FOLDS, assign_folds

SHRINKAGES = tuple(10 ** (1.5 - step / 2) for step in range(8))
"""Candidates from 32 down to 0.01, in units of a standardised feature's variance."""
TEMPERATURES = tuple(0.15 * 1.4**step for step in range(8))
"""Factors of the scores, from 0.15 to 1.6: features are no Gaussians, and the raw probabilities are too sure."""
MOST_AXES = 1024
"""Largest R: a fit takes R³ operations."""
MOST_SCORES = 500_000
"""At most so many scores, images times classes, choose the shrinkage: more would hardly choose better."""
ABSENT = 0.5
"""Number of images that a class counts for if none of its images is in a fit."""


class Shrinkage(NamedTuple):
    """What cross-validation chooses."""

    amount: float
    """Added to the variance within classes along every axis."""
    temperature: float
    """Factor of the scores."""


@dataclass(frozen=True)
class CrossFit:
    """The prediction for every image by a classifier that was fitted, and whose shrinkage was chosen, without it.

    Only the axes, which know no labels, are those of all images.
    """

    shrinkage: Shrinkage
    """The choice of all images together, for the final classifier."""
    known: Tensor
    """(N,) bool: False for the only image of a class, which no classifier was fitted without."""
    guesses: Tensor
    """(N,) int64: the class with the highest probability."""
    confidence: Tensor
    """(N,) the probability of the guess."""
    label_probability: Tensor
    """(N,) the probability of the image's label."""
    label_rank: Tensor
    """(N,) int64: the place of the label among all classes, 1 for the guess."""


def fit_discriminant(
    values: Tensor, labels: Tensor, num_classes: int, shrinkage: Shrinkage, balance: float = 0.0
) -> LinearClassifier:
    """Fit a classifier to (N, D) features and (N,) labels, in float64 on the CPU.

    `balance` is from 0, where common classes are expected more often, to 1, where every class is as likely.
    """
    axes = _Axes.from_features(values)
    statistics = _Statistics.count(axes.rotate(values), labels.cpu(), num_classes)
    weight, bias = _Discriminant(statistics, balance).solve(shrinkage.amount)
    return axes.fold_into(shrinkage.temperature * weight, shrinkage.temperature * bias)


def cross_fit(values: Tensor, labels: Tensor, num_classes: int, seed: int = 0, balance: float = 0.0) -> CrossFit:
    """Predict every image without it: five folds, and for each one the shrinkage that the other four choose.

    Args:
        values: (N, D) features.
        labels: (N,) int64.
        num_classes: K.
        seed: decides which images form a fold.
        balance: as for `fit_discriminant`; it also lets images of rare classes choose the shrinkage with more weight.

    Raises:
        DataError: No class has two images, so nothing can be left out.
    """
    labels = labels.cpu()
    folds = assign_folds(labels, seed)
    if not bool((folds >= 0).any()):
        raise DataError("there is nothing to choose by: a class needs two images at least")
    points = _Axes.from_features(values).rotate(values)
    problem = _FoldedProblem(points, labels, folds, num_classes, balance)
    alone = [problem.score_candidates([fold], fold) for fold in range(FOLDS)]
    rows = {
        name: torch.zeros(len(labels), dtype=kind)
        for name, kind in (
            ("guesses", torch.int64),
            ("confidence", torch.float64),
            ("label_probability", torch.float64),
            ("label_rank", torch.int64),
        )
    }
    pairs = {
        (one, other): problem.score_candidates([one, other], other)
        for one, other in itertools.permutations(range(FOLDS), 2)
    }
    for fold in range(FOLDS):
        chosen = _choose([losses for (left_out, _), losses in pairs.items() if left_out == fold])
        for name, column in problem.predict_fold(fold, chosen).items():
            rows[name][folds == fold] = column
    return CrossFit(_choose(alone), folds >= 0, **rows)


@dataclass(frozen=True)
class _Axes:
    """The principal axes of standardised features: at most `MOST_AXES`, and no more than there are images."""

    standardise: Standardisation
    rotation: Tensor
    """(R, D), orthonormal rows."""

    @classmethod
    def from_features(cls, values: Tensor) -> Self:
        values = values.cpu().double()
        standardise = Standardisation.from_features(values)
        rows = standardise(values)
        count = min(*values.shape, MOST_AXES)
        if len(rows) < rows.shape[1]:
            axes = torch.linalg.svd(rows, full_matrices=False).Vh
        else:
            axes = torch.linalg.eigh(rows.T @ rows).eigenvectors.T.flip(0)
        return cls(standardise, axes[:count])

    def rotate(self, values: Tensor) -> Tensor:
        """(N, D) → (N, R), float64."""
        return self.standardise(values.cpu().double()) @ self.rotation.T

    def fold_into(self, weight: Tensor, bias: Tensor) -> LinearClassifier:
        """Turn a classifier of rotated features, (K, R) and (K,), into one of the features themselves."""
        return self.standardise.fold_into(weight @ self.rotation, bias)


@dataclass(frozen=True)
class _Statistics:
    """Sums over some images, which are all that a fit needs."""

    counts: Tensor
    """(K,) images of each class."""
    sums: Tensor
    """(K, R) sums of their features."""
    products: Tensor
    """(R, R) the sum of the outer products of all features with themselves."""

    @classmethod
    def count(cls, points: Tensor, labels: Tensor, num_classes: int) -> Self:
        sums = points.new_zeros(num_classes, points.shape[1]).index_add_(0, labels, points)
        return cls(torch.bincount(labels, minlength=num_classes).double(), sums, points.T @ points)

    @classmethod
    def add(cls, parts: Iterable[Self]) -> Self:
        every = list(parts)
        return cls(
            sum((part.counts for part in every), torch.zeros_like(every[0].counts)),
            sum((part.sums for part in every), torch.zeros_like(every[0].sums)),
            sum((part.products for part in every), torch.zeros_like(every[0].products)),
        )


class _Discriminant:
    """The classifiers of all shrinkages for some images: the covariance is diagonalised once."""

    def __init__(self, statistics: _Statistics, balance: float = 0.0) -> None:
        counts, count = statistics.counts, statistics.counts.sum().clamp(min=1)  # two folds may be all there is
        means = statistics.sums / counts.clamp(min=1)[:, None]
        within = (statistics.products - (means.T * counts) @ means) / count
        self.variances, self.vectors = torch.linalg.eigh(within)
        overall = statistics.sums.sum(dim=0) / count
        self.means = torch.where(counts[:, None] > 0, means, overall) @ self.vectors
        self.log_shares = (1 - balance) * (counts.clamp(min=ABSENT) / count).log()

    def solve_rotated(self, amount: float) -> tuple[Tensor, Tensor]:
        """Return (K, R) weights for features in the coordinates of `vectors`, and (K,) biases."""
        weight = self.means / (self.variances.clamp(min=0) + amount)
        return weight, self.log_shares - (weight * self.means).sum(dim=1) / 2

    def solve(self, amount: float) -> tuple[Tensor, Tensor]:
        """Return (K, R) weights and (K,) biases."""
        weight, bias = self.solve_rotated(amount)
        return weight @ self.vectors.T, bias


Losses = dict[Shrinkage, float]
"""The summed cross-entropy of each candidate."""


class _FoldedProblem:
    """Features in folds, and classifiers that were fitted without some of the folds."""

    def __init__(self, points: Tensor, labels: Tensor, folds: Tensor, num_classes: int, balance: float = 0.0) -> None:
        self.points, self.labels, self.folds, self.balance = points, labels, folds, balance
        self.statistics = {
            fold: _Statistics.count(points[folds == fold], labels[folds == fold], num_classes)
            for fold in range(-1, FOLDS)
        }
        self.solved: dict[frozenset[int], _Discriminant] = {}
        self.stride = math.ceil(len(labels) * num_classes / MOST_SCORES)
        """Every so many images choose the shrinkage: spread evenly, because data is often sorted by class."""
        counts = torch.bincount(labels, minlength=num_classes).clamp(min=1).double()
        self.weights = None if balance == 0 else (counts.mean() / counts) ** balance
        """(K,) of the losses of images by their classes; None if all count the same."""

    def fit_without(self, left_out: Sequence[int]) -> _Discriminant:
        key = frozenset(left_out)
        if key not in self.solved:
            kept = [part for fold, part in self.statistics.items() if fold not in key]
            self.solved[key] = _Discriminant(_Statistics.add(kept), self.balance)
        return self.solved[key]

    def score_candidates(self, left_out: Sequence[int], fold: int) -> Losses:
        """Return the losses of every candidate, fitted without `left_out`, on the images of one of these folds."""
        fitted = self.fit_without(left_out)
        points, labels = self.points[self.folds == fold], self.labels[self.folds == fold]
        points, labels = points[:: self.stride] @ fitted.vectors, labels[:: self.stride]
        losses: Losses = {}
        for amount in SHRINKAGES:
            weight, bias = fitted.solve_rotated(amount)
            scores = torch.addmm(bias, points, weight.T)
            for temperature in TEMPERATURES:
                loss = F.cross_entropy(temperature * scores, labels, weight=self.weights, reduction="sum")
                losses[Shrinkage(amount, temperature)] = loss.item()
        return losses

    def predict_fold(self, fold: int, shrinkage: Shrinkage) -> dict[str, Tensor]:
        """Return the columns of `CrossFit` for the images of a fold, from the classifier fitted without it."""
        weight, bias = self.fit_without([fold]).solve(shrinkage.amount)
        classifier = LinearClassifier(shrinkage.temperature * weight, shrinkage.temperature * bias)
        columns: dict[str, list[Tensor]] = {}
        mask = self.folds == fold
        for points, labels in zip(self.points[mask].split(BLOCK), self.labels[mask].split(BLOCK), strict=True):
            scores = classifier.scores(points)
            probabilities = scores.softmax(dim=1)
            top, own = probabilities.max(dim=1), probabilities.gather(1, labels[:, None])
            rank = torch.where(top.indices == labels, 1, (probabilities > own).sum(dim=1).clamp(min=1) + 1)
            parts = {"guesses": top.indices, "confidence": top.values, "label_probability": own[:, 0]}
            for name, part in {**parts, "label_rank": rank}.items():
                columns.setdefault(name, []).append(part)
        return {name: torch.cat(parts) for name, parts in columns.items()}


def _choose(scored: Sequence[Losses]) -> Shrinkage:
    """Return the candidate with the lowest loss over all of the scored images; of equal ones the strongest."""
    return min(scored[0], key=lambda candidate: sum(losses[candidate] for losses in scored))
