"""A linear probe: multinomial logistic regression on frozen features, by L-BFGS.

The objective is the mean cross-entropy + strength/2 · ‖W‖², where W acts on standardised features and the bias is not
regularised. In scikit-learn's terms C = 1 / (N · strength).

Shapes: N images, D features, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.least_squares import number_within_class
from vitrail.evaluation.linear_classifier import LinearClassifier, Standardisation

STRENGTHS = tuple(10 ** (-6 * step / 9) for step in range(10))
"""From 1 down to a millionth, the strongest first: each fit starts from the solution before it, which is near."""
STAGES, STEPS, HISTORY = 6, 50, 50
"""How often the scaling is computed anew; L-BFGS steps before the first time, which double after that; its memory."""
LOSS_SCALE = 1e6
"""The loss is multiplied by this: torch's L-BFGS skips updates below a fixed threshold on the change of the slope."""
LEAST_CURVATURE = 1e-8
"""Least curvature of the loss along a bias: a class that is never in doubt has none."""
EXACT, CLOSE = 1e-7, 1e-4
"""Largest slope of a final solution, and of one that is only compared with others, in units of curvature 1. Half its
square is about the remaining loss; for `EXACT` that is below the rounding of the loss itself."""
FOLDS = 5
PATIENCE = 2
"""The search for a strength ends after so many worse ones in a row."""


def fit_probe(values: Tensor, labels: Tensor, num_classes: int, strength: float) -> LinearClassifier:
    """Fit a classifier to (N, D) features and (N,) labels, on their device; in float64 on a CPU."""
    ((_, classifier),) = fit_path(values, labels, num_classes, (strength,), EXACT)
    return classifier


def fit_path(
    values: Tensor, labels: Tensor, num_classes: int, strengths: Sequence[float] = STRENGTHS, slope: float = CLOSE
) -> Iterator[tuple[float, LinearClassifier]]:
    """Yield (strength, classifier) for each strength. A fit ends when its largest slope is at most `slope`."""
    if not len(values):
        raise DataError("a linear probe needs images to learn from")
    if not strengths:
        raise ConfigError("give at least one strength")
    if wrong := [strength for strength in strengths if strength <= 0]:
        raise ConfigError(f"strength = {wrong[0]:g}: give a number above 0, such as 0.01")
    values = values.double() if values.device.type == "cpu" else values.float()
    standardise = Standardisation.from_features(values)
    features, back = _rotate(standardise(values))
    weight, bias = values.new_zeros(num_classes, features.shape[1]), values.new_zeros(num_classes)
    for strength in strengths:
        weight, bias = _Problem(features, labels, strength).minimise(weight, bias, slope)
        yield strength, standardise.fold_into(weight @ back, bias)


def _rotate(features: Tensor) -> tuple[Tensor, Tensor]:
    """(N, D) → (N, R) features in the coordinates of their principal axes, and the (R, D) orthonormal rotation.

    Weights @ rotation are weights for the original features. A rotation changes no norm, so the problem is the same.
    With fewer images than features it is also smaller: the best weights lie in the span of the images.
    """
    count, width = features.shape
    span, within = None, features
    if count < width:
        directions, coordinates = torch.linalg.qr(features.T)
        span, within = directions.T, coordinates.T
    axes = torch.linalg.eigh(within.T @ within).eigenvectors
    return within @ axes, axes.T if span is None else axes.T @ span


class _Objective(NamedTuple):
    """The objective and its gradient at one point."""

    loss: Tensor
    weight_slope: Tensor
    bias_slope: Tensor
    probabilities: Tensor
    """(N, K)."""


@dataclass(frozen=True)
class _Problem:
    """Logistic regression on (N, R) features and (N,) labels; weights are (K, R), biases (K,)."""

    features: Tensor
    labels: Tensor
    strength: float

    def minimise(self, weight: Tensor, bias: Tensor, slope: float) -> tuple[Tensor, Tensor]:
        """Return the best weights and biases, starting from the given ones.

        The curvature of the loss differs by orders of magnitude between weights, and changes as classes become sure.
        L-BFGS needs few steps in units in which every curvature is about 1; they are computed anew at each stage.
        """
        slope = slope if weight.dtype == torch.float64 else max(slope, 1e-5)
        before = float("inf")
        for stage in range(STAGES):
            at = self.evaluate(weight, bias)
            units = self.find_units(at.probabilities)
            slopes = (at.weight_slope * units[0], at.bias_slope * units[1])
            if max(one.abs().max().item() for one in slopes) <= slope or at.loss.item() >= before:
                break
            before = at.loss.item()
            weight, bias = self.descend(weight, bias, units, slope, STEPS << stage)
        return weight, bias

    def descend(
        self, weight: Tensor, bias: Tensor, units: tuple[Tensor, Tensor], slope: float, steps: int
    ) -> tuple[Tensor, Tensor]:
        """Run L-BFGS for at most `steps` steps and return weights and biases."""
        unit, bias_unit = units
        scaled, offset = weight / unit, bias / bias_unit
        optimizer = torch.optim.LBFGS(
            [scaled, offset],
            max_iter=steps,
            history_size=HISTORY,
            tolerance_grad=LOSS_SCALE * slope,
            tolerance_change=1e-10,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            at = self.evaluate(scaled * unit, offset * bias_unit)
            scaled.grad, offset.grad = LOSS_SCALE * at.weight_slope * unit, LOSS_SCALE * at.bias_slope * bias_unit
            return LOSS_SCALE * at.loss

        optimizer.step(closure)
        return scaled * unit, offset * bias_unit

    def evaluate(self, weight: Tensor, bias: Tensor) -> _Objective:
        """Compute the objective and its gradient by hand: autograd takes twice as long here."""
        logs = (self.features @ weight.T + bias).log_softmax(dim=1)
        loss = F.nll_loss(logs, self.labels) + self.strength / 2 * weight.square().sum()
        probabilities = logs.exp()
        wrong = probabilities.scatter_add(1, self.labels[:, None], -torch.ones_like(logs[:, :1])) / len(self.labels)
        return _Objective(loss, wrong.T @ self.features + self.strength * weight, wrong.sum(dim=0), probabilities)

    def find_units(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Return (R,) and () units: a step of one unit changes the slope of the loss by about 1.

        They are the same for all classes. Adding the same vector to the weights of all classes changes no probability,
        and only the regularisation slowly removes it again; different units would add such a vector, equal ones never.
        """
        curvature = (probabilities * (1 - probabilities)).mean(dim=1) / len(self.features)
        unit = (curvature @ self.features.square() + self.strength).rsqrt()
        return unit, (curvature.sum() + LEAST_CURVATURE).rsqrt()


@dataclass(frozen=True)
class ChosenProbe:
    """A strength chosen on held-out images, and the classifier fitted with it to all images."""

    strength: float
    losses: dict[float, float]
    """Mean cross-entropy on the held-out images, for each strength that was tried."""
    linear: LinearClassifier


def choose_strength(
    values: Tensor,
    labels: Tensor,
    num_classes: int,
    strengths: Sequence[float] = STRENGTHS,
    held_out: Tensor | None = None,
    seed: int = 0,
) -> ChosenProbe:
    """Choose the strength with the lowest loss on held-out images, then fit to all images with it.

    The loss decides, not the accuracy: with few images most strengths have the same accuracy.

    Args:
        values: (N, D) features.
        labels: (N,) int64.
        num_classes: K.
        strengths: candidates, the strongest first.
        held_out: (N,) bool; by default a random fifth of every class that has at least two images.
        seed: of the random fifth.
    """
    held_out = assign_folds(labels, seed) == 0 if held_out is None else held_out
    if not held_out.any():
        raise DataError("there is nothing to choose a strength by: a class needs two images at least")
    losses: dict[float, float] = {}
    for strength, linear in fit_path(values[~held_out], labels[~held_out], num_classes, strengths):
        losses[strength] = F.cross_entropy(linear.scores(values[held_out]).double(), labels[held_out]).item()
        # With weaker regularisation the loss first falls and then rises.
        if len(losses) - list(losses).index(min(losses, key=losses.__getitem__)) > PATIENCE:
            break
    best = min(losses, key=losses.__getitem__)
    return ChosenProbe(best, losses, fit_probe(values, labels, num_classes, best))


def assign_folds(labels: Tensor, seed: int = 0, number: int = FOLDS) -> Tensor:
    """(N,) labels → (N,) int64: the fold of each image, from 0 to number − 1, with every class spread evenly.

    A class with fewer images than folds fills the first folds. The only image of a class is in no fold, −1: without it
    nothing could be learned about its class.
    """
    parts = number_within_class(labels, seed).to(labels.device) % number
    return parts.masked_fill(torch.bincount(labels)[labels] == 1, -1)
