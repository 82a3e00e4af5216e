"""From a name to a model."""

from __future__ import annotations

from typing import Any, overload

import torch

from vitrail.errors import ConfigError
from vitrail.model.architecture import Architecture, ResNetArchitecture, TimmArchitecture
from vitrail.model.bit import BitResNet
from vitrail.model.initialise import initialise
from vitrail.model.timm_model import TimmModel
from vitrail.model.variants import make_architecture
from vitrail.model.vit import VisionTransformer
from vitrail.system.device import parse_device


def create_model(
    name: str,
    *,
    seed: int | None = None,
    head_bias: float = 0.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> VisionTransformer | BitResNet:
    """A model with fresh weights: "B/16", "R50+B/16", "BiT-R50x1", "S/8", "H/14", …

    Args:
        name: see `vitrail models`.
        seed: the same seed gives the same weights, whatever the device; None draws from torch's global generator.
        head_bias: initial bias of the head.
        device: where the parameters live; torch's default device if None. "meta" gives shapes without memory.
        dtype: of the parameters; values are drawn in float32 first.
        options: the fields of the architecture (`VitArchitecture`, `ResNetArchitecture`), such as image_size=224,
            in_channels=3, num_classes=1000, pool="class", position="learned-1d", representation_size=None,
            conv_stem=None, registers=0, layer_scale=None, dropout=0.0, attention_dropout=0.0, stochastic_depth=0.0.
    """
    target = parse_device(device) if device is not None else torch.get_default_device()
    check_dtype(dtype)
    model = build_empty_model(make_architecture(name, **options))
    if target.type != "meta":
        # Drawn on the CPU, so that a seed means the same weights everywhere.
        model = model.to_empty(device="cpu")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        initialise(model, generator, head_bias)
    return model.to(device=target, dtype=dtype)


@overload
def build_empty_model(make_architecture: Architecture) -> VisionTransformer | BitResNet: ...
@overload
def build_empty_model(make_architecture: TimmArchitecture) -> TimmModel: ...
def build_empty_model(make_architecture: Architecture | TimmArchitecture) -> VisionTransformer | BitResNet | TimmModel:
    """The empty network of an architecture, on the meta device: no memory, no values."""
    if isinstance(make_architecture, TimmArchitecture):
        return TimmModel(make_architecture)
    with torch.device("meta"):
        if isinstance(make_architecture, ResNetArchitecture):
            return BitResNet(make_architecture)
        return VisionTransformer(make_architecture)


def check_dtype(dtype: torch.dtype | None) -> None:
    """Refuse what is no floating-point type of torch's."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype = {dtype!r}: give a floating-point type such as torch.bfloat16")
