"""Numbers: what is learned from cells, the loss, and metrics as scikit-learn and SciPy compute them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from sklearn.metrics import mean_absolute_error, r2_score

from vitrail.errors import ConfigError, DataError
from vitrail.tasks.number_metrics import RankCorrelation, estimate_r2, estimate_spearman, group_by_rank
from vitrail.tasks.numbers import NUMBERS, Numbers, format_number

TASK = Numbers(names=("age", "price"), means=(40.0, 3000.0), deviations=(12.0, 800.0))
ONE = Numbers(names=("age",), means=(40.0,), deviations=(12.0,))
NAN = math.nan


def test_the_mean_and_the_deviation_are_learned_from_the_cells_that_are_numbers():
    task = Numbers.learn({"age": ["30", 50, "", None, " 40 ", "nan", "about 3"], "size": [1.5, 1.5, 1.5, "1.5"]})
    assert task.names == ("age", "size")
    assert task.means == (40.0, 1.5)
    assert task.deviations == (pytest.approx(np.std([30, 50, 40])), 1.0)


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"age": ["7", 7.0, ""]}, "age is always 7"),
        ({"age": [0.1] * 3, "size": [2, 2]}, "age is always 0.1, size is always 2"),
        ({"age": ["", None]}, "the column age has no number in any row"),
        ({"age": ["old", "young"]}, "age is 'old', which is no number"),
        ({"time": [1.7e9 + k for k in range(20)]}, r"time are as large as 1.7e\+09 .*subtract 1.7e\+09 from all"),
    ],
)
def test_columns_that_teach_nothing_are_refused(columns, sentence):
    with pytest.raises(DataError, match=sentence):
        Numbers.learn(columns)


def test_cells_become_numbers_and_empty_ones_nan():
    np.testing.assert_array_equal(TASK.encode({"age": "34.5", "price": ""})[NUMBERS], [34.5, NAN])
    np.testing.assert_array_equal(TASK.encode({"price": 7})[NUMBERS], np.array([NAN, 7], np.float32))
    for wrong in ("inf", "-1e31", "1,5", True, [3]):
        with pytest.raises(DataError, match="age is"):
            TASK.encode({"age": wrong, "price": 1})
    assert np.isnan(TASK.allocate(3)[NUMBERS]).all()
    assert TASK.allocate(3)[NUMBERS].shape == (3, 2)


def test_a_record_that_is_not_whole_is_refused():
    for fields in ({"means": (1.0,)}, {"deviations": (1.0, 0.0)}, {"means": (1.0, NAN)}, {"names": ()}):
        with pytest.raises(ConfigError):
            Numbers(**{**TASK.model_dump(), **fields})


def loss_of_one(outputs: list[float], numbers: list[float]) -> float:
    """The loss of an image by hand."""
    total = 0.0
    for output, number, mean, deviation in zip(outputs, numbers, TASK.means, TASK.deviations, strict=True):
        distance = abs(output - (number - mean) / deviation)
        if not math.isnan(distance):
            total += distance**2 / 2 if distance < 1 else distance - 0.5
    return total / len(outputs)


NUMBERS_OF_FOUR = torch.tensor([[34.0, 2500], [NAN, 9000], [70, NAN], [NAN, NAN]], dtype=torch.float64)
OUTPUTS_OF_FOUR = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_the_loss_is_that_of_a_loop_and_its_gradient_right():
    found = TASK.compute_losses(OUTPUTS_OF_FOUR, {NUMBERS: NUMBERS_OF_FOUR})
    expected = [loss_of_one(*pair) for pair in zip(OUTPUTS_OF_FOUR.tolist(), NUMBERS_OF_FOUR.tolist(), strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert expected[1] > 1  # beyond a deviation too
    outputs = OUTPUTS_OF_FOUR.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda each: TASK.compute_losses(each, {NUMBERS: NUMBERS_OF_FOUR}), outputs)


def test_training_shows_the_error_in_units_of_one_column():
    outputs = torch.tensor([[0.5], [1.0], [0.0]])
    counted = ONE.count(outputs, {NUMBERS: torch.tensor([[40.0], [28.0], [NAN]])})["MAE"]
    np.testing.assert_allclose(counted, [6, 24, NAN])
    counted = TASK.count(OUTPUTS_OF_FOUR, {NUMBERS: NUMBERS_OF_FOUR})["standardised-MAE"]
    assert counted[1] == abs(OUTPUTS_OF_FOUR[1, 1] - 7.5)
    assert counted[3].isnan()


def test_values_are_in_units_of_the_data_and_answers_name_them():
    values = TASK.activate(torch.tensor([[-0.5, 1.0], [0.0, 0.0]])).numpy()
    np.testing.assert_allclose(values, [[34, 3800], [40, 3000]])
    assert json.loads(json.dumps(TASK.answer(values[0]))) == {"numbers": {"age": 34.0, "price": 3800.0}}
    assert TASK.flatten(values[1]) == {"age": 40.0, "price": 3000.0}
    assert [line[:3] for line in TASK.describe(values[0], top=1)] == [("age", "34.0", None), ("price", "3800", None)]


@pytest.mark.parametrize(
    ("number", "deviation", "text"),
    [
        (34.2345, 12.3, "34.2"),
        (3012.4, 800, "3012"),
        (0.0123456, 0.004, "0.01235"),
        (-0.001, 10, "0.0"),
        (1.23456e-9, 1e-9, "1.235e-09"),
        (2.5e20, 1e20, "2.5e+20"),
    ],
)
def test_numbers_are_shown_with_the_digits_that_tell(number, deviation, text):
    assert format_number(number, deviation) == text


def make_guesses(count: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Numbers with ties and gaps, and guesses that are near."""
    rng = np.random.default_rng(3)
    numbers = np.stack([rng.integers(20, 60, count), rng.gamma(2.0, 1500, count)], axis=1).astype(np.float32)
    values = numbers + rng.normal(0, [5, 900], (count, 2))
    numbers[rng.random((count, 2)) < 0.1] = np.nan
    return values, numbers


def test_metrics_are_those_of_sklearn_and_scipy():
    values, numbers = make_guesses()
    found = TASK.measure(values, {NUMBERS: numbers})
    measured = {measure.name: measure.estimate for measure in found.measures}
    for column, name in enumerate(TASK.names):
        is_known = ~np.isnan(numbers[:, column])
        truth, guess = numbers[is_known, column].astype(np.float64), values[is_known, column]
        oracles = mean_absolute_error(truth, guess), r2_score(truth, guess), spearmanr(truth, guess).statistic
        for metric, oracle in zip(("MAE", "R²", "Spearman"), oracles, strict=True):
            estimate = measured[f"{metric} of {name}"]
            assert estimate.value == pytest.approx(oracle, rel=1e-9)
            assert estimate.low < estimate.value < estimate.high
        row = next(row for row in found.tables["numbers"] if row[0] == name)
        assert row[1:] == [is_known.sum(), *map(pytest.approx, oracles)]
    assert [measure.name for measure in ONE.measure(values[:, :1], {NUMBERS: numbers[:, :1]}).measures] == [
        "MAE",
        "R²",
        "Spearman",
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-2, 2)), min_size=3, max_size=30), st.integers(0, 99))
def test_ranks_with_many_ties_and_repeated_images_are_those_of_scipy(pairs, seed):
    first, second = np.array(pairs, float).T
    rows = np.random.default_rng(seed).integers(len(pairs), size=len(pairs))
    found = RankCorrelation(first, second).compute(rows)
    if min(len(set(first[rows])), len(set(second[rows]))) < 2:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(spearmanr(first[rows], second[rows]).statistic, abs=1e-12)


def test_unknown_columns_and_too_few_images_give_no_estimate():
    nothing = TASK.measure(np.zeros((2, 2)), {NUMBERS: np.full((2, 2), np.nan, np.float32)})
    assert all(math.isnan(measure.estimate.value) for measure in nothing.measures)
    one = ONE.measure(np.zeros((1, 1)), {NUMBERS: np.ones((1, 1), np.float32)})
    assert [measure.estimate.value for measure in one.measures[:1]] == [1.0]
    assert all(math.isnan(measure.estimate.value) for measure in one.measures[1:])


def test_intervals_cover_the_truth_of_the_population():
    """Numbers y = x + noise of equal variance: R² of the guess x is 1/2, and Spearman's 6/π asin(√½ / 2)."""
    rng, covered, trials = np.random.default_rng(0), [0, 0], 80
    truths = 0.5, 6 / math.pi * math.asin(math.sqrt(0.5) / 2)
    for _ in range(trials):
        guess = rng.normal(size=120)
        numbers = guess + rng.normal(size=120)
        estimates = estimate_r2(numbers, guess, 150), estimate_spearman(numbers, guess, 150)
        covered = [
            count + (each.low <= truth <= each.high)
            for count, each, truth in zip(covered, estimates, truths, strict=True)
        ]
    for count in covered:
        assert 0.88 <= count / trials <= 0.995  # 0.95, with room for the draw and for 150 resamples


def test_groups_hold_a_tenth_each_and_the_unknown_are_one_of_their_own():
    numbers = np.append(np.random.default_rng(0).permutation(100).astype(float), [np.nan] * 3)
    groups = group_by_rank(numbers)
    assert np.bincount(groups + 1).tolist() == [3] + [10] * 10
    assert (np.diff(groups[:100][np.argsort(numbers[:100])]) >= 0).all()
    strata = TASK.stratify({NUMBERS: np.array([[40, NAN], [NAN, NAN], [20, 2000], [70, 9000]], np.float32)})
    assert strata[1] == -1
    assert -1 < strata[2] < strata[0] < strata[3] < 10
    assert len(set(group_by_rank(np.full(7, 3.0)))) == 1


def test_exports_agree_by_tenths_of_a_deviation():
    values = np.array([[34.0, 3000], [20, 1000], [50, 2000], [1, 1]])
    moved = values + np.array([[1.1, 70], [1.3, 0], [0, 81], [0, 0]])
    assert TASK.compare(values, moved) == 0.5
