"""Fit a linear head to frozen features for any task: its own loss, a penalty on the weights, and L-BFGS.

The head that is found minimises

    mean loss of the images + strength / 2 · sum of the squared weights

over weights for standardised features, in double precision. Biases are free. For labels there is a closed form, see
discriminant.py.

Shapes: N images, D features, K outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evaluation.linear_classifier import LinearClassifier, Standardisation
from vitrail.tasks.task import Task

STRENGTHS = tuple(10.0**-number for number in range(7))
"""The strengths that are tried, from 1 down to a millionth, until one is worse than the one before; then those half way
to the neighbours of the best."""
MOST_ITERATIONS, HISTORY = 200, 20
ITERATIONS_OF_A_TRIAL = 25
"""Iterations for a strength that is only compared with others: it starts from the weights of the one before. The chosen
one is fitted to the end."""
SMALL_GRADIENT, SMALL_CHANGE = 1e-7, 1e-11
CHOOSING_SHARE = 5
"""Without images that choose, every fifth of those to fit to chooses; the head is then fitted to all."""


Weights = tuple[Tensor, Tensor]
"""(K, D) and (K,), for standardised features."""


class TaskExamples(NamedTuple):
    """The features of images, and the targets of a task."""

    values: Tensor
    """(N, D)."""
    targets: Mapping[str, Tensor]
    """By name; the first axis is that of the images."""

    def take(self, rows: Tensor) -> TaskExamples:
        """Return the examples with these numbers, or where a mask is True."""
        return TaskExamples(self.values[rows], {name: values[rows] for name, values in self.targets.items()})


@dataclass(frozen=True)
class FittedHead:
    """A head and the strength of its penalty."""

    outputs: LinearClassifier
    """Weights and biases of the K outputs, for features that are not standardised, in float64."""
    strength: float
    losses: dict[float, float]
    """The mean loss on the images that chose, for each strength that was tried; empty if it was given."""


def fit_task_head(
    task: Task, examples: TaskExamples, choosing: TaskExamples | None = None, strengths: Sequence[float] = STRENGTHS
) -> FittedHead:
    """Fit a head, with the strength whose head has the lowest loss on the images that choose.

    Args:
        task: gives the loss.
        examples: what the head is fitted to.
        choosing: other images, which choose the strength; if None, a fifth of the examples does.
        strengths: those that are tried, in falling order. A single one is not compared with anything.

    Raises:
        DataError: the loss is no number, such as for targets that are infinite.
    """
    losses: dict[float, float] = {}
    strength, start = strengths[0], None
    if len(strengths) > 1:
        rest = examples
        if choosing is None:
            is_choosing = torch.arange(len(examples.values)) % CHOOSING_SHARE == 0
            rest, choosing = examples.take(~is_choosing), examples.take(is_choosing)
        strength, start, losses = _choose_strength(task, rest, choosing, strengths)
    standardise = Standardisation.from_features(examples.values.double())
    weight, bias = _minimise(task, _prepare(examples, standardise), strength, start, MOST_ITERATIONS)
    return FittedHead(standardise.fold_into(weight, bias), strength, losses)


def _choose_strength(
    task: Task, examples: TaskExamples, choosing: TaskExamples, strengths: Sequence[float]
) -> tuple[float, Weights, dict[float, float]]:
    """Return the best strength, weights to start from, and the loss of each strength on the images that choose."""
    standardise = Standardisation.from_features(examples.values.double())
    prepared, judged = _prepare(examples, standardise), _prepare(choosing, standardise)
    losses: dict[float, float] = {}
    found: dict[float, Weights] = {}

    def try_strength(strength: float, start: Weights | None) -> None:
        found[strength] = _minimise(task, prepared, strength, start, ITERATIONS_OF_A_TRIAL)
        loss = _compute_mean_loss(task, judged, *found[strength]).item()
        losses[strength] = loss if math.isfinite(loss) else math.inf

    previous: float | None = None
    for strength in strengths:
        try_strength(strength, None if previous is None else found[previous])
        if previous is not None and losses[strength] > losses[previous]:
            break
        previous = strength
    best = min(losses, key=lambda tried: losses[tried])
    for strength in (best * math.sqrt(10), best / math.sqrt(10)):
        try_strength(strength, found[best])
    best = min(losses, key=lambda tried: losses[tried])
    return best, found[best], losses


def _prepare(examples: TaskExamples, standardise: Standardisation) -> TaskExamples:
    """Return standardised features, and targets, in double precision."""
    targets = {name: t.double() if t.is_floating_point() else t for name, t in examples.targets.items()}
    return TaskExamples(standardise(examples.values.double()), targets)


def _compute_mean_loss(task: Task, examples: TaskExamples, weight: Tensor, bias: Tensor) -> Tensor:
    outputs = torch.addmm(bias, examples.values, weight.T)
    return task.compute_losses(outputs, examples.targets).mean()


def _minimise(task: Task, examples: TaskExamples, strength: float, start: Weights | None, iterations: int) -> Weights:
    """Return the (K, D) weights and (K,) biases with the lowest penalised loss."""
    outputs, features = len(task.output_names), examples.values.shape[1]
    if start is None:
        start = examples.values.new_zeros(outputs, features), examples.values.new_zeros(outputs)
    weight, bias = (tensor.clone().requires_grad_() for tensor in start)
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=iterations,
        tolerance_grad=SMALL_GRADIENT,
        tolerance_change=SMALL_CHANGE,
        history_size=HISTORY,
        line_search_fn="strong_wolfe",
    )

    def compute_loss() -> Tensor:
        optimizer.zero_grad()
        loss = _compute_mean_loss(task, examples, weight, bias) + strength / 2 * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        first = optimizer.step(compute_loss)
    if not math.isfinite(first.item()) or not bool(weight.isfinite().all() & bias.isfinite().all()):
        raise DataError(f"the loss of the {task.kind} is no number: `vitrail data check` tells what is wrong with them")
    return weight.detach(), bias.detach()
