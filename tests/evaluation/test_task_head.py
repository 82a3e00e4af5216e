"""A head that is fitted to features by the loss of a task: against scikit-learn, and against its own gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vitrail.errors import DataError
from vitrail.evaluation.task_head import STRENGTHS, TaskExamples, fit_task_head
from vitrail.tasks.numbers import Numbers
from vitrail.tasks.tags import Tags

TAGS = Tags(names=("a", "b", "c"), column="tags")


def draw_tags(count=300, features=8, seed=0):
    """Features of unlike scales, and tags that depend on some of them."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(count, features)) * np.linspace(0.1, 20, features) + 3
    directions = np.random.default_rng(9).normal(size=(features, 3)) / np.linspace(0.1, 20, features)[:, None]
    chances = 1 / (1 + np.exp(-(values - 3) @ directions))
    tags = (rng.uniform(size=chances.shape) < chances).astype(np.float32)
    return TaskExamples(torch.from_numpy(values).float(), {"tags": torch.from_numpy(tags)})


@pytest.mark.parametrize("strength", [1.0, 0.01])
def test_tags_as_scikit_learn(strength):
    from sklearn.linear_model import LogisticRegression

    examples = draw_tags()
    values = examples.values.double().numpy()
    scaled = (values - values.mean(axis=0)) / (values.std(axis=0) + 1e-5)
    found = fit_task_head(TAGS, examples, strengths=[strength]).outputs.scores(examples.values)
    for tag in range(3):
        # The loss is a mean over images and tags; theirs is a sum over images, with half the squared weights.
        theirs = LogisticRegression(C=1 / (strength * len(values) * 3), tol=1e-10, max_iter=10_000)
        theirs.fit(scaled, examples.targets["tags"][:, tag].numpy())
        expected = theirs.decision_function(scaled)
        np.testing.assert_allclose(found[:, tag].numpy(), expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("strength", [0.3, 0.001])
def test_numbers_as_a_ridge_regression(strength):
    """As long as no error is larger than a standard deviation, beyond which the loss is linear."""
    from sklearn.linear_model import Ridge

    values = draw_tags().values.double().numpy()
    scaled = (values - values.mean(axis=0)) / (values.std(axis=0) + 1e-5)
    sizes = np.arange(1, 9) / 40
    noise = np.random.default_rng(3).uniform(-0.1, 0.1, (len(values), 2))
    numbers = (np.stack([scaled @ sizes, scaled @ sizes[::-1]], axis=1) + noise).clip(-0.6, 0.6) * [10, 0.1] + 5
    task = Numbers(names=("a", "b"), means=(5.0, 5.0), deviations=(10.0, 0.1))
    examples = TaskExamples(torch.from_numpy(values), {"numbers": torch.from_numpy(numbers)})
    found = task.activate(fit_task_head(task, examples, strengths=[strength]).outputs.scores(examples.values)).numpy()
    # The loss is half the squared error, as a mean over images and columns.
    theirs = Ridge(alpha=strength * len(values) * 2).fit(scaled, (numbers - 5) / [10, 0.1])
    np.testing.assert_allclose((found - 5) / [10, 0.1], theirs.predict(scaled), rtol=0, atol=1e-5)


def test_numbers_that_are_not_known_cost_nothing():
    examples = draw_tags(60)
    numbers = examples.values[:, :1].clone()
    known = examples.take(torch.arange(60) >= 10)
    numbers[:10] = float("nan")
    task = Numbers(names=("a",), means=(0.0,), deviations=(1.0,))
    whole = fit_task_head(task, TaskExamples(examples.values, {"numbers": numbers}), strengths=[1e-4]).outputs
    rest = fit_task_head(task, TaskExamples(known.values, {"numbers": numbers[10:]}), strengths=[1e-4]).outputs
    torch.testing.assert_close(whole.scores(known.values), rest.scores(known.values), atol=2e-2, rtol=0)


def test_the_gradient_is_zero_where_it_ends():
    examples, strength = draw_tags(), 1e-3
    fitted = fit_task_head(TAGS, examples, strengths=[strength]).outputs
    values = examples.values.double()
    scale = values.std(dim=0, correction=0) + 1e-5
    weight, bias = (fitted.weight * scale).requires_grad_(), (fitted.bias + fitted.weight @ values.mean(dim=0))
    bias = bias.requires_grad_()
    outputs = (values - values.mean(dim=0)) / scale @ weight.T + bias
    loss = torch.nn.functional.binary_cross_entropy_with_logits(outputs, examples.targets["tags"].double())
    (loss + strength / 2 * weight.square().sum()).backward()
    assert weight.grad.abs().max() < 1e-5
    assert bias.grad.abs().max() < 1e-5


def test_other_images_choose_the_strength():
    examples, choosing = draw_tags(40, 30), draw_tags(2000, 30, seed=1)
    fitted = fit_task_head(TAGS, examples, choosing)
    assert fitted.strength == min(fitted.losses, key=fitted.losses.get)
    assert STRENGTHS[-1] < fitted.strength < STRENGTHS[0], "neither no penalty nor one that forbids to learn"
    assert STRENGTHS[-1] not in fitted.losses, "weaker ones are not tried once they are worse"

    def loss(head):
        outputs = head.outputs.scores(choosing.values)
        return TAGS.compute_losses(outputs, {"tags": choosing.targets["tags"].double()}).mean().item()

    assert loss(fitted) == pytest.approx(fitted.losses[fitted.strength], rel=1e-2)
    assert loss(fitted) < loss(fit_task_head(TAGS, examples, strengths=[STRENGTHS[-1]]))
    alone = fit_task_head(TAGS, examples)
    assert alone.strength in alone.losses, "a fifth of the examples chooses"


def test_targets_that_are_no_numbers():
    examples = draw_tags(20)
    examples.targets["tags"][3, 1] = float("nan")
    with pytest.raises(DataError, match="the loss of the tags is no number"):
        fit_task_head(TAGS, examples)
