"""The paper's few-shot: regularised least squares from frozen representations onto {−1, 1}^K, in closed form.

Shapes: N images, D features, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.features import Features
from vitrail.evaluation.linear import Linear, Standardisation

BIAS = 100.0
"""The feature that is always the same. So large that its regularisation hardly matters."""
L2 = 2.0**10
SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Row:
    """One few-shot result."""

    shots: int
    """Images of each class, at most."""
    seed: int
    accuracy: float
    images: int
    """Images it was solved with."""
    short: int
    """Classes with fewer images than `shots`, all of which were taken."""


def solve(values: Tensor, labels: Tensor, num_classes: int, l2: float = L2) -> Linear:
    """(N, D) features and (N,) labels → the W of (XᵀX + l2·I) W = XᵀY, in float64.

    X are the features, standardised by their own mean and deviation, beside a constant of 100, which is regularised
    too; Y is 1 for the class and −1 for the others. As in the authors' released code.
    """
    if l2 <= 0:
        raise ConfigError(f"l2 = {l2:g}: give a number above 0, such as the paper's {L2:g}")
    values = values.double()
    standardise = Standardisation.of(values)
    x = torch.cat([standardise(values), values.new_full((len(values), 1), BIAS)], dim=1)
    y = 2 * torch.nn.functional.one_hot(labels, num_classes).to(x) - 1
    rows, columns = x.shape
    # The same W either way, by whichever system is smaller: N×N for few images, D×D for many.
    if rows < columns:
        solution = x.T @ torch.linalg.solve(_regularised(x @ x.T, l2), y)
    else:
        solution = torch.linalg.solve(_regularised(x.T @ x, l2), x.T @ y)
    return standardise.folded(solution[:-1].T, BIAS * solution[-1])


def _regularised(products: Tensor, l2: float) -> Tensor:
    return products + l2 * torch.eye(len(products)).to(products)


def chosen_shots(labels: Tensor, k: int, seed: int) -> Tensor:
    """(N,) labels → the places of k images of each class, all where a class has fewer, in ascending order.

    The first of every class in an order that the seed decides, so that those of few shots are among those of more.
    """
    if k < 1:
        raise ConfigError(f"shots = {k}: give a number of images of each class, from 1 on")
    return (rank_in_class(labels, seed) < k).nonzero().flatten()


def rank_in_class(labels: Tensor, seed: int) -> Tensor:
    """(N,) labels → (N,) int64 on the CPU: 0, 1, 2, … within every class, in an order that the seed decides."""
    labels = labels.cpu()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = order[labels[order].argsort(stable=True)]
    first = torch.searchsorted(labels[by_class], labels[by_class])  # where each one's class begins
    rank = torch.empty_like(order)
    rank[by_class] = torch.arange(len(labels)) - first
    return rank


def few_shot(
    train: Features,
    test: Features,
    num_classes: int,
    shots: Sequence[int] = SHOTS,
    seeds: Sequence[int] = SEEDS,
    l2: float = L2,
) -> list[Row]:
    """Accuracy on all of `test` from a few images of `train`, for every number of shots and every seed."""
    if not len(train) or not len(test):
        raise DataError("few-shot needs images to learn from and images to test on")
    counts = torch.bincount(train.labels, minlength=num_classes)
    rows = []
    for number in shots:
        for seed in seeds:
            chosen = train[chosen_shots(train.labels, number, seed)]
            solved = solve(chosen.values, chosen.labels, num_classes, l2)
            accuracy = solved.accuracy(test.values, test.labels)
            rows.append(Row(number, seed, accuracy, len(chosen), int((counts < number).sum())))
    return rows
