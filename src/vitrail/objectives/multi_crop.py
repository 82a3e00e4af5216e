"""The common part of objectives that compare several views of an image.

Shapes: B images, V views (the two global ones first), D width of the representation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vitrail.data.loader import Batch
from vitrail.data.order import derive_seed
from vitrail.errors import ConfigError
from vitrail.model.base import ImageModel
from vitrail.model.cost import compute_cost
from vitrail.model.timm_model import TimmModel
from vitrail.model.vit import VisionTransformer
from vitrail.objectives.base import Objective
from vitrail.objectives.views import GLOBAL_VIEWS, Views, make_views


class MultiCropObjective(Objective):
    """Makes views of the images and encodes them, all of one size as one batch. Labels are not read."""

    def __init__(self, model: ImageModel, views: Views) -> None:
        """Take a model whose head, if it has one, stays as it is."""
        super().__init__(model)
        if isinstance(model, TimmModel):
            raise ConfigError('views of several sizes are for vitrail\'s own networks: choose one, such as "S/16"')
        self.views = views
        self.local_size = choose_local_size(model, views)
        self.model.head.requires_grad_(False)

    @property
    def source_size(self) -> tuple[int, int]:
        """Height and width of the images, neither cropped nor changed, that training batches must have."""
        height, width = self.model.image_size
        return math.ceil(height * self.views.source_scale), math.ceil(width * self.views.source_scale)

    def make_global_views(self, batch: Batch, key: int) -> Tensor:
        """Return (2 · B, C, height, width) float32, normalised for the model."""
        size, key = self.model.image_size, derive_seed(key, 0)
        return self._normalise(make_views(batch.images, batch.indices, key, self.views, size, is_global=True))

    def make_local_views(self, batch: Batch, key: int) -> Tensor:
        """Return (local views · B, C, *local_size) float32, normalised for the model."""
        size, key = self.local_size, derive_seed(key, 1)
        return self._normalise(make_views(batch.images, batch.indices, key, self.views, size, is_global=False))

    def embed_views(self, global_views: Tensor, local_views: Tensor | None) -> Tensor:
        """Return the (V, B, D) representations of all views."""
        embedded = [self.model.embed(views) for views in (global_views, local_views) if views is not None]
        stacked: Tensor = torch.cat(embedded).unflatten(0, (-1, len(global_views) // GLOBAL_VIEWS))
        return stacked

    def select_counted(self, embedded: Tensor, batch: Batch) -> Tensor:
        """Return (V, B, D) without the images that an evaluation does not count; all of them in training."""
        return embedded if self.training else embedded[:, batch.mask]

    def count_flops(self) -> int:
        """Return the operations of one forward pass of all views of one image, without the projection."""
        local = compute_cost(self.model.architecture, self.local_size).flops if self.views.local_count else 0
        return GLOBAL_VIEWS * compute_cost(self.model.architecture).flops + self.views.local_count * local

    def parts_to_compile(self) -> list[nn.Module]:
        """Return the blocks of a Vision Transformer: the model itself is never called as a whole."""
        return [self.model.encoder] if isinstance(self.model, VisionTransformer) else []

    def _normalise(self, views: Tensor) -> Tensor:
        return (views.float() / 255 - self.mean) / self.std


def choose_local_size(model: ImageModel, views: Views) -> tuple[int, int]:
    """Return the height and width of local views, in whole patches.

    Raises:
        ConfigError: The model takes images of one size only.
    """
    stride = model.stride if isinstance(model, VisionTransformer) else 1
    height, width = (max(1, round(side * views.local_scale / stride)) * stride for side in model.image_size)
    if not views.local_count or (height, width) == model.image_size:
        return height, width
    if isinstance(model, VisionTransformer) and model.position == "relative":
        raise ConfigError(
            "the paper's relative positions are for one image size, and local views are smaller: choose other "
            "positions, or give objective.views.local_count=0"
        )
    return height, width
