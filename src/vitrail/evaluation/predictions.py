"""Predict every image of a data set, and keep one row per image: all numbers of a report are computed from these rows.

The rows do not depend on the batches or the ranks, and they are small even for millions of images.

Shapes: N images, K classes of the model, B images of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from torch import Tensor

from vitrail.data.sources.source import Source, Subset
from vitrail.errors import WeightsError
from vitrail.evaluation.labels import LabelMap
from vitrail.evaluation.objectnet import FramelessImages
from vitrail.inference.batches import InferenceOptions, open_model, run_batches, single_rank
from vitrail.inference.engine import Engine, Model
from vitrail.system.events import Progress
from vitrail.system.ranks import Ranks


@dataclass(frozen=True)
class PredictionTable:
    """One row for each image that could be read, in the order of the source.

    A class of the model is right for an image if the label map accepts it for the image's label.
    """

    indices: np.ndarray
    """(N,) int64: the image's number in the source."""
    labels: np.ndarray
    """(N,) int64: the label, a class of the data."""
    guesses: np.ndarray
    """(N,) int64: the most probable class of the model."""
    confidences: np.ndarray
    """(N,) float64: the probability of the guess."""
    losses: np.ndarray
    """(N,) float64: −log of the summed probability of the right classes."""
    right_ranks: np.ndarray
    """(N,) int64: the rank of the best right class among all classes, from 1."""

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def hits(self) -> np.ndarray:
        """(N,) bool: whether the guess is right."""
        is_right: np.ndarray = self.right_ranks == 1
        return is_right

    @classmethod
    def concatenate(cls, tables: list[Self]) -> Self:
        """Return one table of all rows, in the order of the source."""
        names = [field.name for field in fields(cls)]
        columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in names}
        order = np.argsort(columns["indices"], kind="stable")
        return cls(**{name: column[order] for name, column in columns.items()})


def select_known_images(source: Source, labels: LabelMap) -> Source:
    """Return the images whose class has a counterpart among the model's classes; ObjectNet's without their frames."""
    if not labels.unmatched and not labels.is_objectnet:
        return source
    known = np.flatnonzero(~np.isin(source.labels(0, len(source)), labels.unmatched))
    return FramelessImages(source, known) if labels.is_objectnet else Subset(source, known)


def predict_all(
    model: Model | Engine,
    source: Source,
    labels: LabelMap,
    options: InferenceOptions,
    *,
    ranks: Ranks | None = None,
    among: bool = False,
    progress: Progress | None = None,
) -> PredictionTable:
    """Run the model over all images of classes that it knows. Every rank gets the whole table.

    The arguments are those of `score_model`; `source` is what `select_known_images` returns.
    """
    ranks = ranks or single_rank(options)
    engine = open_model(model, options, ranks)
    accepted = _accepted_matrix(labels, engine.num_classes)
    allowed = accepted.any(dim=0) if among else torch.ones(engine.num_classes, dtype=torch.bool)
    # An empty first row set: a rank may get no image at all.
    no_logits, no_labels = torch.empty(0, engine.num_classes, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
    rows, indices = [_score_batch(no_logits, no_labels, accepted)], [np.empty(0, np.int64)]
    for batch, output in run_batches(engine, source, options, ranks, progress):
        assert output.logits is not None
        logits = output.logits.cpu()[batch.mask].double()
        if not torch.isfinite(logits).all():
            raise WeightsError(
                "the model's outputs are not finite: its weights are damaged, or the precision is too low"
            )
        rows.append(_score_batch(logits.masked_fill(~allowed, -torch.inf), batch.labels[batch.mask], accepted))
        indices.append(batch.indices[batch.mask].numpy())
    table = PredictionTable(np.concatenate(indices), *(np.concatenate(column) for column in zip(*rows, strict=True)))
    return PredictionTable.concatenate(ranks.gather(table))


def _accepted_matrix(labels: LabelMap, num_classes: int) -> Tensor:
    """Return (classes of the data, K) bool: whether a class of the model is right for a class of the data."""
    matrix = torch.zeros(len(labels.accepted), num_classes, dtype=torch.bool)
    for row, classes in enumerate(labels.accepted):
        matrix[row, list(classes)] = True
    return matrix


def _score_batch(logits: Tensor, labels: Tensor, accepted: Tensor) -> tuple[np.ndarray, ...]:
    """(B, K) float64 logits and (B,) labels → the columns of `PredictionTable` after `indices`."""
    right = accepted[labels]
    probabilities = logits.log_softmax(dim=1)
    confidences, guesses = probabilities.max(dim=1)
    best, first = torch.where(right, logits, -torch.inf).max(dim=1)
    # Of equal logits the lower class number ranks first, as in argmax.
    is_earlier = torch.arange(logits.shape[1]) < first[:, None]
    ranks_before = (logits > best[:, None]) | ((logits == best[:, None]) & is_earlier & ~right)
    losses = -torch.where(right, probabilities, -torch.inf).logsumexp(dim=1)
    columns = (labels, guesses, confidences.exp(), losses, ranks_before.sum(dim=1) + 1)
    return tuple(column.numpy() for column in columns)
