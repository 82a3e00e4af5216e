"""95% confidence intervals that also hold for few images and for accuracies near 0 and 1."""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from vitrail.errors import ConfigError

LEVEL = 0.95
Z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
"""Half the width of the interval of a normal distribution, in standard deviations."""
DRAWS = 20_000
"""Simulated samples from which the interval of a calibration error is read."""


class Estimate(NamedTuple):
    """A measured value with its 95% confidence interval. `float(estimate)` and f"{estimate:.1%}" take the value."""

    value: float
    low: float
    high: float

    def __float__(self) -> float:
        return self.value

    def __format__(self, form: str) -> str:
        return format(self.value, form) if form else str(self)

    def to_dict(self) -> dict[str, float | None]:
        """Return the numbers for JSON, with None for NaN and infinity, which JSON lacks."""
        return {name: value if math.isfinite(value) else None for name, value in self._asdict().items()}


NO_ESTIMATE = Estimate(math.nan, math.nan, math.nan)
"""The result of measuring on no image."""


def wilson_interval(hits: int, count: int) -> tuple[float, float]:
    """Return Wilson's score interval of the share hits / count. It stays in [0, 1] and is sound for few images."""
    if not 0 <= hits <= count:
        raise ConfigError(f"{hits} hits of {count}: give a number of hits from 0 to the count")
    if not count:
        return 0.0, 1.0
    return compute_share_limits(hits / count, count)


def compute_share_limits(share: float, count: float) -> tuple[float, float]:
    """Return Wilson's interval of a share of so many images, which need not be a whole number."""
    centre = share + Z * Z / (2 * count)
    spread = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    # At the ends the formula gives 0 and 1 only up to rounding.
    low = (centre - spread) / scale if share > 0 else 0.0
    high = (centre + spread) / scale if share < 1 else 1.0
    return low, high


def estimate_share(hits: int, count: int) -> Estimate:
    """Return the share hits / count, such as an accuracy, with its interval."""
    return Estimate(hits / count, *wilson_interval(hits, count)) if count else NO_ESTIMATE


def estimate_mean_share(hits: np.ndarray, counts: np.ndarray) -> Estimate:
    """Return the mean of (K,) shares hits / counts, such as of the recalls of classes, with its interval.

    The interval is Wilson's for so many images as would give one share the same variance. For this variance a hit and
    a miss are added to each group: a group without a miss is not certain. Groups without images are left out.
    """
    hits, counts = hits[counts > 0], counts[counts > 0]
    if not len(counts):
        return NO_ESTIMATE
    share, likely = float((hits / counts).mean()), (hits + 1) / (counts + 2)
    variance = float((likely * (1 - likely) / counts).sum()) / len(counts) ** 2
    images = float(likely.mean() * (1 - likely.mean())) / variance
    return Estimate(share, *compute_share_limits(share, images))


def estimate_mean(values: np.ndarray) -> Estimate:
    """Return the mean of non-negative values, such as losses: most of them are small and a few large.

    The interval is the normal approximation with Hall's correction for skewness ("On the removal of skewness by
    transformation", 1992). Without it the interval ends too low when the sample happens to miss the rare large losses.
    """
    count = len(values)
    if not count:
        return NO_ESTIMATE
    centre, deviation = float(values.mean()), float(values.std(ddof=1)) if count > 1 else math.inf
    if not 0 < deviation < math.inf:
        return Estimate(centre, centre if deviation == 0 else 0.0, centre if deviation == 0 else math.inf)
    root = math.sqrt(count)
    skewness = float(((values - centre) ** 3).mean()) / deviation**3

    def correct_for_skewness(z: float) -> float:
        bend = skewness / (3 * root)
        return z if abs(bend) < 1e-9 else (math.cbrt(1 + 3 * bend * (z - skewness / (6 * root))) - 1) / bend

    low, high = (centre - deviation / root * correct_for_skewness(z) for z in (Z, -Z))
    return Estimate(centre, max(low, 0.0), high)


def estimate_sum_of_gaps(weights: np.ndarray, gaps: np.ndarray, deviations: np.ndarray) -> Estimate:
    """Return Σ weight · |gap|, such as a binned calibration error, for gaps in [−1, 1] with known deviations.

    This sum is biased upwards, since noise alone makes gaps: an interval from its own spread would miss the true value.
    But the sum differs from the true one by at most Σ weight · |error of the gap|, whatever the true gaps are, and the
    distribution of that bound is known. The interval is therefore safe, and wider than necessary.
    """
    if not len(weights):
        return NO_ESTIMATE
    value = float((weights * np.abs(gaps)).sum())
    reach = float(np.quantile(_draw_noise(len(weights)) @ (weights * deviations), LEVEL))
    return Estimate(value, max(value - reach, 0.0), min(value + reach, 1.0))


@cache
def _draw_noise(count: int) -> np.ndarray:
    """Return (DRAWS, count) absolute values of standard normal samples."""
    noise: np.ndarray = np.abs(np.random.default_rng(0).standard_normal((DRAWS, count)))
    return noise
