"""Position tables that are not interpolated, to compare with."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.model.base import ImageModel
from vitrail.model.positions import LearnedPositions1d
from vitrail.model.vit import VisionTransformer

DEVIATION = 0.02
"""The standard deviation of new position embeddings."""


@torch.no_grad()
def replace_positions(model: ImageModel, size: int, keeps_order: bool, seed: int) -> VisionTransformer:
    """Resize a model, and give its patches fresh position embeddings instead of interpolated ones.

    Args:
        model: A Vision Transformer with a learned table; it is changed.
        size: The new resolution.
        keeps_order: Whether the old rows stand first, in their old order; the rest is fresh.
        seed: The seed of fresh rows.
    """
    assert isinstance(model, VisionTransformer)
    old = get_patch_rows(model).clone()
    model.resize(size)
    rows = get_patch_rows(model)
    rows.copy_(DEVIATION * torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed)))
    if keeps_order:
        rows[: len(old)] = old[: len(rows)]
    return model


def get_patch_rows(model: VisionTransformer) -> Tensor:
    """Return the position embeddings of the patches, (N, D), as a view of the model's table."""
    (embedding,) = model.position_embedding
    assert isinstance(embedding, LearnedPositions1d)
    return embedding.table[embedding.prefix :]
