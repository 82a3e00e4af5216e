"""Conformal sets against brute force, and their promise against simulations."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import betabinom, binom

from vitrail.errors import ConfigError
from vitrail.evaluation.reliability import check_sets
from vitrail.reliability.sets import LabelSets, count_left_out, find_least_belief, measure_beliefs

FALSE_ALARM = 1e-6
"""How often a right implementation would fail each simulation, if it were run with other seeds."""


def draw_images(count: int, seed: int, classes: int = 6, skill: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Return (count, classes) float32 probabilities of a model that is far too sure, and which label is right."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=count)
    logits = rng.normal(size=(count, classes))
    logits[np.arange(count), labels] += skill
    powers = np.exp(3 * logits)
    return (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32), np.eye(classes, dtype=bool)[labels]


@given(
    beliefs=st.lists(st.integers(0, 8).map(lambda number: number / 8), min_size=1, max_size=40),
    coverage=st.sampled_from(["0.05", "0.1", "0.5", "0.9", "0.95", "0.99", "0.7", "0.3"]),
)
def test_the_threshold_is_the_largest_that_keeps_enough(beliefs, coverage):
    """Brute force: the largest value, of those there are and 0, that leaves few enough beliefs below it, in fractions.

    Ties are part of it: beliefs are one of nine numbers.
    """
    ordered = np.sort(np.array(beliefs))
    allowed = (len(beliefs) + 1) * (1 - Fraction(coverage))
    # The k-th smallest has fewer than k below it; with ties, fewer still.
    candidates = [0.0] + [value for place, value in enumerate(ordered.tolist(), start=1) if place <= allowed]
    assert find_least_belief(ordered, float(coverage)) == max(candidates)


@pytest.mark.parametrize(
    ("images", "coverage", "left"), [(999, 0.9, 100), (999, 0.95, 50), (1000, 0.99, 10), (99, 0.3, 70)]
)
def test_shares_are_decimal(images, coverage, left):
    """(1 − 0.9) · 1000 is 99.99999999999997 in binary."""
    assert count_left_out(images, coverage) == left


def test_so_high_a_coverage_that_no_image_may_be_left_out_gives_all_labels():
    sets = LabelSets.fit(*draw_images(1000, seed=0))
    assert sets.select(draw_images(5, seed=1)[0], 0.9999).all()


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95])
def test_a_new_image_is_covered_as_often_as_promised(coverage):
    """Many small calibrations, a new image each: covered images are binomial with the exact probability."""
    images, trials, rng = 39, 4000, np.random.default_rng(0)
    drawn = rng.random((trials, images + 1))
    covered = sum(row[-1] >= find_least_belief(np.sort(row[:-1]), coverage) for row in drawn)
    share = 1 - count_left_out(images, coverage) / (images + 1)
    low, high = binom(trials, share).ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2])
    assert share >= coverage
    assert low <= covered <= high


@pytest.mark.parametrize("coverage", [0.9, 0.95, 0.99])
def test_sets_of_an_overconfident_model_cover(coverage):
    """One calibration: covered images are beta-binomial."""
    probabilities, is_right = draw_images(1500, seed=2)
    new, right = draw_images(5000, seed=3)
    sets = LabelSets.fit(probabilities, is_right).select(new, coverage)
    left = count_left_out(1500, coverage)
    low, high = betabinom(5000, 1501 - left, left).ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2])
    assert low <= (sets & right).any(axis=1).sum() <= high
    assert (new[right] > 1 - coverage).mean() < coverage - 0.01  # its own probabilities would not have covered


def test_ties_cover_at_least():
    """A model with few different outputs: coverage may only be too high."""
    rng = np.random.default_rng(4)
    probabilities = np.full((3000, 4), 0.1, np.float32)
    probabilities[np.arange(3000), rng.integers(4, size=3000)] = 0.7
    is_right = np.eye(4, dtype=bool)[rng.integers(4, size=3000)]
    sets = LabelSets.fit(probabilities[:1000], is_right[:1000])
    assert sets.select(probabilities[1000:], 0.9).all()  # whatever is as likely as a label inside is inside too
    assert sets.find_threshold(0.9) == np.float32(0.1)


def test_no_set_is_empty_and_a_sure_model_gives_one_label():
    probabilities = np.full((1000, 3), 0.3, np.float32)
    probabilities[:, 1] = 0.4
    is_right = np.zeros((1000, 3), bool)
    is_right[:, 1] = True
    sets = LabelSets.fit(probabilities, is_right)
    assert sets.select(np.array([[0.34, 0.33, 0.33], [0.2, 0.2, 0.6]], np.float32), 0.95).tolist() == [
        [True, False, False],
        [False, False, True],
    ]
    equal = measure_beliefs(np.array([[0.5, 0.5]], np.float32))
    assert equal.tolist() == [[1.0, 0.5]]


def test_an_image_with_several_right_labels_counts_by_the_likeliest():
    probabilities, is_right = draw_images(1000, seed=5)
    either = is_right | np.roll(is_right, 1, axis=1)
    one, several = LabelSets.fit(probabilities, is_right), LabelSets.fit(probabilities, either)
    expected = np.sort(np.where(either, measure_beliefs(probabilities), 0).max(axis=1))
    assert several.beliefs.values.tolist() == expected.astype(np.float64).tolist()
    assert several.find_threshold(0.9) > one.find_threshold(0.9)


def test_fewer_than_a_thousand_images_are_refused():
    with pytest.raises(ConfigError, match="at least 1,000 images that chose nothing, and there are 999"):
        LabelSets.fit(*draw_images(999, seed=0))


@pytest.mark.parametrize(
    ("coverage", "hint"), [(95, "did you mean 0.95"), (0, "between 0 and 1"), (1, "between"), (-1, "between")]
)
def test_what_is_no_share(coverage, hint):
    with pytest.raises(ConfigError, match=hint):
        LabelSets.fit(*draw_images(1000, seed=0)).find_threshold(coverage)


def test_the_check_over_halvings_is_what_halving_gives():
    probabilities, is_right = draw_images(400, seed=6)
    found = check_sets(probabilities, is_right, 0.9, splits=1, seed=7)
    order = np.random.default_rng(7).permutation(400)
    beliefs = measure_beliefs(probabilities)
    right = beliefs[is_right]
    threshold = sorted(right[order[:200]])[20 - 1]  # ⌊201 · 0.1⌋ = 20
    sizes = (beliefs[order[200:]] >= threshold).sum(axis=1)
    assert found.reached == (right[order[200:]] >= threshold).mean()
    assert (found.size, found.alone) == (sizes.mean(), (sizes == 1).mean())
