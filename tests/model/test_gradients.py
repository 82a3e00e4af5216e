"""Gradients of every kind of encoder and of every objective, against finite differences in float64.

Each parameter is moved along a random direction, there and back: the slope of the loss is what its gradient says.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import runs
import torch
from torch import Tensor, nn

import vitrail
from encoders import ENCODERS, small_encoder, small_hybrid
from samples import images, mark_slow, randomise
from task_models import OTHERS, ROWS, TASKS
from vitrail.data.loader import Batch
from vitrail.data.transforms.mixing import Mixing
from vitrail.objectives.base import Objective
from vitrail.objectives.build import build_objective
from vitrail.training.config import ObjectiveConfig

STEP, TOLERANCE, ROUNDING = 1e-5, 1e-6, 1e-14


def compare_slopes(module: nn.Module, compute_loss: Callable[[], Tensor], step: float = STEP) -> int:
    """Compare the gradient of each parameter with the slope of the loss, and return how many have a gradient."""
    parameters = dict(module.named_parameters())
    learning = {name: each for name, each in parameters.items() if each.requires_grad}
    torch.manual_seed(0)
    compute_loss().backward()
    generator, checked = torch.Generator().manual_seed(0), 0
    for name, parameter in learning.items():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        values = []
        with torch.no_grad():
            for factor in (step, -2 * step):
                parameter += factor * direction
                torch.manual_seed(0)
                values.append(compute_loss().item())
            parameter += step * direction
        slope = (values[0] - values[1]) / (2 * step)
        claimed = 0.0 if parameter.grad is None else (parameter.grad * direction).sum().item()
        scale = max(abs(slope), abs(values[0]) * 1e-3, 1e-6)
        assert abs(slope - claimed) <= TOLERANCE * scale + ROUNDING / step * abs(values[0]), (name, slope, claimed)
        checked += claimed != 0
    return checked


def compare_model(model: nn.Module, size: tuple[int, int], step: float = STEP) -> None:
    model = model.double()
    pixels = images(3, size, dtype=torch.float64)
    outputs = model(pixels)
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    checked = compare_slopes(model, lambda: (model(pixels) * weights).sum(), step)
    assert checked >= 0.8 * len(list(model.parameters()))


@pytest.mark.parametrize("kind", mark_slow(ENCODERS, {"dinov3", "aimv2"}))
def test_every_kind_of_encoder(kind):
    compare_model(small_encoder(kind), (16, 24))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dinov2", "dinov3", "beit", "aimv2"])
def test_images_of_another_size(kind):
    """Positions are then interpolated, and gradients go through that."""
    model = small_encoder(kind).double().train()
    pixels = images(2, (24, 32), dtype=torch.float64)
    compare_slopes(model, lambda: model(pixels).square().sum())


@pytest.mark.slow
def test_a_hybrid():
    """Its rectifiers have kinks, which a small step rarely crosses."""
    compare_model(small_hybrid(), (16, 24), step=1e-8)


def make_batch(targets: dict[str, Tensor], count: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 1, 16, 16), generator=generator, dtype=torch.uint8)
    return Batch(pixels, targets, torch.arange(count), torch.ones(count, dtype=torch.bool))


def make_objective(num_classes: int = 5, task: str | None = None, mixing: Mixing | None = None, **options) -> Objective:
    """Return an objective in float64 around a small model that draws nothing by itself."""
    model = randomise(vitrail.create_model(**{**runs.MODEL, "num_classes": 0 if task else num_classes}))
    if task:
        randomise(model.give_task(TASKS[task]), seed=1)
    config = dict(ObjectiveConfig(**{"kind": "task" if task else "classification", **options}))
    config.pop("head_bias", None)
    objective = build_objective(model, mixing=mixing or Mixing(), seed=0, **config)
    return objective.double().train()


LABELS = {"label": torch.tensor([0, 3, 1, 4])}
OBJECTIVES = {
    "softmax": ({}, LABELS),
    "label smoothing": ({"label_smoothing": 0.1}, LABELS),
    "sigmoid": ({"loss": "sigmoid"}, LABELS),
    "mixed": ({"mixing": Mixing(mixup=0.8, cutmix=1.0)}, LABELS),
    "masked patches": ({"num_classes": 0, **runs.MASKED}, {}),
    "masked autoencoding": ({"num_classes": 0, **runs.AUTOENCODED}, {}),
    "LeJEPA": ({"num_classes": 0, **runs.JOINT}, {}),
    "DINO": ({"num_classes": 0, **runs.TAUGHT}, {}),
}


@pytest.mark.parametrize("kind", mark_slow(OBJECTIVES, {"softmax", "sigmoid", "masked patches"}))
def test_every_objective(kind):
    options, targets = OBJECTIVES[kind]
    objective, batch = make_objective(**options), make_batch(targets)
    assert compare_slopes(objective, lambda: objective(batch, key=3).loss) >= 10


@pytest.mark.parametrize("kind", OTHERS)
def test_every_task(kind):
    task = TASKS[kind]
    rows = task.allocate(4)
    for place, row in enumerate(ROWS[kind]):
        for name, values in task.encode(row).items():
            rows[name][place] = values
    objective = make_objective(task=kind)
    batch = make_batch({name: torch.from_numpy(np.asarray(values)) for name, values in rows.items()})
    assert compare_slopes(objective, lambda: objective(batch, key=3).loss) >= 10


def test_a_wrong_gradient_is_seen():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values

        @staticmethod
        def backward(ctx, gradient):
            return 1.0001 * gradient

    layer = nn.Linear(3, 2).double()
    inputs = torch.randn(4, 3, dtype=torch.float64)
    compare_slopes(layer, lambda: layer(inputs).square().sum())
    layer.zero_grad()
    with pytest.raises(AssertionError):
        compare_slopes(layer, lambda: Wrong.apply(layer(inputs)).square().sum())
