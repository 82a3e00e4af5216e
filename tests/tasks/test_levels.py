"""Levels: their order, cumulative probabilities that never contradict each other, and metrics as scikit-learn's."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from sklearn.metrics import accuracy_score, balanced_accuracy_score, cohen_kappa_score, mean_absolute_error
from torch.nn import functional as F

from vitrail.errors import DataError
from vitrail.tasks.level_order import sort_levels
from vitrail.tasks.levels import LEVEL, Levels
from vitrail.tasks.number_metrics import estimate_kappa

TASK = Levels(names=("1", "2", "3", "10"), column="stars")


@pytest.mark.parametrize(
    ("cells", "names"),
    [
        (["10", "2", "", "1", None, "2"], ("1", "2", "10")),
        ([4.0, "4", "4.0", 3, math.nan, -1.5], ("-1.5", "3", "4")),
        (["3 bad", "1 good", "2 fair"], ("1 good", "2 fair", "3 bad")),
        (["4-6 years", "10+ years", "0-3 years"], ("0-3 years", "4-6 years", "10+ years")),
    ],
)
def test_levels_are_sorted_by_their_numbers(cells, names):
    assert Levels.learn({"stars": cells}) == Levels(names=names, column="stars")


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"size": ["small", "large"]}, "the levels of size have no clear order: large, small; begin each with"),
        ({"size": ["1 small", "1 tiny"]}, "no clear order"),
        ({"size": ["3", "3.0", ""]}, "size has 1 levels: give 2 to 100"),
        ({"size": [""]}, "size has 0 levels: give 2 to 100, or fill it"),
        ({"size": [str(number) for number in range(200)]}, "or learn them as numbers"),
        ({"a": ["1"], "b": ["2"]}, "one column, not in a, b"),
    ],
)
def test_levels_without_a_clear_order_are_refused(columns, sentence):
    with pytest.raises(DataError, match=sentence):
        Levels.learn(columns)


def test_cells_become_places_in_the_order():
    assert [TASK.encode({"stars": cell})[LEVEL] for cell in ("1", 10, "10.0", " 3 ", "", None)] == [0, 3, 3, 2, -1, -1]
    assert TASK.encode({})[LEVEL] == -1
    with pytest.raises(DataError, match="stars is '5', which is no level: the levels are 1, 2, 3, 10"):
        TASK.encode({"stars": 5})
    assert TASK.allocate(2)[LEVEL].tolist() == [-1, -1]
    assert TASK.stratify({LEVEL: np.array([0, 3, -1])}).tolist() == [0, 3, -1]
    assert sort_levels("a", ["−2", "1"]) == ("−2", "1")


LEVELS_OF_FIVE = torch.tensor([0, 3, 1, -1, 2])
OUTPUTS_OF_FIVE = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def loss_of_one(outputs: list[float], level: int) -> float:
    """The loss of an image by hand: −log of the probability of each right answer to "above level k?"."""
    if level < 0:
        return 0.0
    shares = [1 / (1 + math.exp(-output)) for output in outputs]
    return sum(-math.log(share if level > k else 1 - share) for k, share in enumerate(shares)) / len(outputs)


def test_the_loss_is_that_of_a_loop_and_its_gradient_right():
    found = TASK.compute_losses(OUTPUTS_OF_FIVE, {LEVEL: LEVELS_OF_FIVE})
    expected = [loss_of_one(*pair) for pair in zip(OUTPUTS_OF_FIVE.tolist(), LEVELS_OF_FIVE.tolist(), strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    outputs = OUTPUTS_OF_FIVE.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda each: TASK.compute_losses(each, {LEVEL: LEVELS_OF_FIVE}), outputs)


def test_training_shows_how_far_off_answers_are():
    outputs = torch.tensor([[2.0, 1, -1], [2.0, 1, -1], [-1.0, -1, -1], [0.0, 0, 0]])
    counted = TASK.count(outputs, {LEVEL: torch.tensor([2, 0, 3, -1])})
    np.testing.assert_array_equal(counted["level-error"], [0, 2, 3, np.nan])
    np.testing.assert_array_equal(counted["level-accuracy"], [1, 0, 0, np.nan])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-30, 30, width=32), min_size=3, max_size=3))
def test_probabilities_are_never_negative_and_sum_to_one(outputs):
    values = TASK.activate(torch.tensor(outputs))
    assert values.shape == (4,)
    assert (values >= 0).all()
    assert float(values.sum()) == pytest.approx(1, abs=1e-5)
    # Where outputs do not contradict each other, they are what the model said.
    descending = torch.tensor(sorted(outputs, reverse=True))
    above = 1 - TASK.activate(descending).cumsum(0)[:-1]
    torch.testing.assert_close(above, descending.sigmoid(), atol=1e-5, rtol=0)


def test_the_median_level_is_the_answer():
    values = np.array([0.45, 0.1, 0.05, 0.4], np.float32)  # the likeliest level is the first
    answer = json.loads(json.dumps(TASK.answer(values)))
    assert answer == {
        "level": "2",
        "probabilities": {n: pytest.approx(v) for n, v in zip(TASK.names, values, strict=True)},
    }
    assert [(line.name, line.is_chosen) for line in TASK.describe(values, top=3)] == [
        ("2", True),
        ("1", False),
        ("10", False),
    ]
    assert TASK.flatten(values) == {"level": "2", "probability": pytest.approx(0.1)}
    assert TASK.decide(np.eye(4)).tolist() == [0, 1, 2, 3]
    assert TASK.compare(np.eye(4), np.roll(np.eye(4), 1, axis=1) * [0, 1, 1, 1] + np.eye(4) / 100) == 0.25


def make_values(count: int = 200) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    truth = rng.integers(0, 4, count)
    outputs = torch.from_numpy((truth[:, None] > np.arange(3)) * 3.0 - 1.5 + rng.normal(0, 2, (count, 3)))
    truth[:20] = -1
    return TASK.activate(outputs).numpy(), truth


def test_metrics_are_those_of_sklearn_and_scipy():
    values, targets = make_values()
    found = TASK.measure(values, {LEVEL: targets})
    measured = {measure.name: measure.estimate for measure in found.measures}
    truth, decided = targets[20:], TASK.decide(values[20:])
    oracles = {
        "quadratic kappa": cohen_kappa_score(truth, decided, weights="quadratic"),
        "accuracy": accuracy_score(truth, decided),
        "balanced accuracy": balanced_accuracy_score(truth, decided),
        "MAE in levels": mean_absolute_error(truth, decided),
        "Spearman of the mean level": spearmanr(truth, values[20:] @ np.arange(4)).statistic,
    }
    assert measured.keys() == oracles.keys()
    for name, oracle in oracles.items():
        assert measured[name].value == pytest.approx(oracle)
        assert measured[name].low < measured[name].value < measured[name].high
    for level, row in enumerate(found.tables["levels"][1:]):
        here = decided[truth == level]
        assert row == [TASK.names[level], len(here), (here == level).mean(), (abs(here - level) < 2).mean()]


def test_kappa_is_unknown_if_all_levels_are_the_same():
    same = np.ones(9, np.int64)
    assert math.isnan(estimate_kappa(same, same, 4).value)
    nothing = TASK.measure(np.full((2, 4), 0.25), {LEVEL: np.array([-1, -1])})
    assert all(math.isnan(measure.estimate.value) for measure in nothing.measures)


def test_two_levels_are_a_yes_or_no():
    task, outputs = Levels(names=("0", "1")), torch.tensor([[1.5], [-2.0]])
    torch.testing.assert_close(task.activate(outputs)[:, 1], outputs[:, 0].sigmoid())
    losses = F.binary_cross_entropy_with_logits(outputs[:, 0], torch.tensor([1.0, 0.0]), reduction="none")
    torch.testing.assert_close(task.compute_losses(outputs, {LEVEL: torch.tensor([1, 0])}), losses)
