"""Build an objective from the values of a run's configuration."""

from __future__ import annotations

from typing import Literal

from vitrail.data.transforms.mixing import Mixing
from vitrail.errors import ConfigError
from vitrail.model.base import ImageModel
from vitrail.objectives.base import Objective
from vitrail.objectives.classification import Classification, Loss
from vitrail.objectives.masked_autoencoding import MaskedAutoencoding
from vitrail.objectives.masked_patches import MaskedPatches, Target


def build_objective(
    model: ImageModel,
    *,
    kind: Literal["classification", "masked-patches", "masked-autoencoding"],
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
) -> Objective:
    """Return the objective. Values that `kind` does not use are ignored, except mixing, which is an error."""
    if kind == "classification":
        return Classification(model, loss=loss, label_smoothing=label_smoothing, mixing=mixing)
    if kind not in ("masked-patches", "masked-autoencoding"):
        raise ConfigError(f"objective.kind = {kind!r}: give classification, masked-patches or masked-autoencoding")
    if mixing.mixup or mixing.cutmix:
        raise ConfigError(
            f"data.mixing mixes images with their labels, and {kind} has no labels: leave mixup and cutmix out"
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
