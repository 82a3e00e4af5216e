"""Nearest neighbours by cosine similarity, exactly, and the classifier that they make.

Shapes: N queries, M images in the bank, D features, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.features import Features

NEIGHBOURS, TEMPERATURE = 20, 0.07
"""DINO's (arXiv 2104.14294)."""
QUERIES, BANK = 1024, 8192
"""How many are compared at once: the similarities of all with all are never in memory."""
STEPS = 10**9
"""Similarities are whole multiples of a billionth. What is equal is then equal in whatever order it was summed."""


def nearest(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(N, D) and (M, D) → the similarities (N, k) float64 and places (N, k) of the k nearest, the nearest first.

    Similarity is the cosine in float64, rounded to nine digits; of equal ones those with the lower place come first.
    Features that are all zero are similar to nothing, which is 0. Where the bank has fewer than k, all of it.
    """
    if k < 1:
        raise ConfigError(f"k = {k}: give a number of neighbours from 1 on")
    if not len(bank):
        raise DataError("there are no images to search for neighbours in")
    found = [_nearest_of(_unit(block), bank, min(k, len(bank))) for block in queries.split(QUERIES)]
    keys = torch.cat(found) if found else torch.empty(0, min(k, len(bank)), dtype=torch.int64)
    return (keys // len(bank) - STEPS).double() / STEPS, len(bank) - 1 - keys % len(bank)


def _nearest_of(queries: Tensor, bank: Tensor, k: int) -> Tensor:
    """(N, D) of unit length → (N, k) keys: a number for similarity and place together, so that no two are equal."""
    best = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    for start in range(0, len(bank), BANK):
        block = _unit(bank[start : start + BANK])
        similarities = (queries @ block.T * STEPS).round().long().clamp(-STEPS, STEPS) + STEPS
        places = torch.arange(start, start + len(block), device=queries.device)
        keys = torch.cat([best, similarities * len(bank) + (len(bank) - 1 - places)], dim=1)
        best = keys.topk(min(k, keys.shape[1]), dim=1).values
    return best


def _unit(values: Tensor) -> Tensor:
    """(N, D) → rows of length 1 in float64, or 0."""
    return torch.nn.functional.normalize(values.double(), dim=1, eps=1e-30)


def knn_predicted(
    train: Features, values: Tensor, num_classes: int, k: int = NEIGHBOURS, temperature: float = TEMPERATURE
) -> Tensor:
    """(N, D) → (N,): the class for which the k nearest of `train` vote, each with exp(similarity / temperature).

    Of classes with equal votes the first. With k = 1 it is the class of the nearest, whatever the temperature.
    """
    if temperature <= 0:
        raise ConfigError(f"temperature = {temperature:g}: give a number above 0, such as {TEMPERATURE}")
    predicted = []
    for block in values.split(QUERIES):
        similarities, places = nearest(block, train.values, k)
        votes = similarities.new_zeros(len(block), num_classes)
        # Beside the largest: a low temperature would leave the range of numbers.
        weights = ((similarities - similarities[:, :1]) / temperature).exp()
        predicted.append(votes.scatter_add_(1, train.labels[places], weights).argmax(dim=1))
    return torch.cat(predicted)


def knn_accuracy(
    train: Features, test: Features, num_classes: int, k: int = NEIGHBOURS, temperature: float = TEMPERATURE
) -> float:
    """The share of `test` that its neighbours in `train` are right about."""
    if not len(test):
        raise DataError("there are no images to test on")
    predicted = knn_predicted(train, test.values, num_classes, k, temperature)
    return (predicted == test.labels).double().mean().item()
