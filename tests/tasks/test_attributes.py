"""Attributes: a softmax for each column, unknown cells, and accuracies as scikit-learn computes them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score

from vitrail.errors import ConfigError, DataError
from vitrail.system.intervals import wilson_interval
from vitrail.tasks.attributes import ATTRIBUTES, Attributes
from vitrail.tasks.recalls import estimate_balanced_accuracy, estimate_mean_accuracy
from vitrail.tasks.task import estimate_by_resampling

TASK = Attributes(names=("colour", "shape"), values=(("blue", "green", "red"), ("ring", "square")))


def test_the_values_of_each_column_are_learned():
    columns = {"colour": ["red", "", " blue", "green", ["red"]], "shape": ["ring", "square", None, "ring", "ring"]}
    assert Attributes.learn(columns) == TASK
    assert Attributes.learn({"year": [1990, 1991.0, "1991"], "same": [True, None, True]}).values == (
        ("1990", "1991"),
        ("True",),
    )


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"colour": ["red"], "shape": ["", None]}, "the column shape has no value in any row"),
        ({"colour": ["red", "red"], "shape": ["ring", ""]}, "colour is always red, shape is always ring"),
        ({"colour": [["red", "blue"]]}, "several names of an image are tags"),
    ],
)
def test_columns_that_teach_nothing_are_refused(columns, sentence):
    with pytest.raises(DataError, match=sentence):
        Attributes.learn(columns)


def test_cells_become_places_and_empty_ones_unknown():
    assert TASK.encode({"colour": "red", "shape": ""})[ATTRIBUTES].tolist() == [2, -1]
    assert TASK.encode({"shape": " square"})[ATTRIBUTES].tolist() == [-1, 1]
    with pytest.raises(DataError, match="colour is 'gren', which is none of its values, did you mean 'green'"):
        TASK.encode({"colour": "gren", "shape": "ring"})
    assert TASK.allocate(2)[ATTRIBUTES].tolist() == [[-1, -1], [-1, -1]]
    with pytest.raises(ConfigError, match="2 columns and the values of 1"):
        Attributes(names=("a", "b"), values=(("c",),))


def test_images_are_grouped_by_their_rarest_value():
    places = np.array([[0, 0], [0, 0], [0, 1], [2, 0], [-1, 1], [-1, -1], [2, -1], [0, 1]])
    # There are 4 blue, 2 red, 3 rings and 3 squares.
    assert TASK.stratify({ATTRIBUTES: places}).tolist() == [3, 3, 4, 2, 4, -1, 2, 4]


PLACES = torch.tensor([[2, 0], [-1, 1], [0, -1], [-1, -1]])
OUTPUTS = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def loss_of_one(outputs: list[float], places: list[int]) -> float:
    """The loss of an image by hand."""
    total = 0.0
    for part, place in zip((outputs[:3], outputs[3:]), places, strict=True):
        if place >= 0:
            total -= math.log(math.exp(part[place]) / sum(map(math.exp, part)))
    return total / 2


def test_the_loss_is_that_of_a_loop_and_its_gradient_right():
    found = TASK.compute_losses(OUTPUTS, {ATTRIBUTES: PLACES})
    expected = [loss_of_one(*pair) for pair in zip(OUTPUTS.tolist(), PLACES.tolist(), strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    outputs = OUTPUTS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda each: TASK.compute_losses(each, {ATTRIBUTES: PLACES}), outputs)


def test_training_shows_the_share_of_known_columns_that_are_right():
    outputs = torch.tensor([[0.0, 0, 9, 9, 0]] * 4)
    counted = TASK.count(outputs, {ATTRIBUTES: torch.tensor([[2, 0], [2, 1], [-1, 1], [-1, -1]])})
    np.testing.assert_array_equal(counted["attribute-accuracy"], [1, 0.5, 0, np.nan])


def test_answers_name_a_value_for_each_column():
    assert TASK.output_names == ("colour: blue", "colour: green", "colour: red", "shape: ring", "shape: square")
    values = TASK.activate(torch.tensor([0.0, 0, 2, 1, -1])).numpy()
    shares = math.exp(2) / (2 + math.exp(2)), 1 / (1 + math.exp(-2))
    assert json.loads(json.dumps(TASK.answer(values))) == {
        "attributes": {
            "colour": {"value": "red", "probability": pytest.approx(shares[0])},
            "shape": {"value": "ring", "probability": pytest.approx(shares[1])},
        }
    }
    assert [line[:2] for line in TASK.describe(values, top=1)] == [("colour: red", "78.7%"), ("shape: ring", "88.1%")]
    assert TASK.flatten(values)["shape"] == "ring"
    assert TASK.compare(values[None].repeat(4, 0), np.stack([values, values, values[::-1], values])) == 0.75


def test_columns_with_the_names_of_others_probabilities_answer_for_themselves():
    task = Attributes(names=("x", "x probability"), values=(("a", "b"), ("c", "d")))
    values = task.activate(torch.tensor([0.0, 1, 2, 0])).numpy()
    answers = task.answer(values)["attributes"]
    assert {name: each["value"] for name, each in answers.items()} == {"x": "b", "x probability": "c"}
    assert all(0 < each["probability"] < 1 for each in answers.values())
    flat = task.flatten(values)
    assert (flat["x"], flat["x probability"], len(flat)) == ("b", "c", 4)
    assert [type(cell) for cell in flat.values()] == [str, float, str, float]


def make_values(count: int = 300) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    places = np.stack([rng.choice(3, count, p=(0.7, 0.2, 0.1)), rng.integers(0, 2, count)], axis=1)
    outputs = rng.normal(size=(count, 5))
    outputs[np.arange(count), places[:, 0]] += 1
    outputs[np.arange(count), 3 + places[:, 1]] += 1
    places[rng.random(places.shape) < 0.1] = -1
    return TASK.activate(torch.from_numpy(outputs)).numpy(), places


def test_metrics_are_those_of_sklearn():
    values, places = make_values()
    found = TASK.measure(values, {ATTRIBUTES: places})
    measured = {measure.name: measure.estimate for measure in found.measures}
    accuracies = []
    for column, (name, guess) in enumerate((("colour", values[:, :3].argmax(1)), ("shape", values[:, 3:].argmax(1)))):
        is_known = places[:, column] >= 0
        truth, decided = places[is_known, column], guess[is_known]
        accuracies.append(accuracy_score(truth, decided))
        assert measured[f"accuracy of {name}"].value == pytest.approx(accuracies[-1])
        hits = int((truth == decided).sum())
        assert measured[f"accuracy of {name}"][1:] == wilson_interval(hits, len(truth))
        balanced = measured[f"balanced accuracy of {name}"]
        assert balanced.value == pytest.approx(balanced_accuracy_score(truth, decided))
        assert balanced.low < balanced.value < balanced.high
        for place, row in enumerate(found.tables[name][1:]):
            here = decided[truth == place]
            assert row == [TASK.values[column][place], len(here), (here == place).mean()]
    assert found.measures[0].name == "mean accuracy"
    assert measured["mean accuracy"].value == pytest.approx(np.mean(accuracies))


def test_a_column_without_known_cells_gives_no_estimate():
    values, places = make_values(20)
    places[:, 0] = -1
    measured = {each.name: each.estimate.value for each in TASK.measure(values, {ATTRIBUTES: places}).measures}
    assert math.isnan(measured["accuracy of colour"])
    assert math.isnan(measured["balanced accuracy of colour"])
    assert measured["mean accuracy"] == measured["accuracy of shape"]
    places[:] = -1
    assert all(math.isnan(each.estimate.value) for each in TASK.measure(values, {ATTRIBUTES: places}).measures)


@pytest.mark.parametrize(("recalls", "other", "count"), [((0.9, 0.6, 0.75), 0.4, 200), ((0.98, 0.98, 0.98), 0.98, 60)])
def test_intervals_cover_the_truth_of_the_population(recalls, other, count):
    """Hits with planted recalls in classes of different sizes, and a second column that the same images are hard in."""
    rng, covered, trials = np.random.default_rng(0), [0, 0], 200
    sizes = np.array([0.6, 0.2, 0.2])
    for _ in range(trials):
        truth, ease = rng.choice(3, count, p=sizes), rng.random(count)
        hits = ease < np.array(recalls)[truth]
        both = estimate_mean_accuracy(np.stack([hits, ease < other], 1), np.ones((count, 2), bool))
        balanced = estimate_balanced_accuracy(truth, hits, 3)
        pairs = [(balanced, np.mean(recalls)), (both, (recalls @ sizes + other) / 2)]
        for place, (found, planted) in enumerate(pairs):
            covered[place] += found.low <= planted <= found.high
    for found in covered:
        assert found / trials >= 0.9
        assert count < 100 or found / trials <= 0.995, "it is not just wide"


def test_the_interval_of_a_mean_of_columns_is_that_of_one_where_they_are_the_same():
    hits = np.arange(100)[:, None] < 80
    one, two = (
        estimate_mean_accuracy(hits.repeat(columns, axis=1), np.ones((100, columns), bool)) for columns in (1, 2)
    )
    assert one == pytest.approx(two)
    assert one == pytest.approx((0.8, *wilson_interval(80, 100)), abs=0.01)


def test_a_perfect_result_on_few_images_is_not_certain():
    for estimate in (
        estimate_mean_accuracy(np.ones((5, 2), bool), np.ones((5, 2), bool)),
        estimate_balanced_accuracy(np.array([0, 1, 1, 0, 1]), np.ones(5, bool), 2),
        estimate_by_resampling(lambda rows: 1.0, 5),
    ):
        assert (estimate.value, estimate.high) == (1, 1)
        assert 0.3 < estimate.low < 0.7
