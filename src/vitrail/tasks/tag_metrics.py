"""Average precision and F1 of tags, fast enough to be computed on hundreds of resamples.

Shapes: N images, K tags.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
LEAST_FOR_THRESHOLD = 5
"""Images that must have a tag for a threshold of its own."""


class AveragePrecision:
    """The average precision of each tag: the mean precision over the images that have it. Equal scores are one step.

    Args:
        truth: (N, K) bool.
        scores: (N, K), larger for images that should have the tag.
    """

    def __init__(self, truth: Array, scores: Array) -> None:
        self.order = np.argsort(-scores, axis=0, kind="stable")
        self.truth = np.take_along_axis(truth, self.order, axis=0).astype(np.float64)
        sorted_scores = np.take_along_axis(scores, self.order, axis=0)
        last = np.ones((1, scores.shape[1]), bool)
        is_end = np.concatenate([sorted_scores[1:] != sorted_scores[:-1], last]) if len(scores) else last[:0]
        # For each place, the last place with the same score: precision is only known there.
        places = np.where(is_end, np.arange(len(scores))[:, None], len(scores))
        self.ends = np.minimum.accumulate(places[::-1], axis=0)[::-1]

    def compute(self, rows: NDArray[np.int64]) -> Array:
        """Return (K,) average precisions on these images, of which some may repeat; NaN for a tag that none has."""
        weights = np.bincount(rows, minlength=len(self.order)).astype(np.float64)[self.order]
        right = weights * self.truth
        totals = right.sum(axis=0)
        precision = np.cumsum(right, axis=0) / np.maximum(np.cumsum(weights, axis=0), 1)
        sums = (right * np.take_along_axis(precision, self.ends, axis=0)).sum(axis=0)
        result: Array = np.where(totals > 0, sums / np.maximum(totals, 1), np.nan)
        return result

    def compute_mean(self, rows: NDArray[np.int64]) -> float:
        """Return the mean over the tags that some of these images have."""
        return average_known(self.compute(rows))


def average_known(each: Array) -> float:
    """Return the mean of the numbers that are known; NaN if none is."""
    return float(np.nanmean(each)) if np.isfinite(each).any() else float("nan")


def compute_f1(truth: Array, decided: Array) -> Array:
    """Return the (K,) F1 scores of (N, K) decisions; NaN for a tag that no image has."""
    positives, chosen = truth.sum(axis=0), decided.sum(axis=0)
    result: Array = np.where(
        positives > 0, 2 * (truth & decided).sum(axis=0) / np.maximum(positives + chosen, 1), np.nan
    )
    return result


def choose_thresholds(truth: Array, scores: Array) -> list[float]:
    """Return a threshold for each tag of (N, K) scores: the one with the best F1 of its own, if enough images have it.

    A few images do not tell: for one alone that ranks last, the best F1 would be to answer the tag for every image. The
    rare tags share the threshold that is best for all of them together.
    """
    images = truth.sum(axis=0)
    is_rare = images < LEAST_FOR_THRESHOLD
    pooled = truth[:, is_rare], scores[:, is_rare]
    shared = choose_threshold(*map(np.ravel, pooled)) if pooled[0].sum() >= LEAST_FOR_THRESHOLD else 0.5
    return [shared if rare else choose_threshold(truth[:, k], scores[:, k]) for k, rare in enumerate(is_rare)]


def choose_threshold(truth: Array, scores: Array) -> float:
    """Return the threshold with the best F1 on (N,) scores, half-way between two; 0.5 if no image has the tag."""
    if not truth.any():
        return 0.5
    order = np.argsort(-scores, kind="stable")
    ranked, hits = scores[order], np.cumsum(truth[order])
    f1 = 2 * hits / (np.arange(1, len(ranked) + 1) + truth.sum())
    is_end = np.append(ranked[1:] != ranked[:-1], True)
    best = int(np.argmax(np.where(is_end, f1, -1)))
    below = ranked[best + 1] if best + 1 < len(ranked) else 0.0
    return float((ranked[best] + below) / 2)
