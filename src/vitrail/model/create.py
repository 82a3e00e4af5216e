"""`create_model` builds a model with fresh weights from a name."""

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
    """Create a model with fresh weights, initialised as in the authors' released code.

    Args:
        name: SIZE/PATCH ("Ti/16", "S/8", "B/16", "L/32", "H/14"), a hybrid ("R50+B/16") or a BiT ResNet
            ("BiT-R50x1"); `vitrail models` lists them.
        seed: the same seed gives the same weights on every device; None draws from torch's global generator.
        head_bias: initial bias of the head.
        device: where the parameters live; torch's default device if None. "meta" gives shapes without memory.
        dtype: floating-point type of the parameters; values are drawn in float32 first.
        options: fields of `VitArchitecture` (or `ResNetArchitecture`), with the paper's values as defaults:
            image_size: pixels, or (height, width); the patch size must divide it. 224.
            in_channels: channels of an image. 3.
            num_classes: 0 leaves the head out. 1000.
            pool: "class", "average", "attention", "class+average" or "distilled".
            position: "learned-1d", "learned-2d", "sin-cos", "relative" or "none".
            position_at: "input", "every-layer" or "shared" (every layer adds the same table).
            representation_size: width of the tanh layer of the pre-training head; None leaves it out.
            conv_stem: layers (channels, kernel, stride, norm, activation) instead of the patch projection; or None.
            registers: number of learned tokens after the class token. 0.
            layer_scale: initial factor of the residual branches; None leaves it out.
            dropout, attention_dropout, stochastic_depth: rates in [0, 1), all 0.
            width, depth, mlp_dim, num_heads, patch_size: replace those of the name.
            The others are documented at the class.

    Returns:
        A `VisionTransformer` or a `BitResNet`, in training mode.

    Raises:
        ConfigError: an unknown name or option, or values that do not fit together.
    """
    target = parse_device(device) if device is not None else torch.get_default_device()
    check_dtype(dtype)
    model = build_empty_model(make_architecture(name, **options))
    if target.type != "meta":
        # Values are drawn on the CPU, so that a seed gives the same weights on every device.
        model = model.to_empty(device="cpu")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        initialise(model, generator, head_bias)
    return model.to(device=target, dtype=dtype)


@overload
def build_empty_model(make_architecture: Architecture) -> VisionTransformer | BitResNet: ...
@overload
def build_empty_model(make_architecture: TimmArchitecture) -> TimmModel: ...
def build_empty_model(make_architecture: Architecture | TimmArchitecture) -> VisionTransformer | BitResNet | TimmModel:
    """Build the network of an architecture on the meta device, without memory or values."""
    if isinstance(make_architecture, TimmArchitecture):
        return TimmModel(make_architecture)
    with torch.device("meta"):
        if isinstance(make_architecture, ResNetArchitecture):
            return BitResNet(make_architecture)
        return VisionTransformer(make_architecture)


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise a ConfigError if `dtype` is not a floating-point type of torch."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype = {dtype!r}: give a floating-point type such as torch.bfloat16")
