"""The objective of every task but labels: its means are of what is known."""

from __future__ import annotations

import pytest
import torch

import vitrail
from vitrail.data.loader import Batch
from vitrail.errors import ConfigError
from vitrail.objectives.metrics import compute_means
from vitrail.objectives.supervised import Supervised
from vitrail.tasks.numbers import Numbers

AGES = Numbers(names=("age",), means=(30.0,), deviations=(10.0,))


def build():
    model = vitrail.create_model(
        "Ti/4", image_size=8, in_channels=1, width=16, depth=1, num_heads=1, mlp_dim=16, num_classes=0
    )
    return Supervised(model.give_task(AGES), AGES)


def make_batch(ages, mask):
    images = torch.zeros(len(ages), 1, 8, 8, dtype=torch.uint8)
    targets = {"numbers": torch.tensor(ages)[:, None]}
    return Batch(images, targets, torch.arange(len(ages)), torch.tensor(mask))


@pytest.mark.parametrize("is_training", [True, False])
def test_what_is_not_known_is_not_counted(is_training):
    """A new head answers with the mean, 30: it is off by 10 and by 5."""
    objective = build().train(is_training)
    mask = [True] * 3 if is_training else [True, True, True, False]
    batch = make_batch([40.0, 35.0, float("nan"), 90.0][: len(mask)], mask)
    means = compute_means(objective(batch, key=0).sums)
    assert means["MAE"] == pytest.approx(7.5)
    assert means["loss"] == pytest.approx((0.5 * 1.0 + 0.5 * 0.25) / 3)


def test_a_head_of_another_size_is_refused():
    model = build().model
    model.replace_head(2)
    with pytest.raises(ConfigError, match=r"2 outputs and the task 1: call model.give_task"):
        Supervised(model, AGES)
