"""Fit what a model's answers are worth to images that chose nothing: sets of labels, and a score of unknown images.

Shapes: N images, K classes, D the size of the representation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.data.sources.source import Source, Subset
from vitrail.errors import ConfigError, DataError, WeightsError
from vitrail.evaluation.labels import LabelMap, match_classes
from vitrail.evaluation.predictions import select_known_images
from vitrail.inference.batches import InferenceOptions, open_model, run_batches
from vitrail.inference.engine import Engine, Model, to_probabilities
from vitrail.reliability.record import Reliability
from vitrail.reliability.sets import LEAST_IMAGES, LabelSets, find_least_belief, measure_beliefs
from vitrail.reliability.unknown import LEAST_IMAGES as LEAST_KNOWN
from vitrail.reliability.unknown import ScoreKind, UnknownScore, measure_auroc
from vitrail.system.events import Progress
from vitrail.tasks.labels import Labels

MOST_IMAGES = 20_000
"""Images that a record is fitted to; of more, so many are drawn."""
MOST_UNLIKE = 5_000
"""Images of other data that choose the score; of more, so many are drawn."""
PREFERRED: tuple[ScoreKind, ...] = ("neighbours", "energy", "softmax")
"""Scores from the best to the worst, on average over what docs/reliability.md shows."""
SPLITS = 20
"""Random halvings of the images on which sets are checked."""
COVERAGES = (0.9, 0.95, 0.99)
"""Shares of images that are checked."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Outputs:
    """What a model computes for images that could be read, in random order."""

    logits: Array | None
    """(N, K) float32; None for a model without classes."""
    embeddings: Array | None
    """(N, D) float32; None for a file that gives none."""
    is_right: Array | None
    """(N, K) bool: which labels are right; None for another task than labels."""

    def __len__(self) -> int:
        rows = self.embeddings if self.logits is None else self.logits
        assert rows is not None
        return len(rows)

    @property
    def probabilities(self) -> Array:
        """(N, K) float32, as every answer has them."""
        return to_probabilities(torch.from_numpy(self.logits))


class SetCheck(NamedTuple):
    """What sets of labels do on images that they were not fitted to, on average over random halvings."""

    coverage: float
    """What was asked for."""
    reached: float
    """The share of images whose right label is in the set."""
    size: float
    """Labels in a set, on average."""
    alone: float
    """The share of sets with one label."""


class FittedReliability(NamedTuple):
    """A record, and what was measured while it was fitted."""

    reliability: Reliability
    aurocs: Mapping[str, float]
    """For each score, the probability that an unlike image looks stranger than a known one; empty without such."""
    checks: tuple[SetCheck, ...]
    """Of sets of labels; empty if there are none."""


def fit_reliability(
    model: Model | Engine,
    source: Source,
    *,
    unlike: Source | None = None,
    sets: bool = True,
    options: InferenceOptions | None = None,
    labels: LabelMap | None = None,
    data: str = "",
    most: int = MOST_IMAGES,
    seed: int = 0,
    progress: Progress | None = None,
) -> FittedReliability | None:
    """Fit sets of labels, where there are enough images, and a score of unknown images.

    Args:
        model: a loaded model, as an engine, or its name.
        source: images that neither trained nor chose anything, with labels if the model gives labels.
        unlike: images of other things, which choose the score; by default it is the one that is best on average.
        sets: whether to fit sets of labels, if there are enough images.
        options: device, precision, batch size, worker processes.
        labels: which classes of the model are right for which of the data; by default they are matched by name.
        data: the name of the data, for the record.
        most: images that are used; of more, so many are drawn.
        seed: decides the order of the images, and which are drawn.
        progress: called after each batch with the number of images done and of all images.

    Returns:
        The record, with `sets` only if at least 1,000 images could be read; None if there are fewer than 100.

    Raises:
        DataError: the classes cannot be matched, or too many images are broken.
        WeightsError: the model computes values that are not finite.
    """
    options = options or InferenceOptions()
    engine = open_model(model, options)
    if engine.num_classes and isinstance(engine.task, Labels) and labels is None:
        labels = match_classes(engine.class_names, engine.num_classes, source.classes, source.num_classes)
    known = source if labels is None else select_known_images(source, labels)
    if len(known) < LEAST_KNOWN:
        return None
    outputs = compute_outputs(engine, draw_images(known, most, seed), options, labels, seed, progress)
    if len(outputs) < LEAST_KNOWN:
        return None
    scores = {kind: UnknownScore.fit(kind, outputs.logits, outputs.embeddings) for kind in list_scores(engine)}
    aurocs: dict[str, float] = {}
    if unlike is not None:
        strange = compute_outputs(engine, draw_images(unlike, MOST_UNLIKE, seed), options, None, seed, progress)
        if not len(strange):
            raise DataError("none of the unlike images can be read")
        aurocs = {
            kind: measure_auroc(score.known.values, score.measure(strange.logits, strange.embeddings))
            for kind, score in scores.items()
        }
    chosen = max(scores, key=lambda kind: aurocs.get(kind, 0.0))  # the first of equal ones
    label_sets, checks = None, tuple[SetCheck, ...]()
    if sets and outputs.is_right is not None and len(outputs) >= LEAST_IMAGES:
        label_sets = LabelSets.fit(outputs.probabilities, outputs.is_right)
        checks = tuple(check_sets(outputs.probabilities, outputs.is_right, each) for each in COVERAGES)
    reliability = Reliability(images=len(outputs), data=data, sets=label_sets, unknown=scores[chosen])
    return FittedReliability(reliability, aurocs, checks)


def list_scores(engine: Engine) -> tuple[ScoreKind, ...]:
    """Return the scores of unknown images that a model can have, from the one preferred.

    Softmax and energy are for one label of several: other outputs do not compete for an image.
    """
    has_labels = bool(engine.num_classes) and isinstance(engine.task, Labels)
    has_embeddings = engine.embedding_size is not None
    return tuple(kind for kind in PREFERRED if (has_embeddings if kind == "neighbours" else has_labels))


def draw_images(source: Source, most: int, seed: int) -> Source:
    """Return the images, or `most` of them that are drawn at random, in the order of the source."""
    if len(source) <= most:
        return source
    return Subset(source, np.sort(np.random.default_rng(seed).permutation(len(source))[:most]))


def compute_outputs(
    engine: Engine,
    source: Source,
    options: InferenceOptions,
    labels: LabelMap | None,
    seed: int,
    progress: Progress | None = None,
) -> Outputs:
    """Run the model over all images; the rows come back in random order. Without a label map no label is right."""
    has_logits, has_embeddings = bool(engine.num_classes), engine.embedding_size is not None
    logits, embeddings, rights = [], [], []
    batches = run_batches(engine, source, options, progress=progress, logits=has_logits, embeddings=has_embeddings)
    for batch, output in batches:
        if output.logits is not None:
            logits.append(output.logits.cpu()[batch.mask].float())
        if output.embeddings is not None:
            embeddings.append(output.embeddings.cpu()[batch.mask].float())
        if labels is not None:
            rights.append(_mark_right(labels, batch.labels[batch.mask].numpy(), engine.num_classes))
    order = np.random.default_rng(seed).permutation(sum(map(len, logits or embeddings)))
    outputs = Outputs(
        torch.cat(logits).numpy()[order] if logits else None,
        torch.cat(embeddings).numpy()[order] if embeddings else None,
        np.concatenate(rights)[order] if rights else None,
    )
    for rows in (outputs.logits, outputs.embeddings):
        if rows is not None and not np.isfinite(rows).all():
            raise WeightsError("the model's outputs are not finite: its weights are damaged")
    return outputs


def _mark_right(labels: LabelMap, numbers: Array, num_classes: int) -> Array:
    right = np.zeros((len(numbers), num_classes), dtype=bool)
    for row, number in enumerate(numbers.tolist()):
        right[row, list(labels.accepted[number])] = True
    return right


def check_sets(probabilities: Array, is_right: Array, coverage: float, splits: int = SPLITS, seed: int = 0) -> SetCheck:
    """Fit sets to one half of the images and check them on the other, for several random halvings.

    Args:
        probabilities: (N, K) as the model gives them.
        is_right: (N, K) bool: the labels that are right.
        coverage: the share of images whose set should hold a right label.
        splits: how often the images are divided.
        seed: decides the divisions.
    """
    beliefs = measure_beliefs(probabilities)
    of_right = np.where(is_right, beliefs, -np.inf).max(axis=1)
    rng, half = np.random.default_rng(seed), len(beliefs) // 2
    if half < 1:
        raise ConfigError("sets are checked on at least two images")
    rows = []
    for _ in range(splits):
        order = rng.permutation(len(beliefs))
        fitted, tested = order[:half], order[half:]
        threshold = find_least_belief(np.sort(of_right[fitted]), coverage)
        sizes = (beliefs[tested] >= threshold).sum(axis=1)
        rows.append(((of_right[tested] >= threshold).mean(), sizes.mean(), (sizes == 1).mean()))
    reached, size, alone = np.mean(rows, axis=0).tolist()
    return SetCheck(coverage, reached, size, alone)
