"""timm's format, and the releases with similar names: DeiT, DeiT III, DINO, DINOv2 and MAE.

It holds Vision Transformers, hybrids and BiT ResNets. Models are always written with timm's own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.config import show_size
from vitrail.errors import WeightsError
from vitrail.model.architecture import Architecture, Backbone, ResNetArchitecture, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.create import build_empty_model
from vitrail.weights.formats.base import (
    CLIP,
    HALF,
    IMAGENET,
    CheckpointInfo,
    FolderFiles,
    Tensors,
    WeightFormat,
    check_agreement,
    count_blocks,
    explain_backbone_refusal,
    infer_grid,
    list_residual_units,
    read_patch_size,
    read_shape,
    read_size,
)
from vitrail.weights.formats.timm_config import (
    TimmConfig,
    read_config,
    read_gelu,
    read_labels,
    read_num_heads,
    read_pool,
    read_preprocessing,
    write_config,
)
from vitrail.weights.known import KnownFacts
from vitrail.weights.tensor_rules import ADD_BATCH_AXIS, TensorRule, Transform, add_prefix, to_patch_kernel

PREFIXES = ("", "module.", "backbone.", "module.backbone.", "model.", "encoder.", "visual.trunk.", "timm_model.")
"""Prefixes that training programs put before the names."""

BLOCK = [
    TensorRule("encoder.blocks.{i}.norm1.*", "blocks.{i}.norm1.*"),
    TensorRule("encoder.blocks.{i}.attention.qkv.*", "blocks.{i}.attn.qkv.*"),
    TensorRule("encoder.blocks.{i}.attention.out.*", "blocks.{i}.attn.proj.*"),
    TensorRule("encoder.blocks.{i}.norm2.*", "blocks.{i}.norm2.*"),
    TensorRule("encoder.blocks.{i}.mlp.fc1.*", "blocks.{i}.mlp.fc1.*"),
    TensorRule("encoder.blocks.{i}.mlp.fc2.*", "blocks.{i}.mlp.fc2.*"),
]
AROUND = [
    TensorRule("patch_embed.projection.bias", "patch_embed.proj.bias"),
    TensorRule("class_token", "cls_token", ADD_BATCH_AXIS),
    TensorRule("position_embedding.0.table", "pos_embed", ADD_BATCH_AXIS),
    TensorRule("input_norm.*", "norm_pre.*"),
    TensorRule("encoder.norm.*", "norm.*"),
    TensorRule("pool_norm.*", "fc_norm.*"),
    TensorRule("pool.query", "attn_pool.latent", ADD_BATCH_AXIS),
    TensorRule("pool.q.*", "attn_pool.q.*"),
    TensorRule("pool.kv.*", "attn_pool.kv.*"),
    TensorRule("pool.out.*", "attn_pool.proj.*"),
    TensorRule("pool.norm.*", "attn_pool.norm.*"),
    TensorRule("pool.mlp.fc1.*", "attn_pool.mlp.fc1.*"),
    TensorRule("pool.mlp.fc2.*", "attn_pool.mlp.fc2.*"),
    TensorRule("head.*", "head.*"),
    TensorRule("head.linear.*", "head.*"),
    TensorRule("head.distilled.*", "head_dist.*"),
    TensorRule("head.hidden.*", "pre_logits.fc.*"),
]
HEAD_OF_RESNET = Transform(lambda parts: parts[0].flatten(1), lambda ours: [ours[:, :, None, None]])
REGISTERS = {"": "reg_token", "deit3": "reg_token", "dinov2": "register_tokens", "distilled": "dist_token"}
"""The name of the tokens after the class token, by release."""


class TimmFormat(WeightFormat):
    """Names such as `blocks.0.attn.qkv.weight` and `stages.0.blocks.0.conv1.weight`."""

    name = "timm"

    def recognises(self, tensors: Tensors) -> bool:
        return _prefix_of(tensors) is not None

    def describe_checkpoint(self, tensors: Tensors, folder_files: FolderFiles) -> CheckpointInfo:
        """Read sizes from the shapes; take heads, pooling and GELU from the config, else guess them."""
        prefix = _prefix_of(tensors) or ""
        own = {name.removeprefix(prefix): info for name, info in tensors.items() if name.startswith(prefix)}
        config = read_config(folder_files)
        if "stem.conv.weight" in own:
            checkpoint = _resnet(own, config)
        else:
            checkpoint = _vit(own, config, folder_files.known, facebook=folder_files.wrapper_key == "model")
        checkpoint.dialect = f"{prefix}|{checkpoint.dialect}"
        checkpoint.labels = read_labels(config, checkpoint.architecture.num_classes, checkpoint.notes)
        checkpoint.licence = config.pretrained.license or folder_files.read_licence()
        checkpoint.unused_tensors = [prefix + name for name in checkpoint.unused_tensors]
        checkpoint.ignored_tensors = [prefix + name for name in checkpoint.ignored_tensors]
        checkpoint.ignored_tensors += [name for name in tensors if not name.startswith(prefix)]
        actual = {"num_classes": checkpoint.architecture.num_classes}
        check_agreement("config.json", {"num_classes": config.num_classes}, actual)
        return checkpoint

    def list_tensor_rules(self, architecture: Architecture, dialect: str) -> list[TensorRule]:
        """Return the rules; `dialect` is `prefix|release`."""
        prefix, _, release = dialect.partition("|")
        if isinstance(architecture, ResNetArchitecture):
            return add_prefix(_resnet_lines(architecture), prefix)
        return add_prefix(_vit_lines(architecture, release), prefix)

    def explain_refusal(self, architecture: Architecture) -> str | None:
        if architecture.backbone is not None and (why := explain_backbone_refusal(architecture.backbone)):
            return why
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
        if architecture.patch_bias == architecture.input_norm:
            return "timm's patch projection has a bias exactly where no norm follows it"
        if architecture.pool == "distilled" and architecture.position_rows != 2:
            return "timm's distilled DeiT has a position for each of its two tokens"
        return None

    def adapt_model(self, model: ImageModel) -> ImageModel:
        # In timm all tokens before the patches have a position, or none has.
        a = model.architecture
        if isinstance(a, VitArchitecture) and a.registers and a.class_token and a.position_rows == 1:
            return _add_class_position(model, a)
        return model

    def choose_dialect(self, model: ImageModel) -> str:
        return "|"  # timm must be able to read it

    def make_config_files(self, model: ImageModel) -> dict[str, Any]:
        return {"config.json": write_config(model)}


def _prefix_of(tensors: Tensors) -> str | None:
    for prefix in PREFIXES:
        if f"{prefix}blocks.0.attn.qkv.weight" in tensors and f"{prefix}patch_embed.proj.weight" in tensors:
            return prefix
        if f"{prefix}stem.conv.weight" in tensors and f"{prefix}stages.0.blocks.0.conv1.weight" in tensors:
            return prefix
    return None


def _vit(own: Tensors, config: TimmConfig, known: KnownFacts, facebook: bool) -> CheckpointInfo:
    notes: list[str] = []
    release = _release(own)
    kernel = read_shape(own, "patch_embed.proj.weight", 4)
    width, channels, side = kernel[0], kernel[1], read_patch_size(kernel, (2, 3))
    hybrid = any(name.startswith("patch_embed.backbone.") for name in own)
    backbone = _backbone(own, "patch_embed.backbone.", "hybrid") if hybrid else None
    mlp_dim, depth = read_shape(own, "blocks.0.mlp.fc1.weight", 2)[0], count_blocks(own, "blocks.")
    if mlp_dim == 2 * read_shape(own, "blocks.0.mlp.fc2.weight", 2)[1]:
        raise WeightsError("its MLP is a SwiGLU, which vitrail does not have")
    check_agreement("config.json", config.arguments.model_dump(), {"depth": depth, "embed_dim": width})
    class_token = "cls_token" in own
    registers = read_size(own, REGISTERS[release], 3, axis=1) or 0
    stride = side * (backbone.stride if backbone else 1)
    image_size, position = _positions(own, config, known.grid, stride, class_token, registers, notes)
    input_norm = "norm_pre.weight" in own
    architecture = VitArchitecture(
        image_size=image_size,
        in_channels=read_shape(own, "patch_embed.backbone.stem.conv.weight", 4)[1] if backbone else channels,
        patch_size=side,
        width=width,
        depth=depth,
        mlp_dim=mlp_dim,
        num_heads=known.num_heads or read_num_heads(config, width, notes),
        num_classes=read_size(own, "head.weight", 2) or 0,
        pool=_pool(own, read_pool(config)),
        class_token=class_token,
        registers=registers,
        **position,
        position_resize="bicubic-offset" if _is_plain_dinov2(own, release) else "bicubic-antialias",
        representation_size=read_size(own, "pre_logits.fc.weight", 2),
        backbone=backbone,
        layer_scale=(config.arguments.init_values or 1.0) if _layer_scale(release, 1).format(i=0) in own else None,
        gelu=read_gelu(config, notes),
        norm_eps=1e-5 if input_norm else 1e-6,
        input_norm=input_norm,
        norm_after_pool="fc_norm.weight" in own,
        qkv_bias="blocks.0.attn.qkv.bias" in own,
        patch_bias="patch_embed.proj.bias" in own,
    )
    return CheckpointInfo(
        architecture,
        read_preprocessing(config, architecture, _statistics(own, bool(release) or facebook), notes),
        dialect=release,
        unused_tensors=[name for name in ("mask_token",) if name in own],
        ignored_tensors=[name for name in own if name.startswith("decoder")],
        notes=notes,
    )


def _positions(
    own: Tensors,
    config: TimmConfig,
    known_grid: tuple[int, int] | None,
    stride: int,
    class_token: bool,
    registers: int,
    notes: list[str],
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the image size and the options of the position embedding."""
    sides = config.arguments.img_size or (config.pretrained.input_size or (0, 0, 0))[1:]
    size = (sides, sides) if isinstance(sides, int) else (sides[0], sides[1])
    if "pos_embed" not in own:
        if config.arguments.pos_embed != "none" or not all(size):
            raise WeightsError(
                "it has no position table, and no config beside it says that it needs none: its positions may be "
                "rotary, which vitrail does not have"
            )
        return size, {"position": "none"}
    hint = (size[0] // stride, size[1] // stride) if all(size) else None
    owners = {"all": class_token + registers, "class": int(class_token), "none": 0}
    grid, owner = infer_grid(read_shape(own, "pos_embed", 3)[1], owners, known_grid or hint)
    # With only a class token "all" and "class" mean the same; the paper's word is "class".
    position_prefix = "class" if owner == "all" and not registers else owner
    image_size = (grid[0] * stride, grid[1] * stride)
    if all(size) and size != image_size:
        notes.append(f"images are taken at {show_size(image_size)} pixels, not at its config's {show_size(size)}")
    return image_size, {"position": "learned-1d", "position_prefix": position_prefix}


def _resnet(own: Tensors, config: TimmConfig) -> CheckpointInfo:
    notes: list[str] = []
    if config.pretrained.input_size is None:
        notes.append("image size 448, BiT's own: the file does not say")
    architecture = ResNetArchitecture(
        image_size=(config.pretrained.input_size or (3, 448, 448))[1:],
        in_channels=read_shape(own, "stem.conv.weight", 4)[1],
        num_classes=read_size(own, "head.fc.weight", 4) or 0,
        backbone=_backbone(own, "", "bit"),
    )
    return CheckpointInfo(architecture, read_preprocessing(config, architecture, HALF, notes), notes=notes)


def _backbone(own: Tensors, prefix: str, form: str) -> Backbone:
    channels = read_size(own, f"{prefix}stem.conv.weight", 4)
    normed = f"{prefix}stem.norm.weight" in own
    if channels is None or channels % 64 or (form == "hybrid") != normed:
        raise WeightsError("its ResNet is neither a hybrid's of the paper nor BiT's")
    stages = range(count_blocks(own, f"{prefix}stages."))
    return Backbone(
        blocks=tuple(count_blocks(own, f"{prefix}stages.{stage}.blocks.") for stage in stages),
        width_factor=channels // 64,
        form=form,
        norm_eps=1e-5,
        standardise_by="variance",
        standardise_eps=1e-8,
    )


def _release(own: Tensors) -> str:
    """Return the release whose names differ from timm's, or an empty string."""
    if "dist_token" in own:
        return "distilled"
    if "blocks.0.gamma_1" in own:
        return "deit3"
    if "register_tokens" in own or ("mask_token" in own and "blocks.0.ls1.gamma" in own):
        return "dinov2"
    return ""


def _is_plain_dinov2(own: Tensors, release: str) -> bool:
    """Return whether it is Meta's own file of DINOv2 without registers; those with registers resize as timm does."""
    return release == "dinov2" and "register_tokens" not in own


def _layer_scale(release: str, which: int) -> str:
    return f"blocks.{{i}}.gamma_{which}" if release == "deit3" else f"blocks.{{i}}.ls{which}.gamma"


def _pool(own: Tensors, config_pool: str | None) -> str:
    if "head_dist.weight" in own:
        return "distilled"
    if "attn_pool.latent" in own:
        return "attention"
    return config_pool or ("average" if "fc_norm.weight" in own or "cls_token" not in own else "class")


def _statistics(own: Tensors, facebook: bool) -> Mapping[str, Any]:
    """Guess the mean and std of a checkpoint without a config.

    CLIP has a norm before the first block. Facebook's releases (DeiT, DINO, MAE) have the key "model", layer scale or
    no head; Google's models, as converted by timm, have a head and none of these.
    """
    if "norm_pre.weight" in own:
        return CLIP
    facebook = facebook or "blocks.0.ls1.gamma" in own or "head.weight" not in own
    return IMAGENET if facebook else HALF


def _vit_lines(a: VitArchitecture, release: str) -> list[TensorRule]:
    channels = a.backbone.out_channels if a.backbone else a.in_channels
    return [
        TensorRule("patch_embed.projection.weight", "patch_embed.proj.weight", to_patch_kernel(channels, a.patch_size)),
        TensorRule("registers", REGISTERS["distilled" if a.pool == "distilled" else release], ADD_BATCH_AXIS),
        TensorRule("encoder.blocks.{i}.scale1.factor", _layer_scale(release, 1)),
        TensorRule("encoder.blocks.{i}.scale2.factor", _layer_scale(release, 2)),
        *BLOCK,
        *AROUND,
        *(_backbone_lines(a.backbone, "patch_embed.backbone.") if a.backbone else []),
    ]


def _resnet_lines(a: ResNetArchitecture) -> list[TensorRule]:
    return [
        *_backbone_lines(a.backbone, ""),
        TensorRule("norm.*", "norm.*"),
        TensorRule("head.weight", "head.fc.weight", HEAD_OF_RESNET),
        TensorRule("head.bias", "head.fc.bias"),
    ]


def _backbone_lines(backbone: Backbone, prefix: str) -> list[TensorRule]:
    lines = [
        TensorRule("backbone.root.weight", f"{prefix}stem.conv.weight"),
        TensorRule("backbone.root_norm.*", f"{prefix}stem.norm.*"),
    ]
    for ours, stage, block in list_residual_units(backbone):
        theirs = f"{prefix}stages.{stage}.blocks.{block}"
        for part in (1, 2, 3):
            lines.append(TensorRule(f"{ours}.conv{part}.weight", f"{theirs}.conv{part}.weight"))
            lines.append(TensorRule(f"{ours}.norm{part}.*", f"{theirs}.norm{part}.*"))
        lines += [
            TensorRule(f"{ours}.shortcut.weight", f"{theirs}.downsample.conv.weight"),  # BiT's
            TensorRule(f"{ours}.shortcut.0.weight", f"{theirs}.downsample.conv.weight"),
            TensorRule(f"{ours}.shortcut.1.*", f"{theirs}.downsample.norm.*"),
        ]
    return lines


def _add_class_position(model: ImageModel, a: VitArchitecture) -> ImageModel:
    """Return a model that computes the same, with the class token's position added to the token itself."""
    fields = {name: getattr(a, name) for name in VitArchitecture.model_fields}
    added = build_empty_model(VitArchitecture(**{**fields, "position_prefix": "none"}))
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    table = state["position_embedding.0.table"]
    state |= {"class_token": state["class_token"] + table[:1], "position_embedding.0.table": table[1:]}
    added.load_state_dict(state, assign=True)
    added.preprocessing, added.labels, added.origin = model.preprocessing, model.labels, model.origin
    return added
