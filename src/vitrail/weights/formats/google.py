"""Google's .npz files: the original ViT and AugReg, hybrids, "big_vision", and BiT ResNets.

Kernels have the shape (height, width, in, out) or (in, out), and attention has an axis for its heads. GELU is the tanh
form, pixels are mapped to [−1, 1], and images are resized without keeping their shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vitrail.config import Preprocessing
from vitrail.errors import WeightsError
from vitrail.model.architecture import Architecture, Backbone, ResNetArchitecture, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.variants import BIT, HYBRID
from vitrail.weights.formats.base import (
    HALF,
    CheckpointInfo,
    CompanionFile,
    FolderFiles,
    Tensors,
    WeightFormat,
    build_preprocessing,
    count_blocks,
    explain_backbone_refusal,
    find_unsupported_options,
    infer_grid,
    list_residual_units,
    read_patch_size,
    read_shape,
    read_size,
)
from vitrail.weights.tensor_rules import ADD_BATCH_AXIS, UNCHANGED, TensorRule, Transform, add_prefix

PREFIXES = ("", "opt/target/", "params/", "params/img/")
BLOCK = "Transformer/encoderblock_{i}/"
BIT_PREFIX = "resnet/"
BIT_PARTS = ("a", "b", "c")

DENSE = Transform(lambda parts: parts[0].T, lambda ours: [ours.T])
CONVOLUTION = Transform(lambda parts: parts[0].permute(3, 2, 0, 1), lambda ours: [ours.permute(2, 3, 1, 0)])
HEAD_OF_BIT = Transform(lambda parts: parts[0].flatten(0, 2).T, lambda ours: [ours.T[None, None]])
NORM_4D = Transform(lambda parts: parts[0].flatten(), lambda ours: [ours[None, None, None]])
"""Earlier versions of flax store group norms as (1, 1, 1, C)."""


class GoogleFormat(WeightFormat):
    """Google's format, with names such as `Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel`."""

    name = "google"
    weights_file = "model.npz"

    def recognises(self, tensors: Tensors) -> bool:
        return _find_prefix(tensors) is not None or f"{BIT_PREFIX}root_block/standardized_conv2d/kernel" in tensors

    def describe_checkpoint(self, tensors: Tensors, folder_files: FolderFiles) -> CheckpointInfo:
        prefix = _find_prefix(tensors)
        companion = CompanionFile.read(folder_files)
        checkpoint = (
            _describe_bit(tensors, companion)
            if prefix is None
            else _describe_vit(tensors, prefix, companion, folder_files)
        )
        checkpoint.licence = folder_files.read_licence()
        return companion.complete(checkpoint)

    def list_tensor_rules(self, architecture: Architecture, dialect: str) -> list[TensorRule]:
        """`dialect` is `prefix|flavour`; the flavour may contain "big_vision" and "4d"."""
        if isinstance(architecture, ResNetArchitecture):
            return _list_bit_rules(architecture)
        prefix, _, flavour = dialect.partition("|")
        norm = NORM_4D if "4d" in flavour else UNCHANGED
        return add_prefix(_list_vit_rules(architecture, "big_vision" in flavour, norm), prefix)

    def explain_refusal(self, architecture: Architecture) -> str | None:
        if architecture.backbone is not None and (why := explain_backbone_refusal(architecture.backbone)):
            return why
        if isinstance(architecture, ResNetArchitecture):
            return None
        if architecture.gelu != "tanh":
            return f"Google's code computes the tanh form of GELU, and this model has the {architecture.gelu} one"
        if beyond := find_unsupported_options(architecture, "pool", "class_token", "position_prefix", "backbone"):
            return f"Google's code has no option for this model's {beyond}"
        if architecture.pool not in ("class", "average", "attention"):
            return f'Google\'s code has no pooling "{architecture.pool}"'
        if architecture.class_token and architecture.pool != "class":
            return "Google's code has a class token only if the head reads it"
        return None

    def choose_dialect(self, model: ImageModel) -> str:
        """Return the model's earlier dialect, else big_vision if only that has its pooling or positions."""
        if model.origin is not None and model.origin.format == self.name:
            return model.origin.dialect
        a = model.architecture
        if not isinstance(a, VitArchitecture):
            return "|"
        needs_big_vision = a.pool == "attention" or (a.class_token and a.position_prefix == "none")
        return "|big_vision" if needs_big_vision else "|"

    def make_config_files(self, model: ImageModel) -> dict[str, Any]:
        return CompanionFile.describe_model(model)


def _find_prefix(tensors: Tensors) -> str | None:
    """Return the prefix of a ViT's names, or None if the file holds no ViT."""
    for prefix in PREFIXES:
        if f"{prefix}embedding/kernel" in tensors and f"{prefix}Transformer/encoder_norm/scale" in tensors:
            return prefix
    return None


def _describe_vit(tensors: Tensors, prefix: str, companion: CompanionFile, folder_files: FolderFiles) -> CheckpointInfo:
    own = {name.removeprefix(prefix): info for name, info in tensors.items() if name.startswith(prefix)}
    big_vision = "pos_embedding" in own
    table = "pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"
    kernel = read_shape(own, "embedding/kernel", 4)
    side, channels, width = read_patch_size(kernel, (0, 1)), kernel[2], kernel[3]
    backbone = _read_hybrid_backbone(own) if "conv_root/kernel" in own else None
    stride = side * (backbone.stride if backbone else 1)
    class_token = "cls" in own
    owners = {"none": 0} if big_vision else {"class": int(class_token)}
    size = companion.image_size
    hint = (size[0] // stride, size[1] // stride) if size else None
    grid, owner = infer_grid(read_shape(own, table, 3)[1], owners, folder_files.known.grid or hint)
    attention, mlp, _ = _number_modules(big_vision)
    first = BLOCK.format(i=0)
    heads = read_shape(own, f"{first}MultiHeadDotProductAttention_{attention}/query/kernel", 3)[1]
    if (told := folder_files.known.num_heads) not in (None, heads):
        raise WeightsError(f"its tensors have an axis of {heads} attention heads, so num_heads cannot be {told}")
    architecture = VitArchitecture(
        image_size=(grid[0] * stride, grid[1] * stride),
        in_channels=read_shape(own, "conv_root/kernel", 4)[2] if backbone else channels,
        patch_size=side,
        width=width,
        depth=count_blocks(own, "Transformer/encoderblock_"),
        mlp_dim=read_shape(own, f"{first}MlpBlock_{mlp}/Dense_0/kernel", 2)[1],
        num_heads=heads,
        num_classes=read_size(own, "head/kernel", 2, axis=1) or 0,
        pool="class" if class_token else "attention" if "MAPHead_0/probe" in own else "average",
        position_prefix=owner,
        position_resize="bilinear-corners",
        representation_size=read_size(own, "pre_logits/kernel", 2, axis=1),
        backbone=backbone,
    )
    four = any(name.endswith("/scale") and len(info.shape) == 4 for name, info in own.items())
    return CheckpointInfo(
        architecture,
        _make_preprocessing(architecture),
        dialect=f"{prefix}|{'big_vision' * big_vision}{'4d' * four}",
        ignored_tensors=[name for name in tensors if not name.startswith(prefix)],
    )


def _count_stage_blocks(tensors: Tensors) -> tuple[int, ...]:
    stages = len({name.split("/")[0] for name in tensors if name.startswith("block") and "/unit" in name})
    return tuple(count_blocks(tensors, f"block{stage + 1}/unit") for stage in range(stages))


def _read_hybrid_backbone(tensors: Tensors) -> Backbone:
    return Backbone(
        blocks=_count_stage_blocks(tensors), width_factor=read_shape(tensors, "conv_root/kernel", 4)[3] // 64, **HYBRID
    )


def _describe_bit(tensors: Tensors, companion: CompanionFile) -> CheckpointInfo:
    own = {name.removeprefix(BIT_PREFIX): info for name, info in tensors.items()}
    root = read_shape(own, "root_block/standardized_conv2d/kernel", 4)
    architecture = ResNetArchitecture(
        image_size=companion.image_size or (448, 448),
        in_channels=root[2],
        num_classes=read_size(own, "head/conv2d/kernel", 4, axis=3) or 0,
        backbone=Backbone(blocks=_count_stage_blocks(own), width_factor=root[3] // 64, **BIT),
    )
    notes = [] if companion.image_size else ["image size 448, BiT's own: the file does not say"]
    return CheckpointInfo(architecture, _make_preprocessing(architecture), notes=notes)


def _make_preprocessing(architecture: Architecture) -> Preprocessing:
    return build_preprocessing(architecture.image_size, architecture.in_channels, HALF, interpolation="bilinear")


def _number_modules(big_vision: bool) -> tuple[int, int, int]:
    """Return the numbers that flax gives to a block's attention, MLP and second norm."""
    return (0, 0, 1) if big_vision else (1, 3, 2)


def _split_heads(ours: str, theirs: str, parts: Sequence[str], heads: int) -> list[TensorRule]:
    """Return the rules of a projection to heads; ours may join several of theirs, as qkv does."""
    kernel = Transform(
        lambda tensors: torch.cat([part.flatten(1).T for part in tensors]),
        lambda tensor: [part.T.unflatten(1, (heads, -1)) for part in tensor.chunk(len(parts))],
    )
    bias = Transform(
        lambda tensors: torch.cat([part.flatten() for part in tensors]),
        lambda tensor: [part.unflatten(0, (heads, -1)) for part in tensor.chunk(len(parts))],
    )
    return [
        TensorRule(f"{ours}.weight", [f"{theirs}/{part}/kernel" for part in parts], kernel),
        TensorRule(f"{ours}.bias", [f"{theirs}/{part}/bias" for part in parts], bias),
    ]


def _join_heads(ours: str, theirs: str, heads: int) -> list[TensorRule]:
    """Return the rules of the projection that joins the heads."""
    kernel = Transform(lambda parts: parts[0].flatten(0, 1).T, lambda tensor: [tensor.T.unflatten(0, (heads, -1))])
    return [TensorRule(f"{ours}.weight", f"{theirs}/kernel", kernel), TensorRule(f"{ours}.bias", f"{theirs}/bias")]


def _map_dense(ours: str, theirs: str) -> list[TensorRule]:
    return [TensorRule(f"{ours}.weight", f"{theirs}/kernel", DENSE), TensorRule(f"{ours}.bias", f"{theirs}/bias")]


def _map_norm(ours: str, theirs: str, transform: Transform = UNCHANGED) -> list[TensorRule]:
    return [
        TensorRule(f"{ours}.weight", f"{theirs}/scale", transform),
        TensorRule(f"{ours}.bias", f"{theirs}/bias", transform),
    ]


def _list_vit_rules(a: VitArchitecture, big_vision: bool, norm: Transform) -> list[TensorRule]:
    number, mlp, second_norm = _number_modules(big_vision)
    channels = a.backbone.out_channels if a.backbone else a.in_channels
    side = a.patch_size
    patch = Transform(
        lambda parts: parts[0].permute(3, 2, 0, 1).flatten(1),
        lambda ours: [ours.unflatten(1, (channels, side, side)).permute(2, 3, 1, 0)],
    )
    ours, pool, heads = "encoder.blocks.{i}", "MAPHead_0", a.num_heads
    attention = f"{BLOCK}MultiHeadDotProductAttention_{number}"
    pool_attention = f"{pool}/MultiHeadDotProductAttention_0"
    table = "pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"
    return [
        TensorRule("patch_embed.projection.weight", "embedding/kernel", patch),
        TensorRule("patch_embed.projection.bias", "embedding/bias"),
        TensorRule("class_token", "cls", ADD_BATCH_AXIS),
        TensorRule("position_embedding.0.table", table, ADD_BATCH_AXIS),
        *_map_norm(f"{ours}.norm1", f"{BLOCK}LayerNorm_0"),
        *_split_heads(f"{ours}.attention.qkv", attention, ("query", "key", "value"), heads),
        *_join_heads(f"{ours}.attention.out", f"{attention}/out", heads),
        *_map_norm(f"{ours}.norm2", f"{BLOCK}LayerNorm_{second_norm}"),
        *_map_dense(f"{ours}.mlp.fc1", f"{BLOCK}MlpBlock_{mlp}/Dense_0"),
        *_map_dense(f"{ours}.mlp.fc2", f"{BLOCK}MlpBlock_{mlp}/Dense_1"),
        *_map_norm("encoder.norm", "Transformer/encoder_norm"),
        TensorRule("pool.query", f"{pool}/probe", ADD_BATCH_AXIS),
        *_split_heads("pool.q", pool_attention, ("query",), heads),
        *_split_heads("pool.kv", pool_attention, ("key", "value"), heads),
        *_join_heads("pool.out", f"{pool_attention}/out", heads),
        *_map_norm("pool.norm", f"{pool}/LayerNorm_0"),
        *_map_dense("pool.mlp.fc1", f"{pool}/MlpBlock_0/Dense_0"),
        *_map_dense("pool.mlp.fc2", f"{pool}/MlpBlock_0/Dense_1"),
        *_map_dense("head.hidden", "pre_logits"),
        *_map_dense("head.linear", "head"),
        *_map_dense("head", "head"),
        *(_hybrid_lines(a.backbone, norm) if a.backbone else []),
    ]


def _hybrid_lines(backbone: Backbone, norm: Transform) -> list[TensorRule]:
    lines = [
        TensorRule("backbone.root.weight", "conv_root/kernel", CONVOLUTION),
        *_map_norm("backbone.root_norm", "gn_root", norm),
    ]
    for ours, stage, block in list_residual_units(backbone):
        theirs = f"block{stage + 1}/unit{block + 1}"
        for part in (1, 2, 3):
            lines.append(TensorRule(f"{ours}.conv{part}.weight", f"{theirs}/conv{part}/kernel", CONVOLUTION))
            lines += _map_norm(f"{ours}.norm{part}", f"{theirs}/gn{part}", norm)
        lines.append(TensorRule(f"{ours}.shortcut.0.weight", f"{theirs}/conv_proj/kernel", CONVOLUTION))
        lines += _map_norm(f"{ours}.shortcut.1", f"{theirs}/gn_proj", norm)
    return lines


def _list_bit_rules(a: ResNetArchitecture) -> list[TensorRule]:
    def norm(ours: str, theirs: str) -> list[TensorRule]:
        path = f"{BIT_PREFIX}{theirs}group_norm"
        return [TensorRule(f"{ours}.weight", f"{path}/gamma"), TensorRule(f"{ours}.bias", f"{path}/beta")]

    def convolution(ours: str, theirs: str) -> TensorRule:
        return TensorRule(f"{ours}.weight", f"{BIT_PREFIX}{theirs}standardized_conv2d/kernel", CONVOLUTION)

    lines = [
        convolution("backbone.root", "root_block/"),
        *norm("norm", ""),
        TensorRule("head.weight", f"{BIT_PREFIX}head/conv2d/kernel", HEAD_OF_BIT),
        TensorRule("head.bias", f"{BIT_PREFIX}head/conv2d/bias"),
    ]
    for ours, stage, block in list_residual_units(a.backbone):
        theirs = f"block{stage + 1}/unit{block + 1:02d}/"
        for number, part in enumerate(BIT_PARTS, 1):
            lines.append(convolution(f"{ours}.conv{number}", f"{theirs}{part}/"))
            lines += norm(f"{ours}.norm{number}", f"{theirs}{part}/")
        lines.append(convolution(f"{ours}.shortcut", f"{theirs}a/proj/"))
    return lines
