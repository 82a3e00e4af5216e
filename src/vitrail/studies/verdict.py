"""How a study decides: differences with intervals over seeds, checks of them, and one verdict.

The rule of every study is written as checks before anything is measured. A check holds if the whole interval of a
difference is where the claim puts it, fails if no part of it is, and is open otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vitrail.errors import ConfigError
from vitrail.system.intervals import LEVEL, Estimate

Outcome = Literal["holds", "fails", "open"]
Verdict = Literal["holds here", "does not hold here", "not decided"]
VERDICTS: dict[Outcome, Verdict] = {"holds": "holds here", "fails": "does not hold here", "open": "not decided"}


@dataclass(frozen=True)
class Check:
    """One part of a claim: a difference, and where the claim says that it lies."""

    statement: str
    """What the claim says, in words."""
    difference: Estimate
    """The measured difference with its 95% interval over seeds."""
    low: float
    """The claim says that the difference is above this,"""
    high: float = math.inf
    """and below this."""

    @property
    def outcome(self) -> Outcome:
        """Whether the claim holds, fails, or the interval leaves it open."""
        value, low, high = self.difference
        if not math.isfinite(value) or math.isnan(low) or math.isnan(high):
            return "open"
        if self.low < low and high < self.high:
            return "holds"
        return "fails" if high <= self.low or low >= self.high else "open"


def decide(checks: Sequence[Check]) -> Verdict:
    """Return the verdict of all checks: a claim holds if every part holds, and does not if one part fails."""
    if not checks:
        raise ConfigError("a verdict needs at least one check")
    outcomes = {check.outcome for check in checks}
    return VERDICTS["fails" if "fails" in outcomes else "open" if "open" in outcomes else "holds"]


def check_greater(
    statement: str,
    first: Sequence[float],
    second: Sequence[float],
    by: float = 0.0,
    *,
    deviation: Deviation | None = None,
) -> Check:
    """Check that the mean of `first` is more than `by` above that of `second`; both hold one number for each seed."""
    return Check(statement, estimate_difference(first, second, deviation), by)


def check_equal(
    statement: str,
    first: Sequence[float],
    second: Sequence[float],
    within: float,
    *,
    deviation: Deviation | None = None,
) -> Check:
    """Check that the means of `first` and `second` differ by less than `within`."""
    return Check(statement, estimate_difference(first, second, deviation), -within, within)


@dataclass(frozen=True)
class Deviation:
    """The standard deviation over seeds, as estimated from several arms together."""

    value: float
    freedom: int
    """Degrees of freedom: the number of runs minus that of arms."""


def pool_deviation(arms: Sequence[Sequence[float]]) -> Deviation:
    """Return the deviation over seeds that all arms have in common.

    Two or three seeds say little about the deviation of one arm. Those of all arms together say more, if they are
    about equally noisy.
    """
    freedom = sum(len(values) - 1 for values in arms if len(values) > 1)
    if not freedom:
        return Deviation(math.nan, 0)
    squares = sum((value - math.fsum(values) / len(values)) ** 2 for values in arms for value in values)
    return Deviation(math.sqrt(squares / freedom), freedom)


def estimate_seed_mean(values: Sequence[float], deviation: Deviation | None = None) -> Estimate:
    """Return the mean over seeds with its 95% interval; for a single seed, without a known deviation, it is endless."""
    deviation = deviation or pool_deviation([values])
    return _estimate(math.fsum(values) / len(values), deviation.value / math.sqrt(len(values)), deviation.freedom)


def estimate_difference(
    first: Sequence[float], second: Sequence[float], deviation: Deviation | None = None
) -> Estimate:
    """Return the mean of `first` minus that of `second`, with its 95% interval.

    Args:
        first, second: One number for each seed.
        deviation: A deviation over seeds that both have in common, for Student's interval; if None, each has its own,
            for Welch's. Beside numbers that never change, that is the interval of the others alone.
    """
    if not first or not second:
        raise ConfigError("a difference needs a result on both sides")
    value = math.fsum(first) / len(first) - math.fsum(second) / len(second)
    if deviation is not None:
        return _estimate(value, (1 / len(first) + 1 / len(second)) ** 0.5 * deviation.value, deviation.freedom)
    squares = [pool_deviation([values]).value ** 2 / len(values) for values in (first, second)]
    error = math.sqrt(sum(squares))
    if not error > 0:  # a single seed tells no deviation, and numbers that never change tell none of other seeds
        return _estimate(value, error, 0)
    parts = (
        (square / error**2) ** 2 / (len(values) - 1) for square, values in zip(squares, (first, second), strict=True)
    )
    return _estimate(value, error, 1 / sum(parts))


def _estimate(value: float, error: float, freedom: float) -> Estimate:
    """Return a value with the interval of Student's distribution, from its standard error."""
    from scipy.stats import t

    if not freedom or math.isnan(error):
        return Estimate(value, -math.inf, math.inf)
    reach = float(t.ppf(0.5 + LEVEL / 2, freedom)) * error
    return Estimate(value, value - reach, value + reach)
