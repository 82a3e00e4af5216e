"""Logistic regression against scikit-learn at its optimum, and a strength chosen as it should be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from torch.nn import functional as F

from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.linear_classifier import Standardisation
from vitrail.evaluation.linear_probe import STRENGTHS, assign_folds, choose_strength, fit_path, fit_probe


def objective(weight, bias, features, labels, strength):
    """What the probe minimises, for (K, D) weights and (K,) biases on (N, D) standardised features."""
    return F.cross_entropy(features @ weight.T + bias, labels) + strength / 2 * weight.square().sum()


def problem(count: int, width: int, classes: int, apart: float = 1.0, seed: int = 0):
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    noise = rng.normal(size=(count, width)) * np.logspace(0, -1, width)
    values = 5 + rng.normal(size=(classes, width))[labels] * apart + noise
    return torch.from_numpy(values), torch.from_numpy(labels)


def standardised(values, linear):
    """The same classifier for standardised features, and these."""
    standardise = Standardisation.from_features(values)
    return linear.weight * standardise.scale, linear.bias + linear.weight @ standardise.mean, standardise(values)


@pytest.mark.parametrize(("count", "width"), [(200, 12), (40, 60)], ids=["more images", "more features"])
@pytest.mark.parametrize("strength", [0.3, 1e-2, 1e-3])
def test_equals_scikit_learn(count, width, strength):
    values, labels = problem(count, width, 4, apart=0.5)
    weight, bias, features = standardised(values, fit_probe(values, labels, 4, strength))
    theirs = LogisticRegression(C=1 / (count * strength), tol=1e-12, max_iter=100_000).fit(features, labels)
    np.testing.assert_allclose(weight, theirs.coef_, rtol=0, atol=1e-4)
    # Adding the same to every bias changes nothing.
    np.testing.assert_allclose(bias - bias.mean(), theirs.intercept_ - theirs.intercept_.mean(), rtol=0, atol=1e-4)
    found = objective(weight, bias, features, labels, strength)
    there = objective(*map(torch.from_numpy, (theirs.coef_, theirs.intercept_)), features, labels, strength)
    assert abs(found - there) < 1e-8
    assert found <= there + 1e-12


def test_two_classes_are_scikit_learns_at_half_the_strength():
    """It gives two classes one row of weights, where we have two of half the size: half the penalty."""
    values, labels = problem(80, 5, 2, apart=0.3)
    weight, bias, features = standardised(values, fit_probe(values, labels, 2, 0.02))
    theirs = LogisticRegression(C=2 / (80 * 0.02), tol=1e-12, max_iter=100_000).fit(features, labels)
    np.testing.assert_allclose(weight[1] - weight[0], theirs.coef_[0], rtol=0, atol=1e-4)
    np.testing.assert_allclose(bias[1] - bias[0], theirs.intercept_[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("count", "width"), [(150, 8), (12, 30)])
@pytest.mark.parametrize("strength", [1.0, 1e-3, 1e-6])
def test_it_is_flat_at_the_solution(count, width, strength):
    values, labels = problem(count, width, 3)
    weight, bias, features = standardised(values, fit_probe(values, labels, 3, strength))
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    objective(weight, bias, features, labels, strength).backward()
    assert weight.grad.abs().max() < 1e-6
    assert bias.grad.abs().max() < 1e-6


def test_the_way_does_not_matter():
    """A path of solutions leads to where a fit from nothing does."""
    values, labels = problem(100, 10, 3, apart=0.3)
    *_, (strength, last) = fit_path(values, labels, 3, STRENGTHS[:6], slope=1e-9)
    alone = fit_probe(values, labels, 3, STRENGTHS[5])
    assert strength == STRENGTHS[5]
    torch.testing.assert_close(last.weight, alone.weight, rtol=0, atol=1e-4)


def test_single_precision_features_are_fitted_in_double():
    values, labels = problem(60, 6, 3)
    single = fit_probe(values.float(), labels, 3, 0.01)
    assert single.weight.dtype == torch.float64
    torch.testing.assert_close(single.weight, fit_probe(values, labels, 3, 0.01).weight, rtol=0, atol=1e-4)


def test_strong_where_features_are_noise_and_weak_where_they_tell():
    """One feature in a hundred tells something and labels are often wrong: weights must be held down. With features
    that tell everything nothing holds them down."""
    rng = np.random.default_rng(0)
    labels = torch.arange(120) % 2
    noise = rng.normal(size=(120, 100))
    noise[:, 0] += np.where((labels == 1) ^ torch.from_numpy(rng.random(120) < 0.2), 2.0, -2.0)
    noisy = choose_strength(torch.from_numpy(noise), labels, 2)
    values, clean_labels = problem(120, 6, 2, apart=10.0)
    clean = choose_strength(values, clean_labels, 2)
    assert noisy.strength > 0.05
    assert clean.strength < 1e-3
    assert list(noisy.losses) == list(STRENGTHS[: len(noisy.losses)])
    assert noisy.strength == list(noisy.losses)[-3], "two that were worse ended the search"
    assert noisy.losses[noisy.strength] == min(noisy.losses.values())
    # Fitted again on all images, also those that were held out.
    torch.testing.assert_close(
        noisy.linear.weight, fit_probe(torch.from_numpy(noise), labels, 2, noisy.strength).weight, rtol=0, atol=1e-9
    )


def test_the_held_out_part_decides():
    """Held-out images whose labels are turned round are the less surprising the less was learned."""
    values, labels = problem(60, 4, 2, apart=3.0)
    held_out = torch.arange(60) < 20
    turned = torch.where(held_out, 1 - labels, labels)
    assert choose_strength(values, turned, 2, held_out=held_out).strength == max(STRENGTHS)
    assert choose_strength(values, labels, 2, held_out=held_out).strength < max(STRENGTHS)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_folds_spread_every_class_and_never_take_all_of_one(labels, seed):
    labels = torch.tensor(labels)
    found = assign_folds(labels, seed)
    for label in labels.unique():
        mine = found[labels == label]
        if len(mine) == 1:
            assert mine.item() == -1
            continue
        counts = torch.bincount(mine, minlength=5)
        assert counts[0] == counts.max() >= 1
        assert counts.max() - counts.min() <= 1
        assert counts.max() < len(mine), "something is left to learn from"


def test_what_cannot_be():
    values, labels = problem(6, 2, 3)
    with pytest.raises(ConfigError, match="strength = 0"):
        fit_probe(values, labels, 3, 0)
    with pytest.raises(DataError, match="two images"):
        choose_strength(values[:3], labels[:3], 3)
    with pytest.raises(DataError, match="learn from"):
        fit_probe(values[:0], labels[:0], 3, 1.0)
