"""Scores of unknown images against references in float64 and by scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from sklearn.covariance import ledoit_wolf
from sklearn.neighbors import NearestNeighbors

from vitrail.errors import ConfigError, WeightsError
from vitrail.reliability.space import NeighbourSpace, estimate_covariance
from vitrail.reliability.unknown import UnknownScore, describe_familiarity, measure_auroc

FALSE_ALARM = 1e-6


def draw_rows(count: int, seed: int, width: int = 12) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(0).normal(size=(width, width)) * np.geomspace(1, 0.01, width)
    return (3 + rng.normal(size=(count, width)) @ mixing.T).astype(np.float32)


def test_softmax_and_energy_in_float64():
    logits = np.random.default_rng(1).normal(size=(200, 7)).astype(np.float32) * 30
    softmax, energy = (UnknownScore.fit(kind, logits, None).measure(logits, None) for kind in ("softmax", "energy"))
    for row, one, other in zip(logits.astype(np.float64), softmax, energy, strict=True):
        total = math.fsum(math.exp(value - max(row)) for value in row)
        assert one == pytest.approx(math.log(total), rel=1e-12, abs=1e-15)
        assert other == pytest.approx(-max(row) - math.log(total), rel=1e-12)


def test_huge_logits_do_not_overflow():
    score = UnknownScore.fit("energy", np.random.default_rng(1).normal(size=(100, 3)), None)
    assert score.measure(np.array([[3e4, 0, -3e4]]), None).tolist() == [-3e4]


@pytest.mark.parametrize("k", [1, 10, 400])
def test_distances_are_those_of_scikit_learn(k):
    space = NeighbourSpace(draw_rows(60, seed=1))
    queries = draw_rows(1100, seed=2)  # more than a block
    search = NearestNeighbors(n_neighbors=min(k, 60), algorithm="brute").fit(space.rows)
    expected = search.kneighbors(space.place(queries))[0][:, -1]
    np.testing.assert_allclose(space.measure_distances(queries, k), expected, rtol=1e-9, atol=1e-9)


def test_the_space_is_direction_and_whitened_value_at_one_scale():
    rows = draw_rows(300, seed=3)
    space = NeighbourSpace(rows)
    whitened, direction = np.split(space.rows, 2, axis=1)
    for part in (whitened, direction):
        squares = ((part[:, None] - part[None]) ** 2).sum(axis=-1)
        assert squares.mean() == pytest.approx(1, rel=1e-9)
    longer = np.split(space.place(2 * rows), 2, axis=1)
    np.testing.assert_allclose(longer[1], direction, atol=1e-12)
    assert np.median(np.abs(longer[0] - whitened)) > 0.1
    # The covariance of whitened values is a multiple of one, but for what is drawn towards a sphere.
    spread = np.cov(whitened.T)
    assert np.abs(spread - np.diag(np.diag(spread))).max() < 0.02 * np.diag(spread).max()


@pytest.mark.parametrize(("count", "width"), [(50, 12), (8, 12), (300, 5)])
def test_the_covariance_is_that_of_ledoit_and_wolf(count, width):
    rows = draw_rows(count, seed=4, width=width).astype(np.float64)
    np.testing.assert_allclose(estimate_covariance(rows), ledoit_wolf(rows)[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rows", [np.zeros((60, 4)), np.ones((60, 4))])
def test_a_bank_of_equal_rows_gives_numbers(rows):
    assert np.isfinite(NeighbourSpace(rows).measure_distances(np.eye(4), 3)).all()


@settings(max_examples=50)
@given(
    known=st.lists(st.integers(0, 5), min_size=1, max_size=20),
    unknown=st.lists(st.integers(0, 5), min_size=1, max_size=20),
)
def test_auroc_with_ties(known, unknown):
    pairs = [(other > one) + (other == one) / 2 for one in known for other in unknown]
    expected = sum(pairs) / len(pairs)
    assert measure_auroc(np.array(known, float), np.array(unknown, float)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["softmax", "energy", "neighbours"])
def test_known_images_are_called_unknown_no_more_often_than_accepted(kind):
    """Many fits, and one new image each: the promise holds exactly, also for a bank of as few rows as columns."""
    alarms, trials = 0, 200
    for trial in range(trials):
        rows = draw_rows(101, seed=100 + trial)
        score = UnknownScore.fit(kind, rows[:100], rows[:100], accepted=0.8)
        alarms += score.judge(score.measure(rows[100:], rows[100:])[0]).is_unknown
    assert alarms <= binom(trials, 0.2).ppf(1 - FALSE_ALARM)
    assert alarms >= binom(trials, 0.15).ppf(FALSE_ALARM)  # nor hardly ever


def test_the_share_counts_known_images_that_look_as_strange():
    logits = np.linspace(1, 100, 100)[:, None]  # one output: the energy is minus it
    score = UnknownScore.fit("energy", logits, None)
    assert score.judge(-100.5).share == 1.0
    assert score.judge(-1.0).share == 2 / 101  # the image itself, and the one that is as strange
    assert score.judge(-0.5) == (True, 1 / 101, -0.5)
    assert [score.judge(-value).is_unknown for value in (4.0, 5.0)] == [True, False]
    assert describe_familiarity(score.judge(-1.0)) == {"unknown": True, "known_share": 0.019802}


def test_too_few_images_and_another_width_are_refused():
    with pytest.raises(ConfigError, match="at least 100 known images that chose nothing, and there are 99"):
        UnknownScore.fit("softmax", np.zeros((99, 3)), None)
    score = UnknownScore.fit("neighbours", None, draw_rows(100, seed=1))
    with pytest.raises(WeightsError, match="5 numbers, and those that it is compared with have 12"):
        score.measure(None, np.zeros((1, 5)))


def test_the_images_of_the_bank_do_not_judge():
    rows = draw_rows(150, seed=5)
    score = UnknownScore.fit("neighbours", None, rows)
    assert score.bank is not None
    assert (score.bank.shape, score.images) == ((75, 12), 75)
    np.testing.assert_array_equal(score.bank.values, rows[:75].astype(np.float64))
    np.testing.assert_allclose(np.sort(score.measure(None, rows[75:])), score.known.values, rtol=1e-6)
