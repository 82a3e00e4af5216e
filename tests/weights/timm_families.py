"""timm's families, scaled down: every kind of block, position and pooling, with random values in every parameter."""

from __future__ import annotations

import contextlib
import copy
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peers import timm

SMALL: dict[str, Any] = {"embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 7}
AT_14 = {**SMALL, "img_size": 84}  # patches of 14: a grid of 6×6
AT_16 = {**SMALL, "img_size": 96}  # patches of 16: a grid of 6×6

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("vit_base_patch16_224", AT_16),
    "DINOv2": ("vit_small_patch14_dinov2", AT_14),
    "DINOv2 with registers": ("vit_small_patch14_reg4_dinov2", AT_14),
    "DINOv2 giant, packed SwiGLU": ("vit_giant_patch14_reg4_dinov2", {**AT_14, "mlp_ratio": 5.25}),
    "TIPS v2": ("vit_base_patch14_reg1_tipsv2", AT_14),
    "DINOv3": ("vit_small_patch16_dinov3", AT_16),
    "DINOv3 with biases": ("vit_base_patch16_dinov3_qkvb", AT_16),
    "DINOv3 by its class token": ("vit_large_patch16_dinov3", {**AT_16, "global_pool": "token"}),
    "DINOv3 H+, SwiGLU": ("vit_huge_plus_patch16_dinov3", AT_16),
    "DINOv3 7B": ("vit_7b_patch16_dinov3", AT_16),
    "LingBot": ("vit_small_patch16_lingbot", AT_16),
    "LingBot giant": ("vit_giant_patch16_lingbot", AT_16),
    "EVA": ("eva_giant_patch14_224", AT_14),
    "EVA of CLIP": ("eva_giant_patch14_clip_224", AT_14),
    "EVA-02, packed SwiGLU": ("eva02_tiny_patch14_224", AT_14),
    "EVA-02, separate layers and a norm": ("eva02_base_patch14_448", AT_14),
    "EVA-02 of CLIP, norm in attention": ("eva02_large_patch14_clip_336", AT_14),
    "EVA-02 E, norms behind the layers": ("eva02_enormous_patch14_clip_224", AT_14),
    "BEiT": ("beit_base_patch16_224", AT_16),
    "BEiT v2": ("beitv2_large_patch16_224", AT_16),
    "BEiT with a shared table": (
        "beit_base_patch16_224",
        {**AT_16, "use_rel_pos_bias": False, "use_shared_rel_pos_bias": True, "global_pool": "token"},
    ),
    "BEiT-3": ("beit3_base_patch16_224", AT_16),
    "SigLIP": ("vit_base_patch16_siglip_224", AT_16),
    "SigLIP 2, tanh GELU": ("vit_so400m_patch16_siglip_256", AT_16),
    "SigLIP by average": ("vit_base_patch16_siglip_gap_224", AT_16),
    "CLIP": ("vit_base_patch16_clip_224", AT_16),
    "CLIP with quick GELU": ("vit_base_patch16_clip_quickgelu_224", AT_16),
    "Perception Encoder": ("vit_pe_core_base_patch16_224", {**AT_16, "num_heads": 2}),
    "Perception Encoder G": ("vit_pe_core_gigantic_patch14_448", {**AT_14, "num_heads": 2}),
    "Perception Encoder, lang": ("vit_pe_lang_large_patch14_448", AT_14),
    "Perception Encoder, spatial": ("vit_pe_spatial_tiny_patch16_512", AT_16),
    "AIMv2": ("aimv2_large_patch14_224", AT_14),
    "DeiT III": ("deit3_small_patch16_224", AT_16),
    "FlexiViT": ("flexivit_small", AT_16),
    "InternViT, no last norm": ("vit_intern300m_patch14_448", AT_14),
    "RoPE": ("vit_small_patch16_rope_224", AT_16),
    "RoPE with a table": ("vit_base_patch16_rope_ape_224", AT_16),
    "RoPE, learned": ("vit_small_patch16_rope_mixed_224", AT_16),
    "RoPE, learned, with a table": ("vit_base_patch16_rope_mixed_ape_224", AT_16),
    "RoPE with registers": ("vit_medium_patch16_rope_reg1_gap_256", AT_16),
    "norms behind the layers": ("vit_base_patch16_rpn_224", AT_16),
    "RMS norm": ("test_vit4", AT_16),
    "attention pooling of registers": ("test_vit3", AT_16),
    "norm of queries and keys": ("vit_base_patch16_224", {**AT_16, "qk_norm": True}),
    "no biases": ("vit_base_patch16_224", {**AT_16, "qkv_bias": False, "proj_bias": False}),
    "R+Ti/16, a root without stages": ("vit_tiny_r_s16_p8_224", {**SMALL, "img_size": 64}),
    "R26+S/32": ("vit_small_r26_s32_224", {**SMALL, "img_size": 64}),
}
"""Names of timm's and arguments that make them small."""
SIZES = {"native": (1, 1), "larger": (1.5, 1.5), "smaller": (0.5, 0.5), "not square": (0.5, 1.5)}
"""Factors on the native height and width."""


class _FloatsAreDoubles(types.ModuleType):
    """torch, except that its float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def computing_exactly() -> Iterator[None]:
    """Let timm compute in float64 what it rounds to float32: rotary angles, and the resizing of position tables."""
    module = timm.layers.pos_embed_sincos
    functions = [part for part in vars(module).values() if isinstance(part, types.FunctionType)]
    for kind in vars(module).values():
        if isinstance(kind, type) and kind.__module__ == module.__name__:
            functions += [part for part in vars(kind).values() if isinstance(part, types.FunctionType)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "torch", _FloatsAreDoubles("torch"))
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for function in functions:
            defaults = [torch.float64 if value is torch.float32 else value for value in function.__defaults__ or ()]
            patch.setattr(function, "__defaults__", tuple(defaults) or None)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


@torch.no_grad()
def build_family(family: str) -> nn.Module:
    """Build timm's model in float64, with every parameter shifted and buffers as they are."""
    name, options = FAMILIES[family]
    model = timm.create_model(name, **options)
    generator = torch.Generator().manual_seed(0)
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.2
        is_scale = parameter.ndim == 1 and not parameter_name.endswith("bias")
        parameter.copy_(1 + noise if is_scale else noise)
    return use_float64(model.eval())


def use_float64(model: nn.Module) -> nn.Module:
    """Return the model in float64, with the tables that timm computes in float32 computed anew."""
    model = model.double()
    rope = getattr(model, "rope", None)
    with computing_exactly():
        if hasattr(rope, "periods"):
            rope.periods = rope._compute_periods()
            if rope.pos_embed_cached is not None:
                rope._cache_embed(rope.feat_shape)
        elif getattr(rope, "bands", None) is not None:
            rope.bands = rope._compute_bands(dtype=torch.float64)
        elif getattr(rope, "pos_embed", None) is not None:
            rope.pos_embed = rope._get_pos_embed_values(rope.feat_shape, dtype=torch.float64)
    return model


def write_folder(family: str, model: nn.Module, folder: Path) -> Path:
    """Write the folder as timm writes to the hub."""
    timm.models.save_for_hf(model, folder, model_args=FAMILIES[family][1], safe_serialization=True)
    return folder


@torch.no_grad()
def run_peer(family: str, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the representation and logits that timm computes at the images' size."""
    size = tuple(images.shape[2:])
    with computing_exactly():
        if size != tuple(model.patch_embed.img_size):
            model = _resize_peer(family, model, size)
        features = model.forward_features(images)
        return model.forward_head(features, pre_logits=True), model.forward_head(features)


def _resize_peer(family: str, model: nn.Module, size: tuple[int, ...]) -> nn.Module:
    if type(model).__name__ != "Beit":
        model = copy.deepcopy(model)
        model.set_input_size(img_size=size)
        return model
    # timm resizes a Beit only when it loads weights into one of another size.
    name, options = FAMILIES[family]
    resized = timm.create_model(name, **{**options, "img_size": size}).double().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # timm's indexing is of an older torch
        resized.load_state_dict(timm.models.beit.checkpoint_filter_fn(dict(model.state_dict()), resized))
    return resized
