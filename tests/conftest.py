"""Shared by all tests: small models whose every parameter is random, and random images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import vitrail

SMALL = {"width": 32, "depth": 2, "mlp_dim": 48, "num_heads": 4, "image_size": (16, 24), "num_classes": 7}
"""A ViT of patch 8 on a grid of 2 × 3: small, and no two of its sizes are equal."""


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int = 0, scale: float = 0.1) -> torch.nn.Module:
    """Fill every parameter, so that nothing is hidden behind a zero or a one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
        parameter.copy_(noise + (1.0 if parameter.ndim == 1 else 0.0))
    return model.eval()


@pytest.fixture
def small_vit() -> Callable[..., Any]:
    def build(name: str = "S/8", **options: Any) -> Any:
        dtype = options.pop("dtype", None)
        return randomise(vitrail.create_model(name, **{**SMALL, **options}).to(dtype))

    return build


def images(batch: int = 2, size: tuple[int, int] = (16, 24), channels: int = 3, seed: int = 1, **kind: Any) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, channels, *size, generator=generator, dtype=torch.float64).to(
        **{"dtype": torch.float32, **kind}
    )
