"""Small architectures of every kind of encoder that people use, for tests of what is done with them."""

from __future__ import annotations

from typing import Any

import vitrail
from samples import randomise

SMALL = {"width": 32, "depth": 2, "mlp_dim": 48, "num_heads": 2, "image_size": (16, 24), "num_classes": 5}
"""A ViT of patch 4 on a grid of 4 × 6, with heads of 16."""
UNIT = {"coordinates": "unit", "base": 100.0, "layout": "halves"}
INDEX = {"coordinates": "index", "base": 10000.0, "layout": "pairs"}

ENCODERS: dict[str, dict[str, Any]] = {
    "dinov2": {"layer_scale": 1.0, "position_resize": "bicubic-offset", "pool": "class+average"},
    "dinov2 giant, registers": {"mlp": "swiglu", "layer_scale": 1.0, "registers": 4, "position_resize": "bicubic"},
    "dinov3": {
        "position": "none", "rotary": {**UNIT, "rescale": 2.0, "jitter": 1.2, "shift": 0.1}, "registers": 4,
        "key_bias": False, "layer_scale": 1e-5,
    },
    "dinov3 7b": {
        "position": "none", "rotary": UNIT, "registers": 4, "qkv_bias": False, "mlp": "swiglu", "layer_scale": 1e-5,
        "pool": "average", "class_token": True,
    },
    "siglip": {"pool": "attention", "position_resize": "bicubic"},
    "eva-02": {
        "rotary": {**INDEX, "reference_grid": (3, 3)}, "mlp": "swiglu", "mlp_norm": True, "attention_norm": True,
        "key_bias": False, "pool": "average", "class_token": True, "norm_after_pool": True,
    },
    "beit": {
        "position": "relative-bias", "position_at": "every-layer", "key_bias": False, "layer_scale": 0.1,
        "pool": "average", "class_token": True, "norm_after_pool": True,
    },
    "beit, shared bias": {"position": "relative-bias", "position_at": "shared", "key_bias": False},
    "perception encoder": {
        "rotary": {**INDEX, "offset": 1.0, "first": "column"}, "pool": "attention", "pool_heads": 4,
        "pool_mlp_dim": 40, "pool_prefix": True, "class_token": True, "input_norm": True,
    },
    "mixed rope": {"rotary": {**INDEX, "base": 10.0, "learned": True}, "position": "none"},
    "aimv2": {
        "norm": "rms", "mlp": "swiglu", "mlp_bias": False, "qkv_bias": False, "out_bias": False, "patch_norm": True,
        "pool": "average", "position": "sin-cos",
    },
    "norms behind": {"norm_at": "after", "qk_norm": True, "final_norm": False, "pool": "average"},
    "query and key norms": {"qk_norm": True, "norm": "rms"},
}  # fmt: skip
"""The options of each kind, in the words of `create_model`."""


def small_encoder(kind: str, **options: Any) -> Any:
    """A model of one kind with every parameter random, ready to evaluate."""
    return randomise(vitrail.create_model("Ti/4", **{**SMALL, **ENCODERS[kind], **options}))


def small_hybrid(**options: Any) -> Any:
    """A hybrid of stride 4 with rotary positions and attention pooling."""
    model = vitrail.create_model(
        "R26+S/32",
        **{**SMALL, "patch_size": 1, "root": "small", "stage_channels": 32, "blocks": (1, 1, 1), "rotary": UNIT,
           "pool": "attention", **options},
    )  # fmt: skip
    return randomise(model)
