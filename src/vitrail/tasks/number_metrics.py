"""R², Spearman's rank correlation and Cohen's kappa with intervals, and groups of similar numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitrail.system.intervals import Estimate
from vitrail.tasks.task import DRAWS, Array, estimate_by_resampling

GROUPS = 10


def estimate_r2(truth: Array, guess: Array, draws: int = DRAWS) -> Estimate:
    """Return the share of the variance of (N,) numbers that guesses explain; NaN if all numbers are equal.

    1 is perfect, 0 is no better than the mean of these numbers as the answer for all images, and below is worse.
    """

    def compute_r2(rows: NDArray[np.int64]) -> float:
        drawn = truth[rows]
        spread = ((drawn - drawn.mean()) ** 2).sum()
        return 1 - float(((drawn - guess[rows]) ** 2).sum() / spread) if spread > 0 else float("nan")

    return estimate_by_resampling(compute_r2, len(truth), draws)


def estimate_spearman(truth: Array, guess: Array, draws: int = DRAWS) -> Estimate:
    """Return Spearman's correlation of (N,) numbers with guesses; NaN if all of one are equal."""
    return estimate_by_resampling(RankCorrelation(truth, guess).compute, len(truth), draws)


def estimate_kappa(truth: Array, decided: Array, count: int, draws: int = DRAWS) -> Estimate:
    """Return Cohen's kappa with quadratic weights of (N,) levels below `count`; NaN if all are the same.

    It is 1 − the mean squared distance, divided by that of the same answers dealt out to the images by chance.
    """
    apart = (np.arange(count)[:, None] - np.arange(count)) ** 2

    def compute_kappa(rows: NDArray[np.int64]) -> float:
        shares = [np.bincount(each[rows], minlength=count) / len(rows) for each in (truth, decided)]
        by_chance = float(shares[0] @ apart @ shares[1])
        return 1 - float(((truth - decided)[rows] ** 2).mean()) / by_chance if by_chance > 0 else float("nan")

    return estimate_by_resampling(compute_kappa, len(truth), draws)


class RankCorrelation:
    """The correlation of the ranks of two arrays. Equal values share the mean of their ranks.

    It is fast enough for hundreds of resamples: values are sorted once; a resample only changes how often each occurs.

    Args:
        first: (N,) numbers.
        second: (N,) numbers.
    """

    def __init__(self, first: Array, second: Array) -> None:
        self.places = [np.unique(each, return_inverse=True)[1] for each in (first, second)]

    def compute(self, rows: NDArray[np.int64]) -> float:
        """Return the correlation on these images, of which some may repeat; NaN if all values of one are equal."""
        weights = np.bincount(rows, minlength=len(self.places[0])).astype(np.float64)
        first, second = (self._centre_ranks(places, weights) for places in self.places)
        spread = np.sqrt((weights * first**2).sum() * (weights * second**2).sum())
        return float((weights * first * second).sum() / spread) if spread > 0 else float("nan")

    @staticmethod
    def _centre_ranks(places: Array, weights: Array) -> Array:
        """Return the ranks minus their mean: half of the images below minus half of those above."""
        counts = np.bincount(places, weights)
        below = np.cumsum(counts) - counts
        ranks: Array = ((below + counts / 2) - counts.sum() / 2)[places]
        return ranks


def group_by_rank(numbers: Array, groups: int = GROUPS) -> NDArray[np.int64]:
    """Return for each of (N,) numbers in which tenth of them it lies, and −1 for NaN."""
    is_known = ~np.isnan(numbers)
    if not is_known.any():
        return np.full(len(numbers), -1, np.int64)
    edges = np.quantile(numbers[is_known], np.arange(1, groups) / groups)
    return np.where(is_known, np.searchsorted(edges, numbers, side="right"), -1).astype(np.int64)
