"""Confidence intervals hold what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import ConfigError
from vitrail.evaluation.report import measure_calibration
from vitrail.system.intervals import NO_ESTIMATE, Estimate, estimate_mean, estimate_share, wilson_interval

TIMES = 2000
TOLERANCE = 0.025
"""Of a rate measured so often, five deviations."""


def test_wilson_by_hand():
    # p = 8/10, z = 1.959964: centre (0.8 + 0.19207) / 1.38415, spread 1.959964 · √(0.016 + 0.0096036) / 1.38415.
    low, high = wilson_interval(8, 10)
    assert low == pytest.approx(0.4901625, abs=1e-6)
    assert high == pytest.approx(0.9433178, abs=1e-6)


@given(st.integers(0, 500), st.integers(0, 500))
def test_wilson_holds_the_share_and_stays_a_share(a, b):
    hits, count = min(a, b), max(a, b)
    low, high = wilson_interval(hits, count)
    assert 0 <= low < high <= 1
    if count:
        assert low <= hits / count <= high
    mirrored = wilson_interval(count - hits, count)
    assert (1 - high, 1 - low) == pytest.approx(mirrored, abs=1e-12)


def test_wrong_counts_are_refused():
    with pytest.raises(ConfigError, match="5 hits"):
        wilson_interval(5, 4)


@pytest.mark.parametrize(("accuracy", "count"), [(0.5, 100), (0.9, 300), (0.97, 1000), (0.02, 2000), (0.76, 5000)])
def test_intervals_of_an_accuracy_cover_at_the_nominal_rate(accuracy, count):
    hits = np.random.default_rng(1).binomial(count, accuracy, TIMES)
    covered = sum(low <= accuracy <= high for low, high in (wilson_interval(int(h), count) for h in hits)) / TIMES
    assert abs(covered - 0.95) < TOLERANCE


@pytest.mark.parametrize("accuracy", [0.05, 0.3, 0.5, 0.8, 0.9, 0.98])
def test_few_images_are_covered_on_average_and_never_badly(accuracy):
    """Counts are whole, so a rate of exactly 95% cannot be had of a few: it lies around it."""
    rates = []
    for count in range(10, 60):
        covered = [low <= accuracy <= high for low, high in (wilson_interval(hits, count) for hits in range(count + 1))]
        chance = [math.comb(count, h) * accuracy**h * (1 - accuracy) ** (count - h) for h in range(count + 1)]
        rates.append(float(np.dot(covered, chance)))
    assert abs(np.mean(rates) - 0.95) < 0.02
    assert min(rates) > 0.82


@pytest.mark.slow
@pytest.mark.parametrize(("count", "at_least"), [(60, 0.93), (200, 0.955), (1000, 0.9), (5000, 0.92)])
def test_intervals_of_a_good_models_likelihood(count, at_least):
    """Nearly all guesses are sure and right, and rare losses are large. It is not 0.95 everywhere: measured 4,000 times
    it was 0.950, 0.974, 0.919 and 0.937, and 0.874, 0.900, 0.907 and 0.930 without the correction for skewness. The
    limits are three deviations of this test below what was measured: they guard it, and do not prove 0.95."""
    rng = np.random.default_rng(4)
    shares = np.array([[0.95, 0.9995], [0.05, 0.6]])
    true = -sum(part * (p * np.log(p) + (1 - p) * np.log(1 - p)) for part, p in shares)
    covered = 0
    for _ in range(TIMES):
        p = np.where(rng.uniform(size=count) < 0.95, 0.9995, 0.6)
        measured = estimate_mean(-np.log(np.where(rng.uniform(size=count) < p, p, 1 - p)))
        covered += measured.low <= true <= measured.high
        assert 0 <= measured.low <= measured.value <= measured.high
    assert covered / TIMES >= at_least


def test_intervals_of_a_likelihood_cover_at_the_nominal_rate():
    """Of exponential values."""
    rng = np.random.default_rng(2)
    measured = [estimate_mean(rng.exponential(0.7, 300)) for _ in range(TIMES)]
    assert abs(sum(m.low <= 0.7 <= m.high for m in measured) / TIMES - 0.95) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("overconfidence", [0.0, 0.03, 0.15])
@pytest.mark.parametrize("count", [60, 2000])
def test_intervals_of_a_calibration_error_cover_at_least_at_the_nominal_rate(overconfidence, count):
    """The true error is known: guesses of probability p are right with p less the overconfidence."""
    rng = np.random.default_rng(3)
    covered, times = 0, 1000
    for _ in range(times):
        confidences = rng.uniform(0.2, 1, count)
        rates = confidences - overconfidence
        bins, measured = measure_calibration(confidences, rng.uniform(size=count) < rates)
        true = sum(each.images for each in bins) / count * overconfidence
        covered += measured.low <= true <= measured.high
        assert measured.low <= measured.value <= measured.high
        assert measured.high - measured.low < 4 / count**0.5  # not so wide that it says nothing
    assert covered / times >= 0.95 - TOLERANCE


def test_the_calibration_error_by_hand():
    # Bins of a fifteenth: 0.95 and 0.97 in the last, one right; 0.5 in the eighth, right.
    bins, measured = measure_calibration(np.array([0.95, 0.97, 0.5]), np.array([True, False, True]))
    assert [(each.images, each.accuracy) for each in bins] == [(1, 1.0), (2, 0.5)]
    assert bins[1].confidence == pytest.approx(0.96)
    assert measured.value == pytest.approx(2 / 3 * 0.46 + 1 / 3 * 0.5)


def test_borders_of_bins_belong_to_the_lower_one():
    bins, _ = measure_calibration(np.array([0.0, 1 / 15, 1.0]), np.array([True, True, True]))
    assert [(each.low, each.images) for each in bins] == [(0.0, 2), (14 / 15, 1)]


def test_nothing_measured():
    assert estimate_share(0, 0) is NO_ESTIMATE
    assert NO_ESTIMATE.to_dict() == {"value": None, "low": None, "high": None}
    assert estimate_mean(np.array([])) is NO_ESTIMATE
    assert estimate_mean(np.array([2.0])) == Estimate(2.0, 0.0, math.inf)
    assert estimate_mean(np.array([2.0, 2.0])) == Estimate(2.0, 2.0, 2.0)
    assert measure_calibration(np.array([]), np.array([], bool)) == ((), NO_ESTIMATE)


def test_a_calibration_error_is_a_share():
    assert measure_calibration(np.array([0.99]), np.array([False]))[1].high == 1.0
