"""Verdicts: intervals against scipy's own tests, and checks at their limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vitrail.errors import ConfigError
from vitrail.studies.verdict import (
    Check,
    check_equal,
    check_greater,
    decide,
    estimate_difference,
    estimate_seed_mean,
    pool_deviation,
)
from vitrail.system.intervals import Estimate

FINITE = st.floats(-100, 100)


class TestIntervals:
    @pytest.mark.parametrize("is_common", [True, False])
    def test_a_difference_has_students_interval_or_welchs(self, is_common):
        first, second = [52.1, 51.3, 53.0], [50.2, 50.9]
        interval = stats.ttest_ind(first, second, equal_var=is_common).confidence_interval(0.95)
        deviation = pool_deviation([first, second]) if is_common else None
        found = estimate_difference(first, second, deviation)
        assert found == pytest.approx((np.mean(first) - np.mean(second), interval.low, interval.high))

    def test_a_number_that_never_changes_adds_no_certainty(self):
        values = [52.1, 51.3, 53.0]
        alone = estimate_seed_mean(values)
        beside = estimate_difference(values, [50.0] * 3)
        assert beside == pytest.approx([limit - 50 for limit in alone])

    def test_two_numbers_that_never_change(self):
        assert check_greater("more", [3.0, 3.0], [1.0, 1.0]).outcome == "open"

    def test_a_mean_has_students_interval(self):
        values = [3.0, 4.5, 5.0, 4.0]
        interval = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert estimate_seed_mean(values) == pytest.approx((np.mean(values), interval.low, interval.high))

    def test_the_deviation_of_several_arms_is_that_of_an_analysis_of_variance(self):
        arms = [[1.0, 2.0, 4.0], [10.0, 11.0], [5.0]]
        within = sum(((np.array(arm) - np.mean(arm)) ** 2).sum() for arm in arms)
        deviation = pool_deviation(arms)
        assert deviation.freedom == 3
        assert deviation.value == pytest.approx(math.sqrt(within / 3))

    @given(st.lists(st.lists(FINITE, min_size=2, max_size=4), min_size=2, max_size=5))
    def test_more_arms_never_lack_freedom(self, arms):
        assert pool_deviation(arms).freedom == sum(map(len, arms)) - len(arms)

    def test_one_seed_decides_nothing(self):
        check = check_greater("more", [90.0], [10.0])
        assert check.outcome == "open"
        assert decide([check]) == "not decided"

    def test_one_seed_decides_with_the_deviation_of_others(self):
        deviation = pool_deviation([[1.0, 1.2], [5.0, 5.2]])
        assert check_greater("more", [90.0], [10.0], deviation=deviation).outcome == "holds"

    def test_nothing_to_compare(self):
        with pytest.raises(ConfigError, match="both sides"):
            estimate_difference([], [1.0])


class TestChecks:
    @pytest.mark.parametrize(
        ("low", "high", "outcome"),
        [(0.1, 2.0, "holds"), (-2.0, -0.1, "fails"), (-2.0, 0.0, "fails"), (-1.0, 1.0, "open"), (0.0, 2.0, "open")],
    )
    def test_greater(self, low, high, outcome):
        assert Check("more", Estimate((low + high) / 2, low, high), 0.0).outcome == outcome

    @pytest.mark.parametrize(
        ("low", "high", "outcome"),
        [(-0.9, 0.9, "holds"), (1.1, 3.0, "fails"), (-3.0, -1.0, "fails"), (-0.5, 1.5, "open"), (-5.0, 5.0, "open")],
    )
    def test_equal(self, low, high, outcome):
        assert Check("the same", Estimate((low + high) / 2, low, high), -1.0, 1.0).outcome == outcome

    def test_no_number_is_open(self):
        assert Check("more", Estimate(math.nan, math.nan, math.nan), 0.0).outcome == "open"

    def test_by_so_much(self):
        first, second = [10.0, 10.1, 10.2], [8.0, 8.1, 8.2]
        assert check_greater("more", first, second, by=1.0).outcome == "holds"
        assert check_greater("more", first, second, by=3.0).outcome == "fails"
        assert check_equal("the same", first, second, within=3.0).outcome == "holds"
        assert check_equal("the same", first, second, within=1.0).outcome == "fails"


class TestDecide:
    def make(self, *outcomes):
        limits = {"holds": (1.0, 2.0), "fails": (-2.0, -1.0), "open": (-1.0, 1.0)}
        return [Check(name, Estimate(sum(limits[name]) / 2, *limits[name]), 0.0) for name in outcomes]

    def test_all_must_hold(self):
        assert decide(self.make("holds", "holds")) == "holds here"
        assert decide(self.make("holds", "open")) == "not decided"

    def test_one_failure_is_enough(self):
        assert decide(self.make("holds", "open", "fails")) == "does not hold here"

    def test_no_checks(self):
        with pytest.raises(ConfigError, match="at least one"):
            decide([])
