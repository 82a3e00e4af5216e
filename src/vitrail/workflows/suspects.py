"""Images whose labels may be wrong: a prediction that was made without an image is confident of another class."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.sources.source import Source
from vitrail.evaluation.discriminant import CrossFit
from vitrail.evaluation.features import Features
from vitrail.system.files import write_whole


class Suspect(NamedTuple):
    """An image whose label may be wrong."""

    name: str
    label: str
    """The class that it is labelled with."""
    thinks: str
    """The class that is predicted."""
    probability: float
    """Probability of the predicted class."""


class SuspectRow(NamedTuple):
    """A suspect by numbers."""

    row: int
    """Its row among the features."""
    thinks: int
    probability: float


def find_suspects(predictions: CrossFit, labels: Tensor, num_classes: int) -> list[SuspectRow]:
    """Return the images whose prediction contradicts their label, the most confident first.

    As in confident learning (arXiv 1911.00068), the threshold of a class is the mean probability of that class over the
    images labelled with it. A suspect is below the threshold of its own class, and at or above the threshold of another
    class, which is the most probable. So a class that is hard to recognise is not suspected as a whole.
    """
    sums = predictions.label_probability.new_zeros(num_classes).scatter_add_(
        0, labels[predictions.known], predictions.label_probability[predictions.known]
    )
    threshold = sums / torch.bincount(labels[predictions.known], minlength=num_classes).clamp(min=1)
    differs = predictions.known & (predictions.guesses != labels) & (predictions.label_probability < threshold[labels])
    is_suspect = differs & (predictions.confidence >= threshold[predictions.guesses])
    suspects = [
        SuspectRow(row, int(predictions.guesses[row]), float(predictions.confidence[row]))
        for row in is_suspect.nonzero().flatten().tolist()
    ]
    return sorted(suspects, key=lambda suspect: -suspect.probability)


def name_suspects(rows: Sequence[SuspectRow], source: Source, features: Features) -> tuple[Suspect, ...]:
    """Return the suspects with the names of their images and classes; a class without a name is a number."""

    def name_class(label: int) -> str:
        return source.classes[label] if source.classes else str(label)

    return tuple(
        Suspect(
            source.display_name(int(features.indices[row])),
            name_class(int(features.labels[row])),
            name_class(thinks),
            probability,
        )
        for row, thinks, probability in rows
    )


def write_suspects(path: Path, suspects: Sequence[Suspect]) -> None:
    """Write all suspects as CSV; only the heading if there are none."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(Suspect._fields)
    table.writerows((*suspect[:3], f"{suspect.probability:.4f}") for suspect in suspects)
    write_whole(path, text.getvalue().encode("utf-8"))
