"""A linear probe: multinomial logistic regression on frozen representations, by L-BFGS.

What is minimised is the mean cross-entropy + strength/2 · ‖W‖², where W acts on standardised features and the bias is
free. In scikit-learn's terms C = 1 / (N · strength).

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
from vitrail.evaluation.least_squares import rank_in_class
from vitrail.evaluation.linear import Linear, Standardisation

STRENGTHS = tuple(10 ** (-6 * step / 9) for step in range(10))
"""From 1 down to a millionth, the strongest first: each fit starts from the one before, which is near."""
STAGES, STEPS, HISTORY = 6, 50, 50
"""How often the units are taken anew; the steps until the first time, which double after that; steps remembered."""
LARGER = 1e6
"""What torch is given is so many times the loss: it learns nothing from a step on which the slope changed little, and
what little is, is a fixed number."""
LEAST = 1e-8
"""How much the loss is thought to be bent along a bias at least: a class that is never in doubt bends it by nothing."""
EXACT, CLOSE = 1e-7, 1e-4
"""Largest slope of a solution, and of one that is only compared with others, in units in which the loss is bent by 1:
half its square is about what is left to win. Beyond the first, that is lost in the rounding of the loss itself."""
FOLDS, PATIENCE = 5, 2


def fit(values: Tensor, labels: Tensor, num_classes: int, strength: float) -> Linear:
    """The classifier of (N, D) features and (N,) labels, on their device; in float64 on a CPU."""
    ((_, found),) = path(values, labels, num_classes, (strength,), EXACT)
    return found


def path(
    values: Tensor,
    labels: Tensor,
    num_classes: int,
    strengths: Sequence[float] = STRENGTHS,
    slope: float = CLOSE,
) -> Iterator[tuple[float, Linear]]:
    """The classifier for each strength. `slope`: at which a solution is good enough."""
    if not len(values):
        raise DataError("a linear probe needs images to learn from")
    if not strengths:
        raise ConfigError("give at least one strength")
    if wrong := [strength for strength in strengths if strength <= 0]:
        raise ConfigError(f"strength = {wrong[0]:g}: give a number above 0, such as 0.01")
    values = values.double() if values.device.type == "cpu" else values.float()
    standardise = Standardisation.of(values)
    features, back = _turned(standardise(values))
    weight, bias = values.new_zeros(num_classes, features.shape[1]), values.new_zeros(num_classes)
    for strength in strengths:
        weight, bias = _minimised(weight, bias, features, labels, strength, slope)
        yield strength, standardise.folded(weight @ back, bias)


def _turned(features: Tensor) -> tuple[Tensor, Tensor]:
    """(N, D) → (N, R) in coordinates that are not correlated, their principal axes; and (R, D) orthonormal rows, by
    which weights of these are weights of the features as they were.

    Turning changes no norm, so the problem is the same. Where there are fewer images than features it is smaller too:
    weights have no part outside the span of the images, where they would only cost.
    """
    count, width = features.shape
    span, within = None, features
    if count < width:
        directions, coordinates = torch.linalg.qr(features.T)
        span, within = directions.T, coordinates.T
    axes = torch.linalg.eigh(within.T @ within).eigenvectors
    return within @ axes, axes.T if span is None else axes.T @ span


def _minimised(
    weight: Tensor, bias: Tensor, features: Tensor, labels: Tensor, strength: float, slope: float
) -> tuple[Tensor, Tensor]:
    """The best (K, R) weights and (K,) biases, sought from some on.

    How much the loss is bent differs by orders of magnitude from one weight to another, and changes as classes become
    sure. In units in which all are bent by about 1, taken anew from time to time, L-BFGS needs few steps.
    """
    slope = slope if weight.dtype == torch.float64 else max(slope, 1e-5)
    before = float("inf")
    for stage in range(STAGES):
        at = _look(weight, bias, features, labels, strength)
        units = _units(at.probabilities, features, strength)
        slopes = (at.weight_slope * units[0], at.bias_slope * units[1])
        if max(one.abs().max().item() for one in slopes) <= slope or at.loss.item() >= before:
            break
        before = at.loss.item()
        weight, bias = _descended(weight, bias, units, features, labels, strength, slope, STEPS << stage)
    return weight, bias


def _descended(
    weight: Tensor,
    bias: Tensor,
    units: tuple[Tensor, Tensor],
    features: Tensor,
    labels: Tensor,
    strength: float,
    slope: float,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """After so many steps, or fewer where it is flat before."""
    unit, bias_unit = units
    scaled, offset = weight / unit, bias / bias_unit
    optimizer = torch.optim.LBFGS(
        [scaled, offset],
        max_iter=steps,
        history_size=HISTORY,
        tolerance_grad=LARGER * slope,
        tolerance_change=1e-10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        at = _look(scaled * unit, offset * bias_unit, features, labels, strength)
        scaled.grad, offset.grad = LARGER * at.weight_slope * unit, LARGER * at.bias_slope * bias_unit
        return LARGER * at.loss

    optimizer.step(closure)
    return scaled * unit, offset * bias_unit


class _Look(NamedTuple):
    """The objective at a place, and which way it is steepest."""

    loss: Tensor
    weight_slope: Tensor
    bias_slope: Tensor
    probabilities: Tensor
    """(N, K)."""


def _look(weight: Tensor, bias: Tensor, features: Tensor, labels: Tensor, strength: float) -> _Look:
    """By hand, not by autograd, which takes twice as long for so small a thing."""
    logs = (features @ weight.T + bias).log_softmax(dim=1)
    loss = F.nll_loss(logs, labels) + strength / 2 * weight.square().sum()
    probabilities = logs.exp()
    wrong = probabilities.scatter_add(1, labels[:, None], -torch.ones_like(logs[:, :1])) / len(labels)
    return _Look(loss, wrong.T @ features + strength * weight, wrong.sum(dim=0), probabilities)


def _units(probabilities: Tensor, features: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """(R,) and (): steps after which the loss has changed its slope by about 1.

    The same for all classes: what is added to the weights of all alike changes no probability, and would be brought
    back by nothing but the strength, which takes long. Unlike units would add such a thing, like ones never do.
    """
    bent = (probabilities * (1 - probabilities)).mean(dim=1) / len(features)
    return (bent @ features.square() + strength).rsqrt(), (bent.sum() + LEAST).rsqrt()


def objective(weight: Tensor, bias: Tensor, features: Tensor, labels: Tensor, strength: float) -> Tensor:
    """What is minimised: (K, D) weights and (K,) biases on (N, D) standardised features."""
    return F.cross_entropy(features @ weight.T + bias, labels) + strength / 2 * weight.square().sum()


@dataclass(frozen=True)
class OutOfFold:
    """What is thought of every image by a classifier that was fitted without it."""

    strength: float
    """With which those classifiers were the least surprised."""
    losses: dict[float, float]
    """Mean cross-entropy for each strength that was tried."""
    known: Tensor
    """(N,) bool: False for the only image of its class, which none was fitted without."""
    guesses: Tensor
    """(N,) int64: the class with the highest probability."""
    confidence: Tensor
    """(N,) its probability."""
    given: Tensor
    """(N,) the probability of the class that the label says."""


def cross_validate(
    values: Tensor, labels: Tensor, num_classes: int, strengths: Sequence[float] = STRENGTHS, seed: int = 0
) -> OutOfFold:
    """Fit with every strength without each of five parts in turn, and look at that part."""
    parts = folds(labels, seed)
    return _judged(values, labels, num_classes, strengths, [parts == part for part in range(FOLDS)])


def _judged(
    values: Tensor, labels: Tensor, num_classes: int, strengths: Sequence[float], held_out: Sequence[Tensor]
) -> OutOfFold:
    """Each of the parts (N,) bool by classifiers without it; all parts together choose the strength.

    As classifiers become free, the loss falls and then rises: two strengths in a row that are worse end the search.
    """
    held_out = [part for part in held_out if part.any()]
    if not held_out:
        raise DataError("there is nothing to choose a strength by: a class needs two images at least")
    known = torch.stack(list(held_out)).any(dim=0)
    paths = [path(values[~part], labels[~part], num_classes, strengths) for part in held_out]
    best, losses = None, {}
    for fits in zip(*paths, strict=True):
        guesses = torch.zeros_like(labels)
        confidence, surprise = torch.zeros(2, *labels.shape, dtype=torch.float64, device=labels.device)
        for part, (_, linear) in zip(held_out, fits, strict=True):
            scores = linear.scores(values[part])
            top = scores.softmax(dim=1).max(dim=1)
            confidence[part], guesses[part] = top.values.double(), top.indices
            surprise[part] = F.cross_entropy(scores, labels[part], reduction="none").double()
        strength = fits[0][0]
        losses[strength] = surprise[known].mean().item()
        if best is None or losses[strength] < losses[best.strength]:
            best = OutOfFold(strength, losses, known, guesses, confidence, (-surprise).exp())
        elif len(losses) - list(losses).index(best.strength) > PATIENCE:
            break
    assert best is not None  # there is a strength at least
    return best


@dataclass(frozen=True)
class Choice:
    """A strength chosen on held-out images, and the classifier that it gives on all of them."""

    strength: float
    losses: dict[float, float]
    """Mean cross-entropy on the held-out images, for each strength that was tried."""
    linear: Linear


def choose(
    values: Tensor,
    labels: Tensor,
    num_classes: int,
    strengths: Sequence[float] = STRENGTHS,
    held_out: Tensor | None = None,
    seed: int = 0,
) -> Choice:
    """Fit with every strength without the held-out images, keep the strength with which they are the least surprising,
    and fit again with all.

    `held_out`: (N,) bool; if None, a fifth of every class that has two images, by the seed. The loss decides, not the
    accuracy: with few images most strengths have the same one.
    """
    parts = folds(labels, seed) if held_out is None else held_out.long() - 1
    found = _judged(values, labels, num_classes, strengths, [parts == 0])
    return Choice(found.strength, found.losses, fit(values, labels, num_classes, found.strength))


def folds(labels: Tensor, seed: int = 0, number: int = FOLDS) -> Tensor:
    """(N,) labels → (N,) int64: in which of so many parts each image is, every class spread over them evenly.

    A class with fewer images than that is in as many parts as it has images, the first ones. The only image of a class
    is in none, which is −1: without it nothing could be learned about its class.
    """
    parts = rank_in_class(labels, seed).to(labels.device) % number
    return parts.masked_fill(torch.bincount(labels)[labels] == 1, -1)
