"""Build an objective from the values of a run's configuration."""

from __future__ import annotations

from typing import Literal

from vitrail.data.transforms.mixing import Mixing
from vitrail.errors import ConfigError
from vitrail.model.base import ImageModel
from vitrail.objectives.base import Objective
from vitrail.objectives.classification import Classification, Loss
from vitrail.objectives.masked_patches import MaskedPatches, Target


def build_objective(
    model: ImageModel,
    *,
    kind: Literal["classification", "masked-patches"],
    loss: Loss,
    label_smoothing: float,
    target: Target,
    corrupted: float,
    masked: float,
    swapped: float,
    mixing: Mixing,
    seed: int,
) -> Objective:
    """Return the objective. Values that `kind` does not use are ignored, except mixing, which is an error."""
    if kind == "classification":
        return Classification(model, loss=loss, label_smoothing=label_smoothing, mixing=mixing)
    if kind != "masked-patches":
        raise ConfigError(f"objective.kind = {kind!r}: give classification or masked-patches")
    if mixing.mixup or mixing.cutmix:
        raise ConfigError(
            "data.mixing mixes images with their labels, and masked patches have no labels: leave mixup and cutmix out"
        )
    return MaskedPatches(model, target=target, corrupted=corrupted, masked=masked, swapped=swapped, seed=seed)
