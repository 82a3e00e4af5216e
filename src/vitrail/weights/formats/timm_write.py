"""Write timm's config.json: a name and arguments from which `timm.create_model("local-dir:…")` builds the same model.

timm has three classes for these models, and the architecture decides which one can hold it: `beit` for relative
positions, `eva` for rotary positions and keys without bias, `vit` for all others. JSON holds no layers, so what timm
gives as code (an eps, an RMS norm, a SwiGLU) must come from the name, and everything else from arguments.
"""

from __future__ import annotations

from typing import Any, Literal

from vitrail.errors import WeightsError
from vitrail.model.architecture import Architecture, Backbone, ResNetArchitecture, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.variants import RESNET_BLOCKS, SIZES
from vitrail.weights.formats.base import compute_mlp_ratio, explain_backbone_refusal
from vitrail.weights.formats.timm_config import GELUS, POOLS

HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
}
"""Names of hybrids by the blocks of their ResNet's stages."""
OUR_POOLS = {ours: theirs for theirs, ours in POOLS.items()}
OUR_GELUS = {ours: theirs for theirs, ours in GELUS.items()}


def choose_kind(a: VitArchitecture) -> Literal["vit", "eva", "beit"]:
    """Return which of timm's classes an architecture is written for."""
    if a.position == "relative-bias":
        return "beit"
    return "eva" if a.rotary or not a.key_bias or a.pool_heads or a.pool_mlp_dim else "vit"


def choose_words(a: VitArchitecture, earlier: str) -> str:
    """Return the dialect of the tensors' names: that in which the model came (`earlier`), if timm allows it."""
    kind, had = choose_kind(a), earlier.split("+")[1:]
    words = [""] if kind == "vit" else ["deit3"]
    if kind == "eva" and "split-qkv" in had:
        words.append("split-qkv")
    may_split = "split-gate" in had and a.norm_at == "before"
    if a.mlp == "swiglu":
        split = {"vit": _has_aimv2_norm(a), "eva": a.mlp_norm or may_split, "beit": True}[kind]
        words += ["split-gate"] if split else []
    return "+".join(words)


def explain_vit_refusal(a: VitArchitecture) -> str | None:
    """Return why timm cannot hold a Vision Transformer, or None if it can."""
    if a.backbone is not None:
        if why := explain_backbone_refusal(a.backbone):
            return why
        if a.mlp == "swiglu" or a.norm_at == "after" or choose_kind(a) != "vit":
            return "timm's hybrids have the blocks of its plain Vision Transformer only"
    kind = choose_kind(a)
    reasons = {
        "timm has no axial blocks and names its convolutional stems otherwise": a.block != "plain" or a.conv_stem,
        f'timm has no position embedding "{a.position}" added at "{a.position_at}"': (
            a.position not in ("none", "learned-1d", "relative-bias") or (kind != "beit" and a.position_at != "input")
        ),
        "timm has dropped the tanh layer of the pre-training head": a.representation_size,
        "timm has no pooling that puts the class token beside the average": a.pool == "class+average",
        "timm's patch projection has a bias exactly where no norm follows it": a.patch_bias == a.input_norm,
        "timm's blocks with norms behind the layers have no layer scale": a.norm_at == "after" and a.layer_scale,
        "timm's distilled DeiT has a position for each of its two tokens": (
            a.pool == "distilled" and (a.position_rows != 2 or kind != "vit")
        ),
    }
    if found := next((reason for reason, holds in reasons.items() if holds), None):
        return found
    return {"vit": _explain_plain_refusal, "eva": _explain_eva_refusal, "beit": _explain_beit_refusal}[kind](a)


def _explain_plain_refusal(a: VitArchitecture) -> str | None:
    if a.out_bias != a.mlp_bias:
        return "timm's Vision Transformer has biases in attention's output and in the MLP, or in neither"
    if a.mlp == "swiglu" and (a.norm_at == "after" or a.pool == "attention"):
        return "timm's Vision Transformer has no SwiGLU beside norms behind the layers or attention pooling"
    return None


def _explain_eva_refusal(a: VitArchitecture) -> str | None:
    needs = "a model with rotary positions, keys without bias or a pooling of its own sizes is an Eva of timm's, which"
    if a.norm != "layer" or not (a.out_bias and a.mlp_bias) or a.patch_norm:
        return f"{needs} has layer norm, all biases and no norm on patches"
    if a.gelu != "exact" and (a.mlp == "gelu" or a.pool == "attention"):
        return f"{needs} has the exact GELU"
    if a.pool == "attention" and a.prefix and not a.pool_prefix:
        return f"{needs} pools the class token and registers too"
    if a.norm_at == "after" and a.qk_norm:
        return f"{needs} has no norm on queries and keys beside norms behind the layers"
    if (r := a.rotary) is None:
        return None
    if r.coordinates == "unit" and (r.layout != "halves" or r.first != "row" or r.learned):
        return "timm turns dimensions in halves, rows first, if coordinates are between −1 and 1"
    if r.coordinates == "index" and r.layout != "pairs":
        return "timm turns dimensions in pairs if coordinates are rows and columns"
    if r.learned and (r.offset or r.reference_grid):
        return "timm's learned frequencies have no offset and no reference grid"
    return None


def _explain_beit_refusal(a: VitArchitecture) -> str | None:
    needs = "a model with a relative bias is a Beit of timm's, which"
    if a.rotary or a.registers or not a.class_token or a.input_norm or a.patch_norm or not a.final_norm:
        return f"{needs} has a class token, no registers, no rotary positions, and one norm outside of its blocks"
    if a.norm != "layer" or a.norm_at != "before" or a.qk_norm or a.attention_norm or not (a.out_bias and a.mlp_bias):
        return f"{needs} has layer norm before the layers, no norm inside attention, and all biases"
    if a.qkv_bias and a.key_bias:
        return f"{needs} has no bias of keys"
    if a.mlp == "gelu" and a.gelu != "exact":
        return f"{needs} has the exact GELU"
    if (a.pool, a.norm_after_pool) not in (("average", True), ("class", False)):
        return f"{needs} has its last norm behind average pooling, or before it the class token's"
    return None


def write_config(model: ImageModel, words: str) -> dict[str, Any]:
    """Return a config.json that `timm.create_model("local-dir:…")` understands; `words` are those of `choose_words`."""
    name, arguments = choose_name_and_arguments(model.architecture, words)
    resnet, preprocessing = isinstance(model.architecture, ResNetArchitecture), model.preprocessing
    pretrained: dict[str, Any] = {
        "input_size": [model.in_channels, *preprocessing.image_size],
        "mean": list(preprocessing.mean),
        "std": list(preprocessing.std),
        "crop_pct": preprocessing.crop_fraction,
        "crop_mode": "squash" if preprocessing.resize == "squash" else "center",
        "interpolation": preprocessing.interpolation,
        "num_classes": model.num_classes,
        "fixed_input_size": not resnet,
        # timm would adapt this layer to other channels, and from any but 3 it cannot.
        "first_conv": None if model.in_channels != 3 else "stem.conv" if resnet else "patch_embed.proj",
        "classifier": "head.fc" if resnet else "head",
    }
    if model.origin is not None and model.origin.licence is not None:
        pretrained["license"] = model.origin.licence
    config: dict[str, Any] = {
        "architecture": name,
        "num_classes": model.num_classes,
        "num_features": model.architecture.representation_width,
        "pretrained_cfg": pretrained,
        "model_args": arguments,
    }
    return config if model.labels is None else {**config, "label_names": list(model.labels)}


def choose_name_and_arguments(a: Architecture, words: str = "") -> tuple[str, dict[str, Any]]:
    """Return the name of a timm model, and the arguments that turn it into this architecture."""
    if isinstance(a, ResNetArchitecture):
        return _name_bit(a.backbone), {"in_chans": a.in_channels}
    arguments: dict[str, Any] = {
        "img_size": list(a.image_size),
        "in_chans": a.in_channels,
        "patch_size": a.patch_size,
        "embed_dim": a.width,
        "depth": a.depth,
        "num_heads": a.num_heads,
        "mlp_ratio": compute_mlp_ratio(a.mlp_dim, a.width),
        "qkv_bias": a.qkv_bias,
        # In some of timm's classes 0 means that there is no layer scale.
        "init_values": None if a.layer_scale is None else a.layer_scale or 1e-6,
    }
    match choose_kind(a):
        case "vit":
            return _name_vit(a), {**arguments, **_argue_vit(a, words)}
        case "eva":
            return _name_eva(a), {**arguments, **_argue_eva(a, words)}
        case "beit":
            return "beit_base_patch16_224", {**arguments, **_argue_beit(a)}


def _argue_vit(a: VitArchitecture, words: str) -> dict[str, Any]:
    gated, name = a.mlp == "swiglu", _name_vit(a)
    arguments: dict[str, Any] = {"act_layer": "silu" if gated else OUR_GELUS[a.gelu]}
    if a.pool == "distilled":
        return arguments
    if gated and "split-gate" not in words:
        arguments["mlp_ratio"] = compute_mlp_ratio(2 * a.mlp_dim, a.width)
    if gated and a.layer_scale is None:
        arguments["init_values"] = 0
    arguments |= {
        "global_pool": OUR_POOLS[a.pool],
        "class_token": a.class_token,
        "reg_tokens": a.registers,
        "no_embed_class": a.position_rows == 0,
        "pos_embed": "none" if a.position == "none" else "learn",
        "pre_norm": a.input_norm,
        "fc_norm": a.norm_after_pool,
    }
    norm_layer = "layernorm" if a.norm == "layer" else "rmsnorm"
    options = {
        "qk_norm": a.qk_norm,
        "scale_attn_norm": a.attention_norm,
        "scale_mlp_norm": a.mlp_norm,
        "pool_include_prefix": a.pool_prefix,
        "proj_bias": a.out_bias,
        "final_norm": a.final_norm,
        "norm_layer": norm_layer if a.norm == "rms" and not _has_aimv2_norm(a) else None,
    }
    if name.startswith("aimv2"):
        options["embed_norm_layer"] = None if a.patch_norm else ""
    else:
        options["embed_norm_layer"] = norm_layer if a.patch_norm else None
    usual = {"proj_bias": not name.startswith("aimv2"), "final_norm": True}
    return arguments | {key: value for key, value in options.items() if value not in (usual.get(key, False), None)}


def _argue_eva(a: VitArchitecture, words: str) -> dict[str, Any]:
    split = "split-gate" in words and not a.mlp_norm
    return {
        "global_pool": OUR_POOLS[a.pool],
        "qkv_fused": "split-qkv" not in words,
        "attn_type": "rope" if a.key_bias else "eva",
        "qk_norm": a.qk_norm,
        "swiglu_mlp": a.mlp == "swiglu",
        "swiglu_align_to": int(split),  # any number but 0 splits the gate, and 1 changes no width
        "scale_mlp": a.mlp_norm,
        "scale_attn_inner": a.attention_norm,
        "class_token": a.class_token,
        "num_reg_tokens": a.registers,
        "no_embed_class": a.position_rows == 0,
        "use_abs_pos_emb": a.position != "none",
        "use_post_norm": a.norm_at == "after",
        "use_pre_transformer_norm": a.input_norm,
        "use_post_transformer_norm": a.final_norm and not a.norm_after_pool,
        "use_fc_norm": a.norm_after_pool,
        "attn_pool_num_heads": a.pool_heads or a.num_heads,
        "attn_pool_mlp_ratio": compute_mlp_ratio(a.pool_mlp_dim or a.mlp_dim, a.width),
        **_argue_rotary(a),
    }


def _argue_rotary(a: VitArchitecture) -> dict[str, Any]:
    if (r := a.rotary) is None:
        return {"use_rot_pos_emb": False}
    arguments = {
        "use_rot_pos_emb": True,
        "rope_type": "mixed" if r.learned else "dinov3" if r.coordinates == "unit" else "cat",
        "rope_temperature": r.base,
        "rope_grid_offset": r.offset,
        "rope_grid_indexing": "xy" if r.first == "column" else "ij",
        "rope_rotate_half": r.layout == "halves",
        "ref_feat_shape": None if r.reference_grid is None else list(r.reference_grid),
        **{f"rope_{name}_coords": getattr(r, name) for name in ("shift", "jitter", "rescale")},
    }
    return {key: value for key, value in arguments.items() if value is not None}


def _argue_beit(a: VitArchitecture) -> dict[str, Any]:
    return {
        "global_pool": OUR_POOLS[a.pool],
        "swiglu_mlp": a.mlp == "swiglu",
        "scale_mlp": a.mlp_norm,
        "init_values": a.layer_scale or 0,
        "use_abs_pos_emb": False,
        "use_rel_pos_bias": a.position_at == "every-layer",
        "use_shared_rel_pos_bias": a.position_at == "shared",
    }


def _name_vit(a: VitArchitecture) -> str:
    if a.pool == "distilled":
        return "deit_base_distilled_patch16_224"
    if a.backbone is not None:
        return _name_hybrid(a.backbone)
    if a.norm_at == "after":
        return "vit_base_patch16_rpn_224"
    if a.mlp == "swiglu":
        return "aimv2_large_patch14_224" if _has_aimv2_norm(a) else "vit_giant_patch14_dinov2"
    if a.norm_eps == 1e-5 and a.norm == "layer" and not a.patch_norm:
        return "vit_base_patch16_clip_224"  # no argument can set the eps of its norms
    words = {"Ti": "tiny", "S": "small", "B": "base", "L": "large", "H": "huge", "g": "giant", "G": "gigantic"}
    letter = next((name for name in words if SIZES[name].width == a.width and SIZES[name].depth == a.depth), "B")
    return f"vit_{words[letter]}_patch{14 if letter in 'HgG' else 16}_224"


def _has_aimv2_norm(a: VitArchitecture) -> bool:
    """Return whether the norms are those of AIMv2, which timm builds with its SwiGLU of separate layers."""
    return a.mlp == "swiglu" and a.norm == "rms" and a.norm_eps == 1e-5


def _name_eva(a: VitArchitecture) -> str:
    if a.norm_eps == 1e-5 and a.layer_scale is not None:
        return "vit_small_patch16_dinov3"
    # Perception Encoder has a reference grid, which no argument can take away.
    if a.norm_eps == 1e-5 and (a.rotary is None or a.rotary.reference_grid or a.rotary.coordinates == "unit"):
        return "vit_pe_spatial_tiny_patch16_512"
    return "eva_giant_patch14_224"


def _name_bit(backbone: Backbone) -> str:
    depth = next((depth for depth, blocks in RESNET_BLOCKS.items() if blocks == backbone.blocks), 0)
    name = f"{depth}x{backbone.width_factor}"
    if name not in ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4"):
        raise WeightsError(f"this model cannot be written as timm: timm has no BiT ResNet {name}")
    return f"resnetv2_{name}_bit"


def _name_hybrid(backbone: Backbone) -> str:
    if backbone.blocks not in HYBRIDS or backbone.width_factor != 1:
        raise WeightsError(f"this model cannot be written as timm: no hybrid has ResNet blocks {backbone.blocks}")
    return HYBRIDS[backbone.blocks]
