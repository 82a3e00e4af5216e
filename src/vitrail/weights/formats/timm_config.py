"""Read and write timm's config.json.

timm builds a model from a name and arguments. Some options follow from the name alone; tables here list those names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from vitrail.config import Preprocessing
from vitrail.errors import WeightsError
from vitrail.model.architecture import Architecture, Backbone, ResNetArchitecture, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.variants import RESNET_BLOCKS, SIZES
from vitrail.weights.formats.base import (
    FolderFiles,
    ForeignConfig,
    build_preprocessing,
    compute_mlp_ratio,
    describe_left_out_labels,
    guess_num_heads,
)

POOLS = {"token": "class", "avg": "average", "map": "attention"}
GELUS = {"gelu": "exact", "gelu_tanh": "tanh", "quick_gelu": "quick"}
HEADS = {"vit_base_patch16_gap_224": 16, "so400m": 16, "giantopt": 16, "test_vit3": 3, "test_vit4": 3, "test_vit": 2}
"""Number of heads by part of a model's name, for models that differ from others of their width."""
TANH = (
    *("base_patch32_siglip", "so400m_patch16_siglip", "giantopt_patch16_siglip"),
    *("large_patch16_siglip_512", "large_patch16_siglip_gap_512"),
)
"""Parts of the names of models whose GELU is the tanh form although their config does not say so."""
ROTARY = dict.fromkeys(("_rope", "dinov3", "vit_pe_", "eva02", "vitamin"), "rotary positions")
UNSEEN = {**ROTARY, "_rpn_": "norms behind its layers"}
"""Layers that vitrail does not have and the tensors do not show, by part of a model's name."""


class PretrainedConfig(ForeignConfig):
    """The preprocessing, licence and labels in timm's config."""

    input_size: tuple[int, int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop_pct: float = 0.875
    crop_mode: str = "center"
    interpolation: str = "bicubic"
    license: str | None = None
    label_names: list[str] | dict[str, Any] | None = None


class ModelArguments(ForeignConfig):
    """Arguments of timm's model constructor."""

    num_heads: int | None = None
    depth: int | None = None
    embed_dim: int | None = None
    act_layer: str | None = None
    global_pool: str | None = None
    pool_include_prefix: bool = False
    pos_embed: str | None = None
    init_values: float | None = None
    img_size: int | tuple[int, int] | None = None


class TimmConfig(ForeignConfig):
    """config.json as timm writes it to the hub; older ones have no `pretrained_cfg` and everything at the top."""

    architecture: str = ""
    num_classes: int | None = None
    global_pool: str | None = None
    label_names: list[str] | dict[str, Any] | None = None
    pretrained: PretrainedConfig = Field(default_factory=PretrainedConfig)
    arguments: ModelArguments = Field(default_factory=ModelArguments)


def read_config(folder_files: FolderFiles) -> TimmConfig:
    """From what lies beside the weights; empty where nothing does."""
    values = folder_files.json("config.json")
    inner = {"pretrained": values.get("pretrained_cfg") or values, "arguments": values.get("model_args") or {}}
    config: TimmConfig = TimmConfig.parse({**values, **inner}, "config.json")
    if unseen := next((what for part, what in UNSEEN.items() if part in config.architecture), None):
        raise WeightsError(f"{config.architecture} has {unseen}, which vitrail does not have")
    return config


def read_pool(config: TimmConfig) -> str | None:
    """Return the pooling that a config names, or None."""
    pool = config.arguments.global_pool or config.global_pool
    if pool and pool not in POOLS:
        raise WeightsError(f"timm's pooling {pool!r} is none of {', '.join(POOLS)}, which vitrail has")
    if config.arguments.pool_include_prefix:
        raise WeightsError("its pooling includes the class token or registers, which vitrail's does not")
    return POOLS[pool] if pool else None


def read_gelu(config: TimmConfig, notes: list[str]) -> str:
    """Return the form of GELU: from the arguments, else from the name, else the exact form."""
    if not config.architecture:
        notes.append("the exact form of GELU, as almost always in timm: no config beside the weights says which")
    if config.arguments.act_layer in GELUS:
        return GELUS[config.arguments.act_layer]
    if "quickgelu" in config.architecture:
        return "quick"
    return "tanh" if any(part in config.architecture for part in TANH) else "exact"


def read_num_heads(config: TimmConfig, width: int, notes: list[str]) -> int:
    """Return the number of heads: from the arguments, else from the name, else guessed from the width."""
    special = next((heads for part, heads in HEADS.items() if part in config.architecture), None)
    return config.arguments.num_heads or special or guess_num_heads(width, notes)


def read_labels(config: TimmConfig, classes: int, notes: list[str]) -> tuple[str, ...] | None:
    """Return the labels, or None if there are not as many as classes; add a note if they are left out."""
    names = config.label_names or config.pretrained.label_names or ()
    if len(names) == classes and classes:
        return tuple(str(name) for name in names)
    if names and classes:
        notes.append(describe_left_out_labels(len(names), classes))
    return None


def read_preprocessing(
    config: TimmConfig, architecture: Architecture, default: Mapping[str, Any], notes: list[str]
) -> Preprocessing:
    """Read the preprocessing, else use `default`; add a note for every option that vitrail does not have."""
    pretrained = config.pretrained
    if pretrained.mean is None:
        notes.append(f"pixels are scaled as {default['origin']}'s are: no config beside the weights says how")
    if pretrained.crop_mode not in ("center", "squash"):
        notes.append(f"the crop {pretrained.crop_mode!r} is replaced by the centre")
    if pretrained.interpolation not in ("bilinear", "bicubic"):
        notes.append(f"the filter {pretrained.interpolation!r} of the resize is replaced by bicubic")
    if not 0 < pretrained.crop_pct <= 1:
        notes.append(f"the crop fraction {pretrained.crop_pct} is replaced by 1")
    return build_preprocessing(
        architecture.image_size,
        architecture.in_channels,
        default,
        pretrained.mean,
        pretrained.std,
        resize="squash" if pretrained.crop_mode == "squash" else "cover",
        crop_fraction=pretrained.crop_pct if 0 < pretrained.crop_pct <= 1 else 1.0,
        crop_rounding="even",  # timm crops with torchvision
        interpolation="bilinear" if pretrained.interpolation == "bilinear" else "bicubic",
    )


def write_config(model: ImageModel) -> dict[str, Any]:
    """Return a config.json that `timm.create_model("local-dir:…")` understands."""
    name, arguments = choose_name_and_arguments(model.architecture)
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


def choose_name_and_arguments(a: Architecture) -> tuple[str, dict[str, Any]]:
    """Return the name of a timm model, and the arguments that turn it into this architecture."""
    if isinstance(a, ResNetArchitecture):
        return _bit(a.backbone), {"in_chans": a.in_channels}
    arguments: dict[str, Any] = {
        "img_size": list(a.image_size),
        "in_chans": a.in_channels,
        "patch_size": a.patch_size,
        "embed_dim": a.width,
        "depth": a.depth,
        "num_heads": a.num_heads,
        "mlp_ratio": compute_mlp_ratio(a.mlp_dim, a.width),
        "qkv_bias": a.qkv_bias,
        "init_values": a.layer_scale,
        "act_layer": {ours: theirs for theirs, ours in GELUS.items()}[a.gelu],
    }
    if a.pool == "distilled":
        return "deit_base_distilled_patch16_224", arguments
    arguments |= {
        "global_pool": {ours: theirs for theirs, ours in POOLS.items()}[a.pool],
        "class_token": a.class_token,
        "reg_tokens": a.registers,
        "no_embed_class": a.position_rows == 0,
        "pos_embed": "none" if a.position == "none" else "learn",
        "pre_norm": a.input_norm,
        "fc_norm": a.norm_after_pool,
    }
    return (_hybrid(a.backbone) if a.backbone else _plain(a)), arguments


def _plain(a: VitArchitecture) -> str:
    if a.input_norm:
        return "vit_base_patch16_clip_224"  # its norms have an eps of 1e-5, which no argument can set
    words = {"Ti": "tiny", "S": "small", "B": "base", "L": "large", "H": "huge", "g": "giant", "G": "gigantic"}
    letter = next((name for name in words if SIZES[name].width == a.width and SIZES[name].depth == a.depth), "B")
    return f"vit_{words[letter]}_patch{14 if letter in 'HgG' else 16}_224"


def _bit(backbone: Backbone) -> str:
    depth = next((depth for depth, blocks in RESNET_BLOCKS.items() if blocks == backbone.blocks), 0)
    name = f"{depth}x{backbone.width_factor}"
    if name not in ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4"):
        raise WeightsError(f"this model cannot be written as timm: timm has no BiT ResNet {name}")
    return f"resnetv2_{name}_bit"


def _hybrid(backbone: Backbone) -> str:
    names = {
        (3, 4, 9): "vit_base_r50_s16_224",
        (3, 4, 6, 3): "vit_large_r50_s32_224",
        (2, 2, 2, 2): "vit_small_r26_s32_224",
    }
    if backbone.blocks not in names or backbone.width_factor != 1:
        raise WeightsError(f"this model cannot be written as timm: no hybrid has ResNet blocks {backbone.blocks}")
    return names[backbone.blocks]
