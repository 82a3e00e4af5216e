"""What follows from the name of a timm model, and neither its tensors nor its config.json show.

timm builds a model from a name and arguments, and config.json holds the name and the arguments that were changed.
Rotary positions, the number of heads, the form of GELU and the eps of norms leave no trace in the tensors, so a table
here lists them by part of a name, in timm's own words for its arguments. Three words are not timm's, because its
builders hold them as code: `norm_eps`, `head_dim` (the width of a head) and `is_eva` (built by timm's eva file, whose
pooling differs).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

Facts = Mapping[str, Any]

ROTARY_BY_INDEX: Facts = {"is_eva": True, "use_rot_pos_emb": True, "rope_type": "cat", "rope_temperature": 10000.0}
EVA02: Facts = {**ROTARY_BY_INDEX, "ref_feat_shape": (16, 16), "norm_eps": 1e-6}
DINOV3: Facts = {
    "is_eva": True,
    "use_rot_pos_emb": True,
    "rope_type": "dinov3",
    "rope_temperature": 100.0,
    "rope_rotate_half": True,
    "norm_eps": 1e-5,
    "global_pool": "avg",
    "head_dim": 64,
}
PERCEPTION: Facts = {
    **ROTARY_BY_INDEX,
    "rope_grid_indexing": "xy",
    "rope_grid_offset": 1.0,
    "attn_pool_num_heads": 8,
    "norm_eps": 1e-5,
    "head_dim": 64,
}
PERCEPTION_G: Facts = {**PERCEPTION, "rope_grid_offset": 0.0, "head_dim": 96}
AXIAL_ROPE: Facts = {**ROTARY_BY_INDEX, "rope_temperature": 100.0, "rope_grid_indexing": "xy"}
MIXED_ROPE: Facts = {**AXIAL_ROPE, "rope_type": "mixed", "rope_temperature": 10.0}
ENORMOUS: Facts = {"is_eva": True, "use_rot_pos_emb": False, "use_post_norm": True, "num_heads": 16, "norm_eps": 1e-6}

TANH: Facts = {"act_layer": "gelu_tanh"}
TANH_GELU = (
    *("base_patch32_siglip", "so400m_patch16_siglip", "giantopt_patch16_siglip"),
    *("large_patch16_siglip_512", "large_patch16_siglip_gap_512"),
)
NO_FINAL_NORM: Facts = {"final_norm": False}
PERCEPTION_BY_AVERAGE: Facts = {**NO_FINAL_NORM, "global_pool": "avg"}
"""Perception Encoder without attention pooling: lang and spatial."""
SIXTEEN_HEADS: Facts = {"num_heads": 16}

FACTS: Mapping[str, Facts] = {
    "_clip_": {"norm_eps": 1e-5},
    "eva": {"norm_eps": 1e-6},
    "eva_giant": {"is_eva": True},
    "eva02_": EVA02,
    "eva02_enormous": ENORMOUS,
    "_rpn_": {"use_post_norm": True},
    "beit3": {"norm_eps": 1e-5},
    "aimv2": {"norm_eps": 1e-5, "head_dim": 128},
    "dinov3": DINOV3,
    "vit_7b_": {"head_dim": 128},
    "lingbot": {**DINOV3, "global_pool": "token"},
    "_rope_": AXIAL_ROPE,
    "_rope_mixed_": MIXED_ROPE,
    "_rope_reg": {**EVA02, "rope_grid_indexing": "ij"},
    "vit_pe_": PERCEPTION,
    **dict.fromkeys(("pe_core_gigantic", "pe_lang_gigantic", "pe_spatial_gigantic"), PERCEPTION_G),
    **dict.fromkeys(("pe_lang", "pe_spatial"), PERCEPTION_BY_AVERAGE),
    "intern300m": NO_FINAL_NORM,
    "quickgelu": {"act_layer": "quick_gelu"},
    **dict.fromkeys(TANH_GELU, TANH),
    **dict.fromkeys(("vit_base_patch16_gap_224", "so400m", "giantopt"), SIXTEEN_HEADS),
    "test_vit": {"num_heads": 2},
    "test_vit3": {"num_heads": 3, "pool_include_prefix": True},
    "test_vit4": {"num_heads": 3},
}
"""Arguments by part of a model's name. If several parts fit, later ones replace what earlier ones say."""


def find_facts(name: str) -> dict[str, Any]:
    """Return the arguments that follow from the name of a timm model and that its tensors do not show."""
    found: dict[str, Any] = {}
    for part, facts in FACTS.items():
        if part in name:
            found |= facts
    # Perception Encoder's coordinates are those of the size that the name says.
    if "vit_pe_" in name and (size := re.search(r"patch([1-9]\d{0,5})_([1-9]\d{0,5})(?!\d)", name)):
        side = int(size[2]) // int(size[1])
        found["ref_feat_shape"] = (side, side)
    return found


def recognise_family(
    names: Collection[str], width: int, swiglu: bool, grid: tuple[int, int] | None
) -> tuple[str, Facts]:
    """Return the family that only certain tensors can belong to, and its facts; empty if it may be a plain ViT.

    Args:
        names: the names of all tensors.
        width: D.
        swiglu: whether its MLPs are SwiGLUs.
        grid: rows and columns of patches of the position table, if there is one.
    """
    if "rope.freqs" in names:
        return "a RoPE ViT with learned frequencies", MIXED_ROPE
    if "patch_embed.norm.weight" in names and swiglu:
        return "AIMv2", FACTS["aimv2"]
    if "blocks.0.attn.norm.weight" in names and "blocks.0.attn.qkv.bias" in names:
        return "BEiT-3", FACTS["beit3"]
    if "norm_pre.weight" in names and ("attn_pool.latent" in names or not {"norm.weight", "fc_norm.weight"} & {*names}):
        facts = PERCEPTION if "cls_token" in names else PERCEPTION_G
        pooling = {} if "attn_pool.latent" in names else PERCEPTION_BY_AVERAGE
        return "Perception Encoder", {**facts, **pooling, "ref_feat_shape": grid}
    if "pos_embed" in names:
        without_key_bias = "blocks.0.attn.q_bias" in names or "blocks.0.attn.q_proj.weight" in names
        if without_key_bias and width == 1792:
            return "EVA-02 E", ENORMOUS
        return ("EVA-02", EVA02) if without_key_bias and swiglu else ("", {})
    if "blocks.0.gamma_1" not in names or any("relative_position_bias_table" in name for name in names):
        return "", {}
    if "reg_token" in names:
        if "cls_token" in names:
            return "DINOv3", {**DINOV3, "head_dim": 128 if width == 4096 else 64}
        return "a RoPE ViT with registers", FACTS["_rope_reg"]
    return "a RoPE ViT", AXIAL_ROPE


def may_be_rope_ape(names: Collection[str]) -> bool:
    """Return whether a file of no other family is DeiT III's or RoPE-APE's: both have the same tensors."""
    return "blocks.0.gamma_1" in names and "pos_embed" in names and "blocks.0.attn.qkv.bias" in names
