"""How sure a number is: 95% confidence intervals that hold for few images and for accuracies near 0 and 1."""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from vitrail.errors import ConfigError

LEVEL = 0.95
DRAWS = 20_000
"""Of the simulation that an interval of a calibration error is read from."""


class Measured(NamedTuple):
    """A value, and the interval that holds the true one in 95 of 100 such measurements."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, which has no word for what is not a number."""
        return {name: value if math.isfinite(value) else None for name, value in self._asdict().items()}


NOTHING = Measured(math.nan, math.nan, math.nan)
"""Measured on no image."""


def wilson(hits: int, count: int, level: float = LEVEL) -> tuple[float, float]:
    """Of a share of hits, by Wilson's score: never below 0 or above 1, and sound where there are few images."""
    if not 0 <= hits <= count:
        raise ConfigError(f"{hits} hits of {count}: give a number of hits from 0 to the count")
    if not count:
        return 0.0, 1.0
    z, share = _z(level), hits / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    # At the ends the formula gives 0 and 1 only up to rounding.
    low = (centre - spread) / scale if hits else 0.0
    high = (centre + spread) / scale if hits < count else 1.0
    return low, high


def share(hits: int, count: int, level: float = LEVEL) -> Measured:
    """An accuracy."""
    return Measured(hits / count, *wilson(hits, count, level)) if count else NOTHING


def mean(values: np.ndarray, level: float = LEVEL) -> Measured:
    """A mean of values from 0 on, such as losses: most of them small, a few large.

    By the normal approximation with Hall's correction for skewness ("On the removal of skewness by transformation",
    1992): without it the interval ends too low where rare large losses happen to be missing.
    """
    count = len(values)
    if not count:
        return NOTHING
    centre, deviation = float(values.mean()), float(values.std(ddof=1)) if count > 1 else math.inf
    if not 0 < deviation < math.inf:
        return Measured(centre, centre if deviation == 0 else 0.0, centre if deviation == 0 else math.inf)
    root = math.sqrt(count)
    skewness = float(((values - centre) ** 3).mean()) / deviation**3

    def corrected(z: float) -> float:
        bend = skewness / (3 * root)
        return z if abs(bend) < 1e-9 else (math.cbrt(1 + 3 * bend * (z - skewness / (6 * root))) - 1) / bend

    low, high = (centre - deviation / root * corrected(z) for z in (_z(level), -_z(level)))
    return Measured(centre, max(low, 0.0), high)


def sum_of_gaps(weights: np.ndarray, gaps: np.ndarray, deviations: np.ndarray, level: float = LEVEL) -> Measured:
    """Σ weight · |gap| of gaps up to 1, each measured with a deviation, as in a binned calibration error.

    Such a sum is biased upwards: noise alone makes gaps, so no interval around it that goes by its own spread holds
    the true one. But it differs from the true sum by no more than Σ weight · |error of the gap|, whatever the true gaps
    are, and how large that gets is known. The interval is therefore safe, and wider than it must be.
    """
    if not len(weights):
        return NOTHING
    value = float((weights * np.abs(gaps)).sum())
    reach = float(np.quantile(_noise(len(weights)) @ (weights * deviations), level))
    return Measured(value, max(value - reach, 0.0), min(value + reach, 1.0))


@cache
def _noise(count: int) -> np.ndarray:
    """(DRAWS, count): how far normal values are from 0."""
    noise: np.ndarray = np.abs(np.random.default_rng(0).standard_normal((DRAWS, count)))
    return noise


def _z(level: float) -> float:
    return NormalDist().inv_cdf(0.5 + level / 2)
