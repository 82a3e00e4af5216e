"""What a model says about every image of a data set: the raw material of all scores.

One row for each image rather than sums: everything that a report holds follows from the rows, they are the same
whatever the batches and the ranks, and even for millions of images they are small.

Shapes: N images, K classes of the model, B images of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from torch import Tensor

from vitrail.data.sources.source import Source, Subset
from vitrail.errors import ConfigError, WeightsError
from vitrail.evaluation.labels import LabelMap
from vitrail.inference.batches import How, Progress, alone, passes
from vitrail.model.base import ImageModel
from vitrail.system.ranks import Ranks


@dataclass(frozen=True)
class Answers:
    """A row for each image that could be read, in the order of the source."""

    indices: np.ndarray
    """(N,) int64: numbers in the source."""
    labels: np.ndarray
    """(N,) int64: classes of the data."""
    predictions: np.ndarray
    """(N,) int64: first guesses, classes of the model."""
    confidences: np.ndarray
    """(N,) float64: the probability of the first guess."""
    likelihoods: np.ndarray
    """(N,) float64: −log of the probability given to the classes that count as right, together."""
    places: np.ndarray
    """(N,) int64: the place of the best class that counts as right among all guesses, from 1."""

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def hits(self) -> np.ndarray:
        """(N,) bool: whether the first guess is right."""
        right: np.ndarray = self.places == 1
        return right

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """One, in the order of the source."""
        whole = {field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)}
        order = np.argsort(whole["indices"], kind="stable")
        return cls(**{name: column[order] for name, column in whole.items()})


def scored_part(source: Source, labels: LabelMap) -> Source:
    """The images whose class the model knows."""
    if not labels.unmatched:
        return source
    known = np.flatnonzero(~np.isin(source.labels(0, len(source)), labels.unmatched))
    return Subset(source, known)


def ask(
    model: ImageModel,
    source: Source,
    labels: LabelMap,
    how: How,
    *,
    ranks: Ranks | None = None,
    among: bool = False,
    progress: Progress | None = None,
) -> Answers:
    """Run the model over all images; on several ranks every one gets all answers.

    `source`: with classes that the model knows, see `scored_part`. `among`: guesses are taken among the classes that
    the data has, not among all of the model's.
    """
    if not model.num_classes:
        raise ConfigError("the model has no head to classify with: `vitrail fewshot` measures its representation")
    ranks = ranks or alone(how)
    accepted = _table(labels, model.num_classes)
    allowed = accepted.any(dim=0) if among else torch.ones(model.num_classes, dtype=torch.bool)
    rows = [_rows(torch.empty(0, model.num_classes, dtype=torch.float64), torch.empty(0, dtype=torch.int64), accepted)]
    numbers = [np.empty(0, np.int64)]
    for batch, logits in passes(model, source, model, how, ranks, progress):
        kept = logits.cpu()[batch.mask].double()
        if not torch.isfinite(kept).all():
            raise WeightsError(
                "the model's answers are not numbers: its weights are damaged, or --precision is too low"
            )
        rows.append(_rows(kept.masked_fill(~allowed, -torch.inf), batch.labels[batch.mask], accepted))
        numbers.append(batch.indices[batch.mask].numpy())
    ours = Answers(np.concatenate(numbers), *(np.concatenate(column) for column in zip(*rows, strict=True)))
    return Answers.joined(ranks.gather(ours))


def _table(labels: LabelMap, num_classes: int) -> Tensor:
    """(classes of the data, K) bool: what counts as right."""
    table = torch.zeros(len(labels.accepted), num_classes, dtype=torch.bool)
    for row, classes in enumerate(labels.accepted):
        table[row, list(classes)] = True
    return table


def _rows(logits: Tensor, labels: Tensor, accepted: Tensor) -> tuple[np.ndarray, ...]:
    """(B, K) float64 logits and (B,) labels → the columns of `Answers` from labels on."""
    right = accepted[labels]
    probabilities = logits.log_softmax(dim=1)
    confidences, predictions = probabilities.max(dim=1)
    best, first = torch.where(right, logits, -torch.inf).max(dim=1)
    # Of equal guesses the earlier class comes first, as in argmax.
    earlier = torch.arange(logits.shape[1]) < first[:, None]
    before = (logits > best[:, None]) | ((logits == best[:, None]) & earlier & ~right)
    likelihoods = -torch.where(right, probabilities, -torch.inf).logsumexp(dim=1)
    columns = (labels, predictions, confidences.exp(), likelihoods, before.sum(dim=1) + 1)
    return tuple(column.numpy() for column in columns)
