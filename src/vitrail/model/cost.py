"""What a model costs, counted from its architecture alone: parameters, operations for one image, tokens.

An operation is a multiplication or an addition, so a multiply-accumulate counts twice, as in the paper's
exaFLOPs; only matrix products and convolutions are counted. This file does not import torch, so that a table of models
appears at once. A network of timm's has no formula: it is built and run on the meta device to be counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vitrail.model.architecture import (
    Architecture,
    Backbone,
    ConvLayer,
    ResNetArchitecture,
    TimmArchitecture,
    VitArchitecture,
)

FORWARD_AND_BACKWARD = 3
"""A training step costs this many forward passes: the backward pass has two products for each of the forward's."""


class Cost(NamedTuple):
    """The number of parameters, and of operations in one forward pass of one image."""

    parameters: int
    flops: int


def compute_cost(architecture: Architecture | TimmArchitecture, image_size: tuple[int, int] | None = None) -> Cost:
    """Return the cost of a model built for an image size (height, width); the architecture's own if None."""
    if isinstance(architecture, TimmArchitecture):
        from vitrail.model.timm_model import measure_cost

        return Cost(*measure_cost(architecture.copy_at_size(image_size or architecture.image_size)))
    height, width = image_size or architecture.image_size
    count = _count_resnet if isinstance(architecture, ResNetArchitecture) else _count_vit
    return _sum_costs(count(architecture, height, width))  # type: ignore[arg-type]


def count_tokens(architecture: VitArchitecture, image_size: tuple[int, int] | None = None) -> int:
    """Return the length of the encoder's sequence: patches, class token and registers."""
    rows, columns = architecture.grid(image_size or architecture.image_size)
    return architecture.prefix + rows * columns


def count_encoder_flops(architecture: VitArchitecture, patches: int) -> int:
    """Return the operations of all encoder blocks for the prefix and so many patches."""
    return _sum_costs(_count_block(architecture, 1, patches), architecture.depth).flops


def _sum_costs(costs: Iterable[Cost], times: int = 1) -> Cost:
    costs = list(costs)
    return Cost(times * sum(c.parameters for c in costs), times * sum(c.flops for c in costs))


def _count_vit(a: VitArchitecture, height: int, width: int) -> Iterator[Cost]:
    grid = rows, columns = a.grid((height, width))
    patches = rows * columns
    norm = Cost(_count_norm_parameters(a), 0)

    if a.backbone:
        yield from _count_backbone(a.backbone, a.in_channels, height, width)
    if a.conv_stem:
        yield from _count_conv_stem(a.conv_stem, a.in_channels, a.width, height, width)
    else:
        channels = a.backbone.out_channels if a.backbone else a.in_channels
        yield _count_dense(patches, channels * a.patch_size**2, a.width, a.patch_bias)
    yield Cost(a.prefix * a.width, 0)
    yield _count_positions(a, grid)
    yield from [norm] * (a.final_norm + a.input_norm + a.patch_norm)  # the last norm, wherever it stands
    yield _sum_costs(
        _count_axial_block(a, rows, columns) if a.block == "axial" else _count_block(a, 1, patches), a.depth
    )
    if a.pool == "attention":
        yield from _count_attention_pool(a, patches)
    if a.representation_size:
        yield _count_dense(1, a.representation_width, a.representation_size)
    if a.num_classes and a.pool == "distilled":
        yield from [_count_dense(1, a.width, a.num_classes)] * 2
    elif a.num_classes:
        yield _count_dense(1, a.representation_size or a.representation_width, a.num_classes)


def _count_norm_parameters(a: VitArchitecture, width: int | None = None) -> int:
    return (width or a.width) * (2 if a.norm == "layer" else 1)


def _count_positions(a: VitArchitecture, grid: tuple[int, int]) -> Cost:
    """Count tables and frequencies, but not the paper's relative positions, which are part of a block."""
    table = {
        "learned-1d": (a.position_rows + grid[0] * grid[1]) * a.width,
        "learned-2d": a.position_rows * a.width + (grid[0] + grid[1]) * (a.width // 2),
        "relative-bias": ((2 * grid[0] - 1) * (2 * grid[1] - 1) + 3 * a.class_token) * a.num_heads,
    }.get(a.position, 0)
    frequencies = a.depth * a.width if a.rotary is not None and a.rotary.learned else 0
    return Cost(table * (a.depth if a.position_at == "every-layer" else 1) + frequencies, 0)


def _count_block(a: VitArchitecture, sequences: int, patches: int) -> Iterator[Cost]:
    """Count an encoder block that runs on several sequences of the prefix and `patches` patches each."""
    length = a.prefix + patches
    yield Cost(2 * _count_norm_parameters(a) + (2 * a.width if a.layer_scale is not None else 0), 0)
    yield Cost(
        2 * _count_norm_parameters(a, a.head_width) * a.qk_norm + _count_norm_parameters(a) * a.attention_norm, 0
    )
    yield _count_dense(sequences * length, a.width, 3 * a.width, bias=False)
    yield Cost(a.width * (3 if a.key_bias else 2) * a.qkv_bias, 0)
    yield Cost(0, sequences * 4 * length**2 * a.width)  # queries · keys, then weights · values
    if a.position == "relative":
        offsets = 2 * patches - 1
        yield Cost(offsets * (a.width // a.num_heads), 2 * patches * offsets * a.width)
    yield _count_dense(sequences * length, a.width, a.width, a.out_bias)
    yield Cost(_count_norm_parameters(a, a.mlp_dim) * a.mlp_norm, 0)
    yield from _count_mlp(a, sequences * length)


def _count_axial_block(a: VitArchitecture, rows: int, columns: int) -> Iterator[Cost]:
    yield from _count_block(a, rows, columns)
    yield from _count_block(a, columns, rows)


def _count_mlp(a: VitArchitecture, length: int) -> Iterator[Cost]:
    yield _count_dense(length, a.width, a.mlp_dim * (2 if a.mlp == "swiglu" else 1), a.mlp_bias)
    yield _count_dense(length, a.mlp_dim, a.width, a.mlp_bias)


def _count_attention_pool(a: VitArchitecture, patches: int) -> Iterator[Cost]:
    length, mlp_dim = patches + a.prefix * a.pool_prefix, a.pool_mlp_dim or a.mlp_dim
    yield Cost(a.width + _count_norm_parameters(a), 4 * length * a.width)
    yield _count_dense(length, a.width, 2 * a.width)
    yield from [_count_dense(1, a.width, a.width)] * 2
    yield _count_dense(1, a.width, mlp_dim)
    yield _count_dense(1, mlp_dim, a.width)


def _count_conv_stem(
    layers: Iterable[ConvLayer], channels: int, width: int, height: int, columns: int
) -> Iterator[Cost]:
    for layer in layers:
        height, columns = height // layer.stride, columns // layer.stride
        has_norm = layer.norm != "none"
        yield _count_dense(height * columns, channels * layer.kernel**2, layer.channels, bias=not has_norm)
        yield Cost(2 * layer.channels * has_norm, 0)
        channels = layer.channels
    yield _count_dense(height * columns, channels, width)


def _count_resnet(a: ResNetArchitecture, height: int, width: int) -> Iterator[Cost]:
    yield from _count_backbone(a.backbone, a.in_channels, height, width)
    yield Cost(2 * a.backbone.out_channels, 0)
    if a.num_classes:
        yield _count_dense(1, a.backbone.out_channels, a.num_classes)


def _count_backbone(b: Backbone, in_channels: int, height: int, width: int) -> Iterator[Cost]:
    hybrid = b.form == "hybrid"
    channels = b.root_channels
    if b.root == "large":
        height, width = _halve(height), _halve(width)
    yield _count_conv(height * width, in_channels, channels, b.root_kernel)
    yield Cost(2 * channels * hybrid, 0)
    if b.root == "large":  # its pooling
        height, width = _halve(height), _halve(width)
    in_channels = channels
    for stage, blocks in enumerate(b.blocks):
        for index in range(blocks):
            before = height * width
            halves = stage > 0 and index == 0
            if halves:
                height, width = _halve(height), _halve(width)
            pixels, out_channels = height * width, 4 * channels
            yield _count_conv(before, in_channels, channels, 1)
            yield _count_conv(pixels, channels, channels, 3)
            yield _count_conv(pixels, channels, out_channels, 1)
            projects = halves or in_channels != out_channels
            if projects:
                yield _count_conv(pixels, in_channels, out_channels, 1)
            # A norm after each convolution, the shortcut's too; or before each of the three.
            normed = 2 * channels + (out_channels * (1 + projects) if hybrid else in_channels)
            yield Cost(2 * normed, 0)
            in_channels = out_channels
        channels *= 2


def _halve(side: int) -> int:
    return (side + 1) // 2


def _count_conv(pixels: int, in_channels: int, out_channels: int, kernel: int) -> Cost:
    return _count_dense(pixels, in_channels * kernel**2, out_channels, bias=False)


def _count_dense(rows: int, inputs: int, outputs: int, bias: bool = True) -> Cost:
    """Count a product of (rows × inputs) by (inputs × outputs)."""
    return Cost((inputs + bias) * outputs, 2 * rows * inputs * outputs)
