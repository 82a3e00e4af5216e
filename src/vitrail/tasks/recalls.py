"""The share of right answers on the images of each class, and its mean, in which rare classes count as much."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitrail.system.intervals import Estimate
from vitrail.tasks.task import DRAWS, Array, estimate_by_resampling


def compute_recalls(truth: Array, hits: Array, count: int) -> Array:
    """Return (count,) shares of the images of each class that are hits; NaN for a class without images.

    Args:
        truth: (N,) numbers of classes.
        hits: (N,) bool.
        count: the number of classes.
    """
    images = np.bincount(truth, minlength=count)
    recalls: Array = np.where(images > 0, np.bincount(truth, hits, count) / np.maximum(images, 1), np.nan)
    return recalls


def estimate_balanced_accuracy(truth: Array, hits: Array, count: int, draws: int = DRAWS) -> Estimate:
    """Return the mean recall of the classes that have images. Arguments are those of `compute_recalls`."""

    def compute_mean(rows: NDArray[np.int64]) -> float:
        return float(np.nanmean(compute_recalls(truth[rows], hits[rows], count)))

    return estimate_by_resampling(compute_mean, len(truth), draws)


def estimate_mean_accuracy(hits: Array, is_known: Array, draws: int = DRAWS) -> Estimate:
    """Return the mean of the accuracies of C columns, for (N, C) hits and which of them count."""

    def compute_mean(rows: NDArray[np.int64]) -> float:
        images, right = is_known[rows].sum(axis=0), (hits & is_known)[rows].sum(axis=0)
        return float((right[images > 0] / images[images > 0]).mean()) if images.any() else float("nan")

    return estimate_by_resampling(compute_mean, len(hits), draws)
