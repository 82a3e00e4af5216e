"""The paper's few-shot against direct solutions and a sum that fits on a page."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.features import Features
from vitrail.evaluation.least_squares import SHOTS, choose_shots, fit_least_squares, number_within_class, score_few_shot


def made(values: torch.Tensor, labels: torch.Tensor) -> Features:
    return Features(values, labels, torch.arange(len(labels)))


def blobs(per_class: int, classes: int, width: int, apart: float, seed: int = 0) -> Features:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat(per_class)
    centres = apart * torch.eye(classes, width)
    return made(centres[labels] + torch.randn(len(labels), width, generator=generator), labels)


def by_least_squares(values, labels, classes: int, l2: float, tests):
    """Scores by the augmented system ‖[X; √l2·I] W − [Y; 0]‖², as a textbook has it."""
    mean, deviation = values.mean(0), values.std(0)
    augmented = [np.hstack([(x - mean) / (deviation + 1e-5), np.full((len(x), 1), 100.0)]) for x in (values, tests)]
    y = np.where(labels[:, None] == np.arange(classes), 1.0, -1.0)
    width = augmented[0].shape[1]
    system = np.vstack([augmented[0], np.sqrt(l2) * np.eye(width)])
    solution, *_ = np.linalg.lstsq(system, np.vstack([y, np.zeros((width, classes))]), rcond=None)
    return augmented[1] @ solution


@pytest.mark.parametrize("count", [5, 16, 17, 18, 200], ids=lambda count: f"{count} images of 16 features")
@pytest.mark.parametrize("l2", [1024.0, 1.0, 1e-3])
def test_equals_a_direct_solution_in_both_forms(count, l2):
    rng = np.random.default_rng(count)
    values, tests = 3 + 2 * rng.normal(size=(2, count, 16))
    labels = rng.integers(0, 4, count)
    found = fit_least_squares(torch.from_numpy(values), torch.from_numpy(labels), 4, l2).scores(torch.from_numpy(tests))
    np.testing.assert_allclose(found, by_least_squares(values, labels, 4, l2, tests), rtol=0, atol=1e-9)


def test_by_hand():
    """Features 1 and 3 of classes 0 and 1: mean 2, deviation 1, so X = [[−a, 100], [a, 100]] with a = 1/1.00001, and
    XᵀX + l2·I = diag(2a² + l2, 20000 + l2). Xᵀy is (−2a, 0) for class 0 and (2a, 0) for class 1."""
    solved = fit_least_squares(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 1]), 2, l2=2.0)
    a = 1 / 1.00001
    slope = 2 * a / (2 * a**2 + 2) * a  # of class 1, for features as they are
    torch.testing.assert_close(solved.weight, torch.tensor([[-slope], [slope]], dtype=torch.float64))
    torch.testing.assert_close(solved.bias, torch.tensor([2 * slope, -2 * slope], dtype=torch.float64))


def test_the_bias_is_regularised_too():
    """Without features that tell anything, W for the constant is Σy·100 / (N·100² + l2)."""
    labels = torch.tensor([0, 0, 0, 1])
    solved = fit_least_squares(torch.zeros(4, 1), labels, 2, l2=1e4)
    expected = torch.tensor([2.0, -2.0], dtype=torch.float64) * 100 / (4 * 100**2 + 1e4) * 100
    torch.testing.assert_close(solved.scores(torch.zeros(1, 1))[0], expected)


def test_a_feature_that_never_changes_is_not_used():
    values = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    values[:, 1] = 0.1  # no sum of it is exact
    labels = torch.arange(20) % 2
    solved = fit_least_squares(values, labels, 2, 1.0)
    elsewhere = values + torch.tensor([0.0, 1000.0, 0.0])
    torch.testing.assert_close(solved.scores(elsewhere), solved.scores(values), rtol=0, atol=1e-3)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 12), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_shots_are_k_of_each_class_and_nested(labels, k, seed):
    labels = torch.tensor(labels)
    chosen = choose_shots(labels, k, seed)
    counts = torch.bincount(labels)
    assert torch.equal(torch.bincount(labels[chosen], minlength=len(counts)), counts.clamp(max=k))
    assert len(chosen.unique()) == len(chosen)
    assert set(chosen.tolist()) <= set(choose_shots(labels, k + 3, seed).tolist())
    assert torch.equal(chosen, choose_shots(labels, k, seed))
    rank = number_within_class(labels, seed)
    for label in labels.unique():
        assert sorted(rank[labels == label].tolist()) == list(range(counts[label]))


def test_seeds_choose_differently():
    labels = torch.arange(10).repeat(50)
    assert not torch.equal(choose_shots(labels, 5, 0), choose_shots(labels, 5, 1))


def test_few_shot_gives_a_row_for_each_number_and_seed():
    train, test = blobs(30, 4, 8, apart=2.0), blobs(50, 4, 8, apart=2.0, seed=1)
    train = train[torch.ones(120, dtype=torch.bool) & ((train.labels != 3) | (torch.arange(120) < 24))]
    rows = score_few_shot(train, test, 4, shots=(1, 10, 25), seeds=(0, 1))
    assert [(row.shots, row.seed) for row in rows] == [(1, 0), (1, 1), (10, 0), (10, 1), (25, 0), (25, 1)]
    assert [row.images for row in rows] == [4, 4, 36, 36, 81, 81]
    assert [row.short for row in rows] == [0, 0, 1, 1, 1, 1]
    means = [np.mean([row.accuracy for row in rows if row.shots == shots]) for shots in (1, 10, 25)]
    assert means[0] < means[1] <= means[2] + 0.02
    for row in rows:
        chosen = train[choose_shots(train.labels, row.shots, row.seed)]
        right = fit_least_squares(chosen.values, chosen.labels, 4).scores(test.values).argmax(1) == test.labels
        assert row.accuracy == right.double().mean().item()


def test_what_cannot_be():
    features = blobs(2, 2, 4, apart=1.0)
    with pytest.raises(ConfigError, match="l2 = 0"):
        fit_least_squares(features.values, features.labels, 2, 0)
    with pytest.raises(ConfigError, match="shots = 0"):
        choose_shots(features.labels, 0, 0)
    with pytest.raises(DataError, match="test on"):
        score_few_shot(features, features[torch.tensor([], dtype=torch.int64)], 2)


def test_the_shots_are_the_papers():
    assert SHOTS == (1, 5, 10, 25)
