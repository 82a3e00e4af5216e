"""Similar images: exact nearest neighbours by cosine similarity, and the k-nearest-neighbour classifier.

Shapes: N queries, M images in the bank, D features, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.data.open import list_splits, open_data
from vitrail.data.sources.list_source import ListSource
from vitrail.data.transforms.preprocess import prepare
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.features import Cache, Features, extract_features
from vitrail.inference.batches import InferenceOptions
from vitrail.system.events import Progress
from vitrail.weights.load import load

NEIGHBOURS, TEMPERATURE = 20, 0.07
"""The values of DINO (arXiv 2104.14294)."""
QUERIES, BANK = 1024, 8192
"""Block sizes: the full similarity matrix is never in memory."""
STEPS = 10**9
"""Similarities are rounded to multiples of 1e-9, so that ties do not depend on the order of summation."""


def find_nearest(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(N, D) and (M, D) → similarities (N, k) float64 and row numbers (N, k) in the bank, the nearest first.

    Similarity is the cosine in float64, rounded to nine digits; of equal ones the lower row number comes first.
    Features that are all zero have similarity 0 to everything. If the bank has fewer than k rows, all are returned.
    """
    if k < 1:
        raise ConfigError(f"k = {k}: give a number of neighbours from 1 on")
    if not len(bank):
        raise DataError("there are no images to search for neighbours in")
    blocks = [_find_nearest_keys(_normalise(block), bank, min(k, len(bank))) for block in queries.split(QUERIES)]
    keys = torch.cat(blocks) if blocks else torch.empty(0, min(k, len(bank)), dtype=torch.int64)
    return (keys // len(bank) - STEPS).double() / STEPS, len(bank) - 1 - keys % len(bank)


def _find_nearest_keys(queries: Tensor, bank: Tensor, k: int) -> Tensor:
    """(N, D) of unit length → (N, k) keys that hold similarity and row number together, so that no two are equal."""
    best = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    for start in range(0, len(bank), BANK):
        block = _normalise(bank[start : start + BANK])
        similarities = (queries @ block.T * STEPS).round().long().clamp(-STEPS, STEPS) + STEPS
        places = torch.arange(start, start + len(block), device=queries.device)
        keys = torch.cat([best, similarities * len(bank) + (len(bank) - 1 - places)], dim=1)
        best = keys.topk(min(k, keys.shape[1]), dim=1).values
    return best


def _normalise(values: Tensor) -> Tensor:
    """(N, D) → (N, D) float64 with rows of length 1, or 0."""
    return torch.nn.functional.normalize(values.double(), dim=1, eps=1e-30)


def predict_knn(
    train: Features, values: Tensor, num_classes: int, k: int = NEIGHBOURS, temperature: float = TEMPERATURE
) -> Tensor:
    """(N, D) → (N,) classes: the k nearest images of `train` vote, each with weight exp(similarity / temperature).

    Of classes with equal votes the first wins. With k = 1 it is the class of the nearest image.
    """
    if temperature <= 0:
        raise ConfigError(f"temperature = {temperature:g}: give a number above 0, such as {TEMPERATURE}")
    classes = []
    for block in values.split(QUERIES):
        similarities, places = find_nearest(block, train.values, k)
        votes = similarities.new_zeros(len(block), num_classes)
        # Relative to the largest similarity: otherwise a low temperature overflows.
        weights = ((similarities - similarities[:, :1]) / temperature).exp()
        classes.append(votes.scatter_add_(1, train.labels[places], weights).argmax(dim=1))
    return torch.cat(classes)


def score_knn(
    train: Features, test: Features, num_classes: int, k: int = NEIGHBOURS, temperature: float = TEMPERATURE
) -> float:
    """Return the share of `test` that its neighbours in `train` classify correctly."""
    if not len(test):
        raise DataError("there are no images to test on")
    predicted = predict_knn(train, test.values, num_classes, k, temperature)
    return (predicted == test.labels).double().mean().item()


@dataclass(frozen=True)
class SimilarImage:
    """An image of a data set, and how similar it is to the image that was searched with."""

    name: str
    label: str
    similarity: float
    """Cosine of the features, from −1 to 1."""


def find_similar_images(
    model: str,
    data: str,
    image: str,
    number: int = 10,
    options: InferenceOptions | None = None,
    cache: Cache = "auto",
    progress: Progress | None = None,
) -> list[SimilarImage]:
    """Return the images of a data set that are most similar to one image, the nearest first.

    Args:
        model: MODEL whose features are compared.
        data: DATA to search; only its training part if it has parts.
        image: path of the image.
        number: images to return.
        options: device, precision, batch size, worker processes.
        cache: where features are cached.
        progress: called after each batch with the number of images done and of all images.
    """
    options = options or InferenceOptions()
    network = load(model, dtype=torch.float32)
    try:
        prepare(image, network.preprocessing)
    except DataError as error:
        raise DataError(f"{image}: {error}") from None
    source = open_data(data, "train") if list_splits(data) else open_data(data)
    query = extract_features(network, ListSource([(image, 0)]), options, cache=None)
    bank = extract_features(network, source, options, cache, progress)
    similarities, rows = find_nearest(query.values, bank.values, number)
    return [
        SimilarImage(
            source.display_name(int(bank.indices[row])),
            source.classes[bank.labels[row]] if source.classes else str(int(bank.labels[row])),
            similarity,
        )
        for similarity, row in zip(similarities[0].tolist(), rows[0].tolist(), strict=True)
    ]
