"""What tests share: small models whose every parameter is random, and random images."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail

SMALL = {"width": 32, "depth": 2, "mlp_dim": 48, "num_heads": 4, "image_size": (16, 24), "num_classes": 7}
"""A ViT of patch 8 on a grid of 2 × 3: small, and no two of its sizes are equal."""


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int = 0, scale: float = 0.1) -> Any:
    """Fill every parameter, so that nothing hides behind a zero or a one; ready to evaluate."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
        parameter.copy_(noise + (1.0 if parameter.ndim == 1 else 0.0))
    return model.eval()


def small_vit(name: str = "S/8", dtype: torch.dtype | None = None, **options: Any) -> Any:
    return randomise(vitrail.create_model(name, dtype=dtype, **{**SMALL, **options}))


def images(
    batch: int = 2, size: tuple[int, int] = (16, 24), channels: int = 3, dtype: torch.dtype = torch.float32
) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, channels, *size, generator=generator, dtype=torch.float64).to(dtype)


def mark_slow(names: Iterable[str], quick: set[str]) -> list[Any]:
    """Return parameters of a test: those that are not quick run with the slow tests."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]
