"""The paper's few-shot accuracy: least squares from frozen features onto {−1, 1}^K, regularised, in closed form.

Shapes: N images, D features, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.features import Features
from vitrail.evaluation.linear_classifier import LinearClassifier, Standardisation

BIAS = 100.0
"""The constant feature. It is so large that its regularisation hardly matters."""
L2 = 2.0**10
SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class LeastSquaresResult:
    """The accuracy for one number of shots and one seed."""

    shots: int
    """Images of each class, at most."""
    seed: int
    accuracy: float
    images: int
    """Images that the classifier was fitted to."""
    short: int
    """Classes with fewer images than `shots`; all of their images were used."""


def fit_least_squares(values: Tensor, labels: Tensor, num_classes: int, l2: float = L2) -> LinearClassifier:
    """Fit a linear classifier to (N, D) features and (N,) labels: solve (XᵀX + l2·I) W = XᵀY in float64.

    X holds the standardised features and a constant feature of 100, which is regularised too. Y is 1 for the label and
    −1 for the other classes. This is what the authors' released code does.
    """
    if not 0 < l2 < math.inf:  # written this way, NaN is refused too
        raise ConfigError(f"l2 = {l2:g}: give a number above 0, such as the paper's {L2:g}")
    values = values.double()
    standardise = Standardisation.from_features(values)
    x = torch.cat([standardise(values), values.new_full((len(values), 1), BIAS)], dim=1)
    y = 2 * torch.nn.functional.one_hot(labels, num_classes).to(x) - 1
    rows, columns = x.shape
    # Both systems give the same W. Solve the smaller one: N×N for few images, D×D for many.
    if rows < columns:
        solution = x.T @ torch.linalg.solve(_add_ridge(x @ x.T, l2), y)
    else:
        solution = torch.linalg.solve(_add_ridge(x.T @ x, l2), x.T @ y)
    return standardise.fold_into(solution[:-1].T, BIAS * solution[-1])


def _add_ridge(products: Tensor, l2: float) -> Tensor:
    return products + l2 * torch.eye(len(products)).to(products)


def choose_shots(labels: Tensor, k: int, seed: int) -> Tensor:
    """(N,) labels → the ascending indices of k random images of each class; all images of a class that has fewer.

    The seed decides the order of each class, and the first k are chosen: fewer shots are a subset of more shots.
    """
    if k < 1:
        raise ConfigError(f"shots = {k}: give a number of images of each class, from 1 on")
    return (number_within_class(labels, seed) < k).nonzero().flatten()


def number_within_class(labels: Tensor, seed: int) -> Tensor:
    """(N,) labels → (N,) int64 on the CPU: number the images of each class 0, 1, 2, … in a random order."""
    labels = labels.cpu()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    sorted_by_class = order[labels[order].argsort(stable=True)]
    first = torch.searchsorted(labels[sorted_by_class], labels[sorted_by_class])  # where each image's class begins
    rank = torch.empty_like(order)
    rank[sorted_by_class] = torch.arange(len(labels)) - first
    return rank


def score_few_shot(
    train: Features,
    test: Features,
    num_classes: int,
    shots: Sequence[int] = SHOTS,
    seeds: Sequence[int] = SEEDS,
    l2: float = L2,
) -> list[LeastSquaresResult]:
    """Fit to a few images of `train` and score on all of `test`, for every number of shots and every seed."""
    if not len(train) or not len(test):
        raise DataError("few-shot needs images to learn from and images to test on")
    counts = torch.bincount(train.labels, minlength=num_classes)
    rows = []
    for number in shots:
        for seed in seeds:
            chosen = train[choose_shots(train.labels, number, seed)]
            classifier = fit_least_squares(chosen.values, chosen.labels, num_classes, l2)
            accuracy = classifier.accuracy(test.values, test.labels)
            rows.append(LeastSquaresResult(number, seed, accuracy, len(chosen), int((counts < number).sum())))
    return rows
