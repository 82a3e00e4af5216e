"""Tags: how they are read, the loss, thresholds, and metrics as scikit-learn computes them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score

from vitrail.errors import ConfigError, DataError
from vitrail.tasks.tag_metrics import AveragePrecision, choose_threshold
from vitrail.tasks.tags import TAGS, Tags
from vitrail.tasks.task import estimate_by_resampling

TASK = Tags(names=("cat", "dog", "indoor"), column="tags")


@pytest.mark.parametrize(
    "cells", [["indoor|cat", "", "dog|"], ['["indoor", "cat"]', "[]", '["dog"]'], [["indoor", "cat"], None, ("dog",)]]
)
def test_a_column_of_tags_has_three_spellings(cells):
    task = Tags.learn({"tags": cells})
    assert task == TASK
    found = np.stack([task.encode({"tags": cell})[TAGS] for cell in cells])
    np.testing.assert_array_equal(found, [[1, 0, 1], [0, 0, 0], [0, 1, 0]])


def test_a_tag_may_have_a_column_of_its_own():
    task = Tags.learn({"dog": ["1", "0"], "cat": ["0", ""]})
    assert task.names == task.columns == ("dog", "cat")
    np.testing.assert_array_equal(task.encode({"dog": "yes", "cat": False})[TAGS], [1, 0])
    with pytest.raises(DataError, match="cat is '2': a tag with a column of its own is 1 or 0"):
        task.encode({"dog": 1, "cat": 2})


def test_a_cell_that_is_wrong_spoils_no_other():
    assert Tags.learn({"tags": ["indoor|cat", '["a', "dog"]}) == TASK
    with pytest.raises(DataError, match="is no list in JSON"):
        TASK.encode({"tags": '["cat"'})
    with pytest.raises(DataError, match="'cta' is no tag, did you mean 'cat'"):
        TASK.encode({"tags": "cta"})
    for cells, sentence in ((['["a'], "is no list in JSON"), (["", None], "has no tag in any row")):
        with pytest.raises(DataError, match=sentence):
            Tags.learn({"tags": cells})


def test_images_are_grouped_by_their_rarest_tag():
    tags = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 0, 1], [0, 0, 0]], np.float32)
    assert TASK.stratify({TAGS: tags}).tolist() == [0, 1, 2, 2, -1]


def loss_of_one(outputs: list[float], tags: list[float]) -> float:
    """The loss of an image by hand."""
    shares = [1 / (1 + math.exp(-output)) for output in outputs]
    return -sum(math.log(share if tag else 1 - share) for share, tag in zip(shares, tags, strict=True)) / len(tags)


def test_the_loss_is_that_of_a_loop_and_its_gradient_right():
    outputs = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tags = torch.tensor([[1.0, 0, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0]], dtype=torch.float64)
    found = TASK.compute_losses(outputs, {TAGS: tags}).detach()
    expected = [loss_of_one(*pair) for pair in zip(outputs.tolist(), tags.tolist(), strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert torch.autograd.gradcheck(lambda each: TASK.compute_losses(each, {TAGS: tags}), outputs)
    counted = TASK.count(outputs, {TAGS: (outputs > 0).double()})
    assert counted["tag-accuracy"].tolist() == [1.0] * 4


def make_values(count: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities with ties, and tags of which one is rare."""
    rng = np.random.default_rng(0)
    tags = (rng.random((count, 3)) < [0.5, 0.2, 0.04]).astype(np.float32)
    return np.round(np.clip(rng.random((count, 3)) * 0.7 + 0.3 * tags, 0, 1), 2), tags


def test_metrics_are_those_of_sklearn():
    values, tags = make_values()
    task = TASK.model_copy(update={"thresholds": (0.5, 0.45, 0.6)})
    found = task.measure(values, {TAGS: tags})
    measured = {measure.name: measure.estimate for measure in found.measures}
    decided = values.astype(np.float32) >= np.float32(task.thresholds)
    oracles = {
        "mAP": average_precision_score(tags, values, average="macro"),
        "macro F1": f1_score(tags, decided, average="macro"),
        "micro F1": f1_score(tags, decided, average="micro"),
    }
    for name, oracle in oracles.items():
        assert measured[name].value == pytest.approx(oracle)
        assert measured[name].low < measured[name].value < measured[name].high
    table = found.tables["tags, the hardest first"][1:]
    assert [row[2] for row in table] == sorted(row[2] for row in table)
    for name, images, precision, f1, threshold in table:
        k = task.names.index(name)
        assert images == tags[:, k].sum()
        assert precision == pytest.approx(average_precision_score(tags[:, k], values[:, k]))
        assert f1 == pytest.approx(f1_score(tags[:, k], decided[:, k]))
        assert threshold == task.thresholds[k]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), min_size=1, max_size=25), st.integers(0, 99))
def test_average_precision_of_resamples_is_that_of_sklearn(pairs, seed):
    truth, scores = np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs], float)
    rows = np.random.default_rng(seed).integers(len(pairs), size=len(pairs))
    found = AveragePrecision(truth[:, None], scores[:, None]).compute(rows)[0]
    if truth[rows].any():
        assert found == pytest.approx(average_precision_score(truth[rows], scores[rows]))
    else:
        assert math.isnan(found)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=20))
def test_no_threshold_has_a_better_f1(pairs):
    truth, scores = np.array([pair[0] for pair in pairs]), np.array([pair[1] / 9 for pair in pairs])
    chosen = choose_threshold(truth, scores)
    if not truth.any():
        assert chosen == 0.5
        return
    every = [f1_score(truth, scores >= threshold) for threshold in scores]
    assert f1_score(truth, scores >= chosen) == pytest.approx(max(every))


def test_thresholds_decide_and_travel():
    values, tags = make_values()
    tuned = TASK.tune(values, {TAGS: tags})
    for k in range(3):
        assert tuned.thresholds[k] == choose_threshold(tags[:, k] > 0, values[:, k])
    few = tags * (np.cumsum(tags, axis=0) <= [99, 4, 2])
    tuned = TASK.tune(values, {TAGS: few})
    rare = [few[:, 1:].ravel() > 0, values[:, 1:].ravel()]
    assert tuned.thresholds == (choose_threshold(few[:, 0] > 0, values[:, 0]), *[choose_threshold(*rare)] * 2)
    assert TASK.tune(values, {TAGS: few * [1, 1, 0]}).thresholds[1:] == (0.5, 0.5)
    task = TASK.model_copy(update={"thresholds": (0.2, 0.9, 0.5)})
    shares = np.array([0.25, 0.8, 0.1], np.float32)
    answer = json.loads(json.dumps(task.answer(shares, top=2)))
    assert answer == {"tags": ["cat"], "probabilities": {"dog": pytest.approx(0.8), "cat": 0.25}}
    assert [(line.name, line.is_chosen) for line in task.describe(shares, top=1)] == [("dog", False), ("cat", True)]
    assert set(task.answer(shares, top=1)["probabilities"]) == {"dog", "cat"}, "what was chosen is among them"
    assert task.flatten(shares)["tags"] == "cat"
    flat = Tags(names=("sky", "tags")).flatten(np.array([0.1, 0.9], np.float32))
    assert flat == {"tags": "tags", "sky": pytest.approx(0.1), "tags (tag)": pytest.approx(0.9)}
    assert task.compare(np.stack([shares] * 2), np.stack([shares, [0.1, 0.8, 0.1]])) < 1
    with pytest.raises(ConfigError, match="3 tags and 2 thresholds"):
        Tags(names=TASK.names, thresholds=(0.5, 0.5))


def test_intervals_cover_the_truth_of_the_population():
    """Scores are normal with a distance of 1 between images with and without the tag; the truth is that of many."""
    rng, covered, trials = np.random.default_rng(0), 0, 60

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        truth = rng.random((count, 1)) < 0.4
        return truth, rng.normal(size=(count, 1)) + truth

    planted = AveragePrecision(*draw(200_000)).compute(np.arange(200_000))[0]
    for _ in range(trials):
        found = estimate_by_resampling(AveragePrecision(*draw(150)).compute_mean, 150, 150)
        covered += found.low <= planted <= found.high
    assert 0.88 <= covered / trials <= 0.995
