"""Attention rollout for the server: where a model looked, by layer."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.transforms.preprocess import normalise
from vitrail.errors import ConfigError, NotApplicableError
from vitrail.inference.engine import Engine, get_model
from vitrail.inspection.measure.anatomy import patch_grid, prefix_names
from vitrail.inspection.measure.attention import rollout_by_layer

Array = NDArray[Any]


class AttentionRollout:
    """Computes the attention rollout of the model behind an engine.

    Attributes:
        layers: L, the number of attention layers; None if there is no attention to show.
        why_none: why there is none.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.layers: int | None = None
        self.why_none = ""
        try:
            self.layers = self(engine.make_blank()).shape[1]
        except (NotApplicableError, ConfigError) as error:
            self.why_none = str(error)

    def __call__(self, pixels: Tensor) -> Array:
        """(B, C, height, width) uint8 → (B, L, rows, columns): the rollout up to each layer."""
        model = get_model(self.engine)
        like = next(model.parameters())
        images = normalise(pixels.to(like.device), self.engine.preprocessing, like.dtype)
        rows = rollout_by_layer(model, images)[:, :, len(prefix_names(model)) :]
        return rows.reshape(*rows.shape[:2], *patch_grid(model, images))
