"""timm's naming, and that of its relatives: DeiT, DeiT III, DINO, DINOv2 and MAE as their authors released them.

Vision Transformers, hybrids and BiT ResNets. A folder as timm's own on the hub: weights and a config.json.
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
from vitrail.weights.naming import (
    CLIP,
    HALF,
    IMAGENET,
    Beside,
    Naming,
    Reading,
    StrangersConfig,
    Tensors,
    count_blocks,
    grid_of_table,
    heads_of_width,
    pixels,
    ratio,
    shape,
)
from vitrail.weights.pairs import BATCHED, Line, Rule, patch_kernel

PREFIXES = ("", "module.", "backbone.", "module.backbone.", "model.", "encoder.", "visual.trunk.")
"""What training programs put before the names."""

POOLS = {"token": "class", "avg": "average", "map": "attention"}
HEADS = {"vit_base_patch16_gap_224": 16, "so400m": 16, "giantopt": 16}
"""timm's names of models whose heads are not those of every other model of their width."""
TANH = (
    *("base_patch32_siglip", "so400m_patch16_siglip", "giantopt_patch16_siglip"),
    *("large_patch16_siglip_512", "large_patch16_siglip_gap_512"),
)
"""Parts of timm's names of models with the tanh form of GELU, which their config does not mention."""
GELUS = {"gelu": "exact", "gelu_tanh": "tanh", "quick_gelu": "quick"}

BLOCK = [
    Line("encoder.blocks.{i}.norm1.*", "blocks.{i}.norm1.*"),
    Line("encoder.blocks.{i}.attention.qkv.*", "blocks.{i}.attn.qkv.*"),
    Line("encoder.blocks.{i}.attention.out.*", "blocks.{i}.attn.proj.*"),
    Line("encoder.blocks.{i}.norm2.*", "blocks.{i}.norm2.*"),
    Line("encoder.blocks.{i}.mlp.fc1.*", "blocks.{i}.mlp.fc1.*"),
    Line("encoder.blocks.{i}.mlp.fc2.*", "blocks.{i}.mlp.fc2.*"),
]
AROUND = [
    Line("patch_embed.projection.bias", "patch_embed.proj.bias"),
    Line("class_token", "cls_token", BATCHED),
    Line("position_embedding.0.table", "pos_embed", BATCHED),
    Line("input_norm.*", "norm_pre.*"),
    Line("encoder.norm.*", "norm.*"),
    Line("pool_norm.*", "fc_norm.*"),
    Line("pool.query", "attn_pool.latent", BATCHED),
    Line("pool.q.*", "attn_pool.q.*"),
    Line("pool.kv.*", "attn_pool.kv.*"),
    Line("pool.out.*", "attn_pool.proj.*"),
    Line("pool.norm.*", "attn_pool.norm.*"),
    Line("pool.mlp.fc1.*", "attn_pool.mlp.fc1.*"),
    Line("pool.mlp.fc2.*", "attn_pool.mlp.fc2.*"),
    Line("head.*", "head.*"),
    Line("head.linear.*", "head.*"),
    Line("head.distilled.*", "head_dist.*"),
    Line("head.hidden.*", "pre_logits.fc.*"),
]
HEAD_OF_RESNET = Rule(lambda parts: parts[0].flatten(1), lambda ours: [ours[:, :, None, None]])


class _PretrainedConfig(StrangersConfig):
    input_size: tuple[int, int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop_pct: float = 0.875
    crop_mode: str = "center"
    interpolation: str = "bicubic"
    license: str | None = None
    label_names: list[str] | None = None


class _ModelArguments(StrangersConfig):
    num_heads: int | None = None
    act_layer: str | None = None
    global_pool: str | None = None
    fc_norm: bool | None = None
    init_values: float | None = None
    img_size: int | tuple[int, int] | None = None


class _TimmConfig(StrangersConfig):
    architecture: str = ""
    global_pool: str | None = None
    pretrained_cfg: dict[str, Any] = Field(default_factory=dict)
    model_args: dict[str, Any] = Field(default_factory=dict)


class TimmNaming(Naming):
    """`blocks.0.attn.qkv.weight`, `stages.0.blocks.0.conv1.weight`."""

    name = "timm"

    def recognises(self, tensors: Tensors) -> bool:
        """A ViT by its first block, a ResNet by its first stage."""
        return _prefix_of(tensors) is not None

    def understand(self, tensors: Tensors, beside: Beside) -> Reading:
        """Sizes from shapes; heads, pooling and GELU from the config, else from what such checkpoints have."""
        prefix = _prefix_of(tensors) or ""
        stripped = {name.removeprefix(prefix): info for name, info in tensors.items() if name.startswith(prefix)}
        config = _TimmConfig.of(beside.json("config.json"), "config.json")
        pretrained = _PretrainedConfig.of(config.pretrained_cfg, "config.json, pretrained_cfg")
        if "stem.conv.weight" in stripped:
            reading = _resnet(stripped, pretrained)
        else:
            reading = _vit(stripped, config, pretrained, facebook=beside.wrapper == "model")
        reading.dialect = f"{prefix}|{reading.dialect}"
        reading.licence = pretrained.license or beside.licence()
        reading.set_aside = [prefix + name for name in reading.set_aside]
        reading.left_out = [prefix + name for name in reading.left_out]
        reading.left_out += [name for name in tensors if not name.startswith(prefix)]
        if pretrained.label_names and len(pretrained.label_names) == reading.architecture.num_classes:
            reading.labels = tuple(pretrained.label_names)
        return reading

    def lines(self, architecture: Architecture, dialect: str) -> list[Line]:
        """`dialect` is a prefix, a bar, and whose release it is."""
        prefix, _, release = dialect.partition("|")
        lines = _resnet_lines(architecture) if isinstance(architecture, ResNetArchitecture) else []
        if isinstance(architecture, VitArchitecture):
            lines = _vit_lines(architecture, release)
        return [Line(line.ours, prefix + str(line.theirs), line.rule) for line in lines]

    def refusal(self, architecture: Architecture, dialect: str) -> str | None:
        """What timm's classes cannot be told to do."""
        if isinstance(architecture, ResNetArchitecture):
            return None
        if architecture.block != "plain" or architecture.conv_stem is not None:
            return "timm has no axial blocks and names its convolutional stems otherwise"
        if architecture.position not in ("none", "learned-1d") or architecture.position_at != "input":
            return f'timm has no position embedding "{architecture.position}" added at "{architecture.position_at}"'
        if architecture.representation_size is not None:
            return "timm has dropped the tanh layer of the pre-training head"
        if architecture.norm != "layer":
            return "vitrail writes timm models with layer norm only"
        if architecture.pool == "class+average":
            return "timm has no pooling that puts the class token beside the average"
        positions_like_dinov2 = architecture.class_token and architecture.position_prefix == "class"
        if architecture.registers and positions_like_dinov2 and not dialect.endswith("dinov2"):
            return "timm's registers own a position or the class token owns none"
        if architecture.patch_bias == architecture.input_norm:
            return "timm's patch projection has a bias exactly where no norm follows it"
        return None

    def written_dialect(self, model: ImageModel) -> str:
        """Its own where it came from here, so that the keys come back."""
        return model.origin.dialect if model.origin is not None and model.origin.format == self.name else "|"

    def companions(self, model: ImageModel) -> dict[str, Any]:
        """A config.json that `timm.create_model("local-dir:…")` understands."""
        name, arguments = _timm_arguments(model.architecture)
        preprocessing = model.preprocessing
        pretrained = {
            "input_size": [model.in_channels, *preprocessing.image_size],
            "mean": list(preprocessing.mean),
            "std": list(preprocessing.std),
            "crop_pct": preprocessing.crop_fraction,
            "crop_mode": "squash" if preprocessing.resize == "squash" else "center",
            "interpolation": preprocessing.interpolation,
            "num_classes": model.num_classes,
            "fixed_input_size": isinstance(model.architecture, VitArchitecture),
            "first_conv": "stem.conv" if isinstance(model.architecture, ResNetArchitecture) else "patch_embed.proj",
            "classifier": "head.fc" if isinstance(model.architecture, ResNetArchitecture) else "head",
        }
        if model.labels is not None:
            pretrained["label_names"] = list(model.labels)
        if model.origin is not None and model.origin.licence is not None:
            pretrained["license"] = model.origin.licence
        return {
            "config.json": {
                "architecture": name,
                "num_classes": model.num_classes,
                "num_features": model.architecture.representation_width,
                "pretrained_cfg": pretrained,
                "model_args": arguments,
            }
        }


def _prefix_of(tensors: Tensors) -> str | None:
    for prefix in PREFIXES:
        if f"{prefix}blocks.0.attn.qkv.weight" in tensors and f"{prefix}patch_embed.proj.weight" in tensors:
            return prefix
        if f"{prefix}stem.conv.weight" in tensors and f"{prefix}stages.0.blocks.0.conv1.weight" in tensors:
            return prefix
    return None


def _vit(tensors: Tensors, config: _TimmConfig, pretrained: _PretrainedConfig, facebook: bool) -> Reading:
    arguments = _ModelArguments.of(config.model_args, "config.json, model_args")
    notes: list[str] = []
    width, channels, side, side_again = shape(tensors, "patch_embed.proj.weight", 4)
    if side != side_again:
        raise WeightsError(f"patches of {side}×{side_again} pixels: vitrail's are square")
    release = _release(tensors)
    backbone = _backbone(tensors, "patch_embed.backbone.", "hybrid") if _has(tensors, "patch_embed.backbone.") else None
    in_channels = shape(tensors, "patch_embed.backbone.stem.conv.weight", 4)[1] if backbone else channels
    stride = side * (backbone.stride if backbone else 1)
    class_token, distilled = "cls_token" in tensors, "dist_token" in tensors
    register_name = _REGISTERS[release]
    registers = 1 if distilled else tensors[register_name].shape[1] if register_name in tensors else 0

    position: dict[str, Any] = {"position": "none"}
    image_size = arguments.img_size if arguments.img_size is not None else (pretrained.input_size or (0, 0, 0))[1:]
    image_size = (image_size, image_size) if isinstance(image_size, int) else image_size
    if "pos_embed" in tensors:
        hint = (image_size[0] // stride, image_size[1] // stride) if all(image_size) else None
        owners = {"all": class_token + registers, "class": int(class_token), "none": 0}
        grid, owner = grid_of_table(shape(tensors, "pos_embed", 3)[1], owners, hint)
        image_size = (grid[0] * stride, grid[1] * stride)
        # With nothing but a class token "all" and "class" are the same, and the paper's word is "class".
        position = {"position": "learned-1d", "position_prefix": "class" if owner == "all" and not registers else owner}
    elif not all(image_size):
        image_size = (stride * 14, stride * 14)
        notes.append(f"image size {image_size[0]}: the file has no position table and does not say")

    input_norm = "norm_pre.weight" in tensors
    gelu = _gelu(arguments.act_layer or "", config.architecture)
    mlp_dim, mlp_out = shape(tensors, "blocks.0.mlp.fc1.weight", 2)[0], shape(tensors, "blocks.0.mlp.fc2.weight", 2)[1]
    if mlp_dim == 2 * mlp_out:
        raise WeightsError("its MLP is a SwiGLU, which vitrail does not have")
    architecture = VitArchitecture(
        image_size=image_size,
        in_channels=in_channels,
        patch_size=side,
        width=width,
        depth=count_blocks(tensors, "blocks."),
        mlp_dim=mlp_dim,
        num_heads=_heads(config, arguments.num_heads, width, notes),
        num_classes=tensors["head.weight"].shape[0] if "head.weight" in tensors else 0,
        pool=_pool(tensors, arguments.global_pool or config.global_pool, distilled),
        class_token=class_token,
        registers=registers,
        **position,
        representation_size=tensors["pre_logits.fc.weight"].shape[0] if "pre_logits.fc.weight" in tensors else None,
        backbone=backbone,
        layer_scale=(arguments.init_values or 1.0) if _layer_scale(release, 1).format(i=0) in tensors else None,
        gelu=gelu,
        norm_eps=1e-5 if input_norm else 1e-6,
        input_norm=input_norm,
        norm_after_pool="fc_norm.weight" in tensors,
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        patch_bias="patch_embed.proj.bias" in tensors,
    )
    return Reading(
        architecture,
        _preprocessing(architecture, pretrained, _statistics(tensors, bool(release) or facebook), notes),
        dialect=release,
        set_aside=[name for name in ("mask_token",) if name in tensors],
        left_out=[name for name in tensors if name.startswith("decoder")],
        notes=notes,
    )


def _resnet(tensors: Tensors, pretrained: _PretrainedConfig) -> Reading:
    notes: list[str] = []
    size = (pretrained.input_size or (3, 448, 448))[1:]
    if pretrained.input_size is None:
        notes.append("image size 448, BiT's own: the file does not say")
    architecture = ResNetArchitecture(
        image_size=size,
        in_channels=shape(tensors, "stem.conv.weight", 4)[1],
        num_classes=tensors["head.fc.weight"].shape[0] if "head.fc.weight" in tensors else 0,
        backbone=_backbone(tensors, "", "bit"),
    )
    return Reading(architecture, _preprocessing(architecture, pretrained, HALF, notes), notes=notes)


def _backbone(tensors: Tensors, prefix: str, form: str) -> Backbone:
    blocks = [
        count_blocks(tensors, f"{prefix}stages.{stage}.blocks.")
        for stage in range(count_blocks(tensors, f"{prefix}stages."))
    ]
    width_factor, rest = divmod(shape(tensors, f"{prefix}stem.conv.weight", 4)[0], 64)
    if rest:
        raise WeightsError("the first convolution's channels are no multiple of 64")
    if (form == "hybrid") != (f"{prefix}stem.norm.weight" in tensors):
        raise WeightsError("a ResNet that is neither a hybrid's nor BiT's: one is post-activation, the other not")
    return Backbone(
        blocks=tuple(blocks),
        width_factor=width_factor,
        form=form,
        norm_eps=1e-5,
        standardise_by="variance",
        standardise_eps=1e-8,
    )


def _release(tensors: Tensors) -> str:
    """Whose names they are, where they differ from timm's."""
    if "dist_token" in tensors:
        return "distilled"
    if "blocks.0.gamma_1" in tensors:
        return "deit3"
    if "register_tokens" in tensors or ("mask_token" in tensors and "blocks.0.ls1.gamma" in tensors):
        return "dinov2"
    return ""


_REGISTERS = {"": "reg_token", "deit3": "reg_token", "dinov2": "register_tokens", "distilled": "dist_token"}


def _layer_scale(release: str, which: int) -> str:
    return f"blocks.{{i}}.gamma_{which}" if release == "deit3" else f"blocks.{{i}}.ls{which}.gamma"


def _has(tensors: Tensors, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in tensors)


def _pool(tensors: Tensors, told: str | None, distilled: bool) -> str:
    if distilled and "head_dist.weight" in tensors:
        return "distilled"
    if "attn_pool.latent" in tensors:
        return "attention"
    if told in POOLS:
        return POOLS[told]
    return "average" if "fc_norm.weight" in tensors or "cls_token" not in tensors else "class"


def _gelu(act_layer: str, architecture: str) -> str:
    if act_layer in GELUS:
        return GELUS[act_layer]
    if "quickgelu" in architecture:
        return "quick"
    return "tanh" if any(part in architecture for part in TANH) else "exact"


def _heads(config: _TimmConfig, told: int | None, width: int, notes: list[str]) -> int:
    if told:
        return told
    by_name = next((heads for part, heads in HEADS.items() if part in config.architecture), None)
    return by_name or heads_of_width(width, notes)


def _statistics(tensors: Tensors, facebook: bool) -> Mapping[str, Any]:
    """Without a config. CLIP's have a norm before the first block. Facebook's releases (DeiT, DINO, MAE) keep their
    weights under "model", or have layer scale, or no head; Google's, as timm converted them, have only a head."""
    if "norm_pre.weight" in tensors:
        return CLIP
    facebook = facebook or "blocks.0.ls1.gamma" in tensors or "head.weight" not in tensors
    return IMAGENET if facebook else HALF


def _preprocessing(
    architecture: Architecture, pretrained: _PretrainedConfig, default: Mapping[str, Any], notes: list[str]
) -> Preprocessing:
    statistics = {"mean": pretrained.mean or default["mean"], "std": pretrained.std or default["std"]}
    if pretrained.mean is None:
        notes.append(f"pixels are scaled with mean {statistics['mean']}: no config beside the weights says how")
    return pixels(
        architecture.image_size,
        statistics,
        architecture.in_channels,
        resize="squash" if pretrained.crop_mode == "squash" else "cover",
        crop_fraction=pretrained.crop_pct if 0 < pretrained.crop_pct <= 1 else 1.0,
        interpolation="bilinear" if pretrained.interpolation == "bilinear" else "bicubic",
    )


def _vit_lines(a: VitArchitecture, release: str) -> list[Line]:
    channels = a.backbone.out_channels if a.backbone else a.in_channels
    lines = [
        Line("patch_embed.projection.weight", "patch_embed.proj.weight", patch_kernel(channels, a.patch_size)),
        Line("registers", _REGISTERS["distilled" if a.pool == "distilled" else release], BATCHED),
        Line("encoder.blocks.{i}.scale1.factor", _layer_scale(release, 1)),
        Line("encoder.blocks.{i}.scale2.factor", _layer_scale(release, 2)),
        *BLOCK,
        *AROUND,
    ]
    return lines + (_backbone_lines(a.backbone, "patch_embed.backbone.") if a.backbone else [])


def _resnet_lines(a: ResNetArchitecture) -> list[Line]:
    return [
        *_backbone_lines(a.backbone, ""),
        Line("norm.*", "norm.*"),
        Line("head.weight", "head.fc.weight", HEAD_OF_RESNET),
        Line("head.bias", "head.fc.bias"),
    ]


def _backbone_lines(backbone: Backbone, prefix: str) -> list[Line]:
    lines = [
        Line("backbone.root.weight", f"{prefix}stem.conv.weight"),
        Line("backbone.root_norm.*", f"{prefix}stem.norm.*"),
    ]
    unit = 0
    for stage, blocks in enumerate(backbone.blocks):
        for block in range(blocks):
            ours, theirs = f"backbone.units.{unit}", f"{prefix}stages.{stage}.blocks.{block}"
            for part in (1, 2, 3):
                lines.append(Line(f"{ours}.conv{part}.weight", f"{theirs}.conv{part}.weight"))
                lines.append(Line(f"{ours}.norm{part}.*", f"{theirs}.norm{part}.*"))
            if backbone.form == "hybrid":
                lines.append(Line(f"{ours}.shortcut.0.weight", f"{theirs}.downsample.conv.weight"))
                lines.append(Line(f"{ours}.shortcut.1.*", f"{theirs}.downsample.norm.*"))
            else:
                lines.append(Line(f"{ours}.shortcut.weight", f"{theirs}.downsample.conv.weight"))
            unit += 1
    return lines


def _timm_arguments(a: Architecture) -> tuple[str, dict[str, Any]]:
    """A name that timm knows, and what to tell its constructor to get this architecture."""
    if isinstance(a, ResNetArchitecture):
        return _timm_bit(a.backbone), {"in_chans": a.in_channels}
    arguments: dict[str, Any] = {
        "img_size": list(a.image_size),
        "in_chans": a.in_channels,
        "patch_size": a.patch_size,
        "embed_dim": a.width,
        "depth": a.depth,
        "num_heads": a.num_heads,
        "mlp_ratio": ratio(a.mlp_dim, a.width),
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
        "no_embed_class": a.position_prefix == "none",
        "pos_embed": "none" if a.position == "none" else "learn",
        "pre_norm": a.input_norm,
        "fc_norm": a.norm_after_pool,
    }
    return (_timm_hybrid(a.backbone) if a.backbone else _timm_plain(a)), arguments


def _timm_plain(a: VitArchitecture) -> str:
    if a.input_norm:
        return "vit_base_patch16_clip_224"  # whose norms have an eps of 1e-5, which no argument can say
    words = {"Ti": "tiny", "S": "small", "B": "base", "L": "large", "H": "huge", "g": "giant", "G": "gigantic"}
    letter = next((name for name, size in SIZES.items() if size.width == a.width and size.depth == a.depth), "B")
    return f"vit_{words[letter]}_patch{14 if letter in 'HgG' else 16}_224"


def _timm_bit(backbone: Backbone) -> str:
    depth = next((depth for depth, blocks in RESNET_BLOCKS.items() if blocks == backbone.blocks), 0)
    name = f"{depth}x{backbone.width_factor}"
    if name not in ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4"):
        raise WeightsError(f"timm has no BiT ResNet {name}")
    return f"resnetv2_{name}_bit"


def _timm_hybrid(backbone: Backbone) -> str:
    names = {
        (3, 4, 9): "vit_base_r50_s16_224",
        (3, 4, 6, 3): "vit_large_r50_s32_224",
        (2, 2, 2, 2): "vit_small_r26_s32_224",
    }
    if backbone.blocks not in names or backbone.width_factor != 1:
        raise WeightsError(f"timm has no hybrid with ResNet blocks {backbone.blocks}")
    return names[backbone.blocks]
