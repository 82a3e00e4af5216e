"""What a model costs, counted from its architecture alone: parameters, operations for one image, tokens.

An operation is a multiplication or an addition, so a multiply-accumulate counts twice, as in the paper's
exaFLOPs; only matrix products and convolutions are counted. No torch here, so a table of models appears at once; but a
network of timm's has no formula, and is built and run without memory to be counted.
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
"""A training step costs so many forward passes: the backward pass is two products for each one of the forward's."""


class Cost(NamedTuple):
    """Parameters, and operations in one forward pass of one image."""

    parameters: int
    flops: int


def compute_cost(architecture: Architecture | TimmArchitecture, image_size: tuple[int, int] | None = None) -> Cost:
    """The cost at an image size; at the architecture's own if None. Parameters are those of a model built for it."""
    if isinstance(architecture, TimmArchitecture):
        from vitrail.model.timm_model import measure_cost

        return Cost(*measure_cost(architecture.copy_at_size(image_size or architecture.image_size)))
    height, width = image_size or architecture.image_size
    parts = _resnet if isinstance(architecture, ResNetArchitecture) else _vit
    return _total(parts(architecture, height, width))  # type: ignore[arg-type]


def count_tokens(architecture: VitArchitecture, image_size: tuple[int, int] | None = None) -> int:
    """Length of the sequence that the encoder sees."""
    rows, columns = architecture.grid(image_size or architecture.image_size)
    return architecture.prefix + rows * columns


def _total(costs: Iterable[Cost], times: int = 1) -> Cost:
    costs = list(costs)
    return Cost(times * sum(c.parameters for c in costs), times * sum(c.flops for c in costs))


def _vit(a: VitArchitecture, height: int, width: int) -> Iterator[Cost]:
    grid = rows, columns = a.grid((height, width))
    patches = rows * columns
    norm = Cost(_norm_parameters(a), 0)

    if a.backbone:
        yield from _backbone(a.backbone, a.in_channels, height, width)
    if a.conv_stem:
        yield from _conv_stem(a.conv_stem, a.in_channels, a.width, height, width)
    else:
        channels = a.backbone.out_channels if a.backbone else a.in_channels
        yield _dense(patches, channels * a.patch_size**2, a.width, a.patch_bias)
    yield Cost(a.prefix * a.width, 0)
    yield _input_positions(a, grid)
    yield from [norm] * (1 + a.input_norm)  # the last norm, wherever it stands
    yield _total(_axial_block(a, rows, columns) if a.block == "axial" else _block(a, 1, patches), a.depth)
    if a.pool == "attention":
        yield from _attention_pool(a, patches)
    if a.representation_size:
        yield _dense(1, a.representation_width, a.representation_size)
    if a.num_classes and a.pool == "distilled":
        yield from [_dense(1, a.width, a.num_classes)] * 2
    elif a.num_classes:
        yield _dense(1, a.representation_size or a.representation_width, a.num_classes)


def _norm_parameters(a: VitArchitecture) -> int:
    return a.width * (2 if a.norm == "layer" else 1)


def _input_positions(a: VitArchitecture, grid: tuple[int, int]) -> Cost:
    table = {
        "learned-1d": (a.position_rows + grid[0] * grid[1]) * a.width,
        "learned-2d": a.position_rows * a.width + (grid[0] + grid[1]) * (a.width // 2),
    }.get(a.position, 0)
    return Cost(table * (a.depth if a.position_at == "every-layer" else 1), 0)


def _block(a: VitArchitecture, sequences: int, patches: int) -> Iterator[Cost]:
    """An encoder block on so many sequences of so many patches each, and the prefix."""
    length = a.prefix + patches
    yield Cost(2 * _norm_parameters(a) + (2 * a.width if a.layer_scale is not None else 0), 0)
    yield _dense(sequences * length, a.width, 3 * a.width, a.qkv_bias)
    yield Cost(0, sequences * 4 * length**2 * a.width)  # queries · keys, then weights · values
    if a.position == "relative":
        offsets = 2 * patches - 1
        yield Cost(offsets * (a.width // a.num_heads), 2 * patches * offsets * a.width)
    yield _dense(sequences * length, a.width, a.width)
    yield from _mlp(a, sequences * length)


def _axial_block(a: VitArchitecture, rows: int, columns: int) -> Iterator[Cost]:
    yield from _block(a, rows, columns)
    yield from _block(a, columns, rows)


def _mlp(a: VitArchitecture, length: int) -> Iterator[Cost]:
    yield _dense(length, a.width, a.mlp_dim)
    yield _dense(length, a.mlp_dim, a.width)


def _attention_pool(a: VitArchitecture, patches: int) -> Iterator[Cost]:
    yield Cost(a.width + _norm_parameters(a), 4 * patches * a.width)
    yield _dense(patches, a.width, 2 * a.width)
    yield from [_dense(1, a.width, a.width)] * 2
    yield from _mlp(a, 1)


def _conv_stem(layers: Iterable[ConvLayer], channels: int, width: int, height: int, columns: int) -> Iterator[Cost]:
    for layer in layers:
        height, columns = height // layer.stride, columns // layer.stride
        has_norm = layer.norm != "none"
        yield _dense(height * columns, channels * layer.kernel**2, layer.channels, bias=not has_norm)
        yield Cost(2 * layer.channels * has_norm, 0)
        channels = layer.channels
    yield _dense(height * columns, channels, width)


def _resnet(a: ResNetArchitecture, height: int, width: int) -> Iterator[Cost]:
    yield from _backbone(a.backbone, a.in_channels, height, width)
    yield Cost(2 * a.backbone.out_channels, 0)
    if a.num_classes:
        yield _dense(1, a.backbone.out_channels, a.num_classes)


def _backbone(b: Backbone, in_channels: int, height: int, width: int) -> Iterator[Cost]:
    hybrid = b.form == "hybrid"
    channels = 64 * b.width_factor
    height, width = _halved(height), _halved(width)
    yield _conv(height * width, in_channels, channels, 7)
    yield Cost(2 * channels * hybrid, 0)
    height, width, in_channels = _halved(height), _halved(width), channels
    for stage, blocks in enumerate(b.blocks):
        for index in range(blocks):
            before = height * width
            halves = stage > 0 and index == 0
            if halves:
                height, width = _halved(height), _halved(width)
            pixels, out_channels = height * width, 4 * channels
            yield _conv(before, in_channels, channels, 1)
            yield _conv(pixels, channels, channels, 3)
            yield _conv(pixels, channels, out_channels, 1)
            projects = halves or in_channels != out_channels
            if projects:
                yield _conv(pixels, in_channels, out_channels, 1)
            # A norm after each convolution, the shortcut's too; or before each of the three.
            normed = 2 * channels + (out_channels * (1 + projects) if hybrid else in_channels)
            yield Cost(2 * normed, 0)
            in_channels = out_channels
        channels *= 2


def _halved(side: int) -> int:
    return (side + 1) // 2


def _conv(pixels: int, in_channels: int, out_channels: int, kernel: int) -> Cost:
    return _dense(pixels, in_channels * kernel**2, out_channels, bias=False)


def _dense(rows: int, inputs: int, outputs: int, bias: bool = True) -> Cost:
    """A product of (rows × inputs) by (inputs × outputs)."""
    return Cost((inputs + bias) * outputs, 2 * rows * inputs * outputs)
