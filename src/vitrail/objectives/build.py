"""Build an objective from the values of a run's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from vitrail.data.transforms.mixing import Mixing
from vitrail.errors import ConfigError
from vitrail.model.base import ImageModel
from vitrail.objectives.balance import Balance, BalanceKind
from vitrail.objectives.base import Objective
from vitrail.objectives.classification import Classification, Loss
from vitrail.objectives.dino import Dino
from vitrail.objectives.lejepa import LeJepa
from vitrail.objectives.masked_autoencoding import MaskedAutoencoding
from vitrail.objectives.masked_patches import MaskedPatches, Target
from vitrail.objectives.supervised import Supervised
from vitrail.objectives.views import Views

Kind = Literal["classification", "task", "masked-patches", "masked-autoencoding", "lejepa", "dino"]


def build_objective(
    model: ImageModel,
    *,
    kind: Kind,
    loss: Loss,
    label_smoothing: float,
    target: Target,
    corrupted: float,
    masked: float,
    swapped: float,
    hidden: float,
    normalised: bool,
    decoder_width: int,
    decoder_depth: int,
    decoder_heads: int,
    mixing: Mixing,
    seed: int,
    views: Views | None = None,
    projector_width: int = 2048,
    projector_norm: str = "batch",
    projected: int = 64,
    normality: float = 0.05,
    directions: int = 256,
    prototypes: int = 4096,
    temperature: float = 0.1,
    teacher_temperature: float = 0.04,
    teacher_momentum: float = 0.996,
    balance: BalanceKind = "none",
    balance_strength: float = 1.0,
    counts: Sequence[int] = (),
    drawn: Sequence[int] | None = None,
) -> Objective:
    """Return the objective; "task" learns the targets of the model's task.

    Values that `kind` does not use are ignored, except mixing, which is an error. `counts` are the training images of
    each class, and `drawn` is how often an epoch shows them, if data.balance repeats some.
    """
    if kind == "classification":
        balanced = Balance(balance, balance_strength, counts, drawn)
        return Classification(model, loss=loss, label_smoothing=label_smoothing, mixing=mixing, balance=balanced)
    if kind == "task":
        if mixing.mixup or mixing.cutmix:
            raise ConfigError(
                f"data.mixing is for labels, and the task is {model.task.kind}: leave mixup and cutmix out"
            )
        return Supervised(model, model.task)
    if kind not in get_args(Kind):
        raise ConfigError(f"objective.kind = {kind!r}: give {', '.join(get_args(Kind)[:-1])} or {get_args(Kind)[-1]}")
    if mixing.mixup or mixing.cutmix:
        raise ConfigError(
            f"data.mixing mixes images with their labels, and {kind} has no labels: leave mixup and cutmix out"
        )
    if kind == "lejepa":
        return LeJepa(
            model,
            views=views,
            normality=normality,
            directions=directions,
            projector_width=projector_width,
            projected=projected,
            projector_norm=projector_norm,
            seed=seed,
        )
    if kind == "dino":
        return Dino(
            model,
            views=views,
            prototypes=prototypes,
            projector_width=projector_width,
            temperature=temperature,
            teacher_temperature=teacher_temperature,
            teacher_momentum=teacher_momentum,
            seed=seed,
        )
    if kind == "masked-autoencoding":
        return MaskedAutoencoding(
            model,
            hidden=hidden,
            normalised=normalised,
            decoder_width=decoder_width,
            decoder_depth=decoder_depth,
            decoder_heads=decoder_heads,
            seed=seed,
        )
    return MaskedPatches(model, target=target, corrupted=corrupted, masked=masked, swapped=swapped, seed=seed)
