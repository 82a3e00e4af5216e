"""Similar images: exact nearest neighbours by cosine similarity, and the k-nearest-neighbour classifier.

Shapes: N queries, M images in the bank, D features, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitrail.data.open import Data, add_labels_from, open_training_images
from vitrail.data.sources.source import Source
from vitrail.errors import ConfigError, DataError, InputError
from vitrail.evaluation.features import Cache, Features, extract_features
from vitrail.inference.batches import InferenceOptions, open_model
from vitrail.inference.engine import Model, check_finite
from vitrail.inference.prepare import OneImage, describe_image, fit_image
from vitrail.system.events import OnEvent, open_listener, send_messages, send_progress
from vitrail.system.files import check_out_file, write_out_file
from vitrail.system.results import Result, Rows

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
    """Its class, or what else is true of it, such as its tags."""
    similarity: float
    """Cosine of the features, from −1 to 1."""


@dataclass(frozen=True, repr=False)
class SimilarImages(Result):
    """The images of a data set that are most similar to one image. It can be used as a sequence of them."""

    image: str
    """The image that was searched with."""
    neighbours: tuple[SimilarImage, ...]
    """The nearest first."""

    def __len__(self) -> int:
        return len(self.neighbours)

    def __iter__(self) -> Iterator[SimilarImage]:
        return iter(self.neighbours)

    def __getitem__(self, index: int) -> SimilarImage:
        return self.neighbours[index]

    def summary(self) -> Rows:
        """Return the most similar images with their similarities."""
        names = [(each.name, f"{each.label}, similarity {each.similarity:.4f}") for each in self.neighbours]
        return [("image", self.image), *names]


def find_similar(
    model: Model,
    data: Data,
    image: OneImage,
    number: int = 10,
    *,
    labels_from: str | None = None,
    batch_size: int = 64,
    workers: int = 0,
    device: str = "auto",
    precision: str = "fp32",
    cache: Cache = "auto",
    out: str | Path | None = None,
    on_event: OnEvent | None = None,
) -> SimilarImages:
    """Find the images of a data set that are most similar to one image.

    Events: `message` (text) while a faster precision is prepared, and the progress of the task "features".

    Args:
        model: a loaded model, anything that `vitrail.load` takes, or an exported file that gives representations.
        data: anything that `open_data` takes; only its training part is searched if it has parts.
        image: a path, the bytes of a file, a Pillow image, an array or a tensor.
        number: images to return, at least 1.
        labels_from: where the class stands in the names of a folder's images: "NAME_*" for cat_1.jpg, or a regular
            expression with one group.
        batch_size: images at a time.
        workers: processes that read images; 0 reads them in this process.
        device: cpu, cuda, mps, …; auto takes a GPU if the machine has one.
        precision: fp32, or faster and less exact: bf16, fp16 and fp8 (GPU), int8 (CPU); auto takes the fastest here.
        cache: where features are cached.
        out: a file for the result as JSON.
        on_event: called with what happens; by default a terminal or notebook shows a bar.

    Raises:
        ConfigError: an argument is wrong, or the model gives no representations.
        DataError: the image or the data cannot be read.
    """
    options = InferenceOptions(batch_size, workers, device, precision)
    place = None if out is None else Path(out)
    check_out_file(place)
    with open_listener(on_event) as listener:
        engine = open_model(model, options, on_message=send_messages(listener))
        name = describe_image(image)
        try:
            pixels = fit_image(image, engine.preprocessing)
        except (DataError, InputError) as error:
            raise type(error)(f"{name}: {error}") from None
        source = open_training_images(add_labels_from(data, labels_from))
        bank = extract_features(engine, source, options, cache, send_progress(listener, "features"))
    query = engine.embed(pixels[None])
    check_finite(query, name)
    similarities, rows = find_nearest(torch.from_numpy(query), bank.values, number)
    neighbours = tuple(
        SimilarImage(
            source.display_name(int(bank.indices[row])),
            _describe_target(source, int(bank.indices[row])),
            similarity,
        )
        for similarity, row in zip(similarities[0].tolist(), rows[0].tolist(), strict=True)
    )
    result = SimilarImages(name, neighbours)
    if place is not None:
        write_out_file(place, result.to_dict())
    return result


def _describe_target(source: Source, index: int) -> str:
    """Return what is true of an image in words: its class, or its number if the classes have no names; its tags, …"""
    if source.task.kind == "labels" and not source.classes:
        return str(int(source.labels(index, index + 1)[0]))
    return source.task.describe_target({name: each[0] for name, each in source.targets(index, index + 1).items()})
