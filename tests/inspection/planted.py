"""Vision Transformers whose weights are set by hand, so that their attention is known beforehand.

Each token is known by its position alone: patches embed to zero and the position table is one-hot. The norms give the
one-hot vectors back, and attention and MLP add nothing, so every layer sees the same. Softmax of a logit of 1,000 above
all others is exactly 1. In float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import vitrail
from vitrail.model.architecture import POOLS_WITH_CLASS_TOKEN

PATCH = 4
ABOVE = 1_000.0
"""The logit of what a query attends to; that of all else is 0."""


@torch.no_grad()
def uniform(rows: int = 4, columns: int = 6, **options: Any) -> vitrail.VisionTransformer:
    """Queries and keys are zero: every token attends to all alike, a class token and registers among them.

    Whatever options; all other weights are drawn at random.
    """
    fields = {"width": 16, "depth": 2, "num_heads": 2, "mlp_dim": 24, "num_classes": 3, **options}
    model = vitrail.create_model(f"Ti/{PATCH}", image_size=(rows * PATCH, columns * PATCH), seed=0, **fields)
    for block in model.encoder.blocks:
        for part in [block.rows, block.columns] if model.axial else [block]:
            part.attention.qkv.weight[: 2 * model.width] = 0
            part.attention.qkv.bias[: 2 * model.width] = 0
    return model.double().eval()


def identity(rows: int = 4, columns: int = 6, **options: Any) -> vitrail.VisionTransformer:
    """Two heads in which every token attends to itself and to nothing else."""
    return offset(rows, columns, (0, 0), (0, 0), **options)


def offset(rows: int, columns: int, *shifts: tuple[int, int], **options: Any) -> vitrail.VisionTransformer:
    """A head for each shift (rows down, columns to the right), in which every patch attends to the one that lies so.

    A patch whose target is outside of the image attends to itself, and so do a class token and registers.
    """
    return attending(rows, columns, [shifted(rows, columns, shift) for shift in shifts], **options)


def swap(rows: int, columns: int, apart: int = 1, **options: Any) -> vitrail.VisionTransformer:
    """One head in which columns that lie `apart` attend to each other: 0 to 1 and 1 to 0, or 0 to 2 and 2 to 0, …

    The number of columns divides by twice `apart`, so every target is inside.
    """
    assert columns % (2 * apart) == 0
    partner = [column + apart if column // apart % 2 == 0 else column - apart for column in range(columns)]
    return attending(
        rows, columns, [[r * columns + partner[c] for r in range(rows) for c in range(columns)]], **options
    )


def shifted(rows: int, columns: int, shift: tuple[int, int]) -> list[int]:
    """For each patch the number of the one that lies so, or its own where there is none."""
    places = [(row, column, row + shift[0], column + shift[1]) for row in range(rows) for column in range(columns)]
    return [
        r * columns + c if r in range(rows) and c in range(columns) else row * columns + column
        for row, column, r, c in places
    ]


@torch.no_grad()
def attending(
    rows: int,
    columns: int,
    targets: Sequence[Sequence[int]],
    *,
    depth: int = 2,
    patch_size: int = PATCH,
    **options: Any,
) -> vitrail.VisionTransformer:
    """A head for each of `targets`, in which patch i attends to patch targets[i]; other tokens attend to themselves.

    `options` are others of `create_model`: pool, registers, … The width follows from the number of tokens.
    """
    prefix = options.get("registers", 0) + options.get(
        "class_token", options.get("pool", "class") in POOLS_WITH_CLASS_TOKEN
    )
    tokens = prefix + rows * columns
    model = vitrail.create_model(
        f"Ti/{patch_size}",
        **{"num_classes": 3, "mlp_dim": 8, **options},
        image_size=(rows * patch_size, columns * patch_size),
        width=tokens * len(targets),
        num_heads=len(targets),
        depth=depth,
        position="learned-1d",
        position_prefix="all",
    ).double()
    for parameter in model.parameters():
        parameter.zero_()
    model.position_embedding[0].table[:, :tokens] = torch.eye(tokens, dtype=torch.float64)
    for block in model.encoder.blocks:
        _give_back_one_hot(block.norm1)
        for head, patches in enumerate(targets):
            _attend(block.attention, head, [*range(prefix), *(prefix + patch for patch in patches)])
    return model.eval()


def _give_back_one_hot(norm: torch.nn.LayerNorm) -> None:
    """Of a one-hot vector of D numbers the mean is 1/D and the variance 1/D − 1/D²."""
    width = norm.weight.numel()
    norm.weight.fill_((1 / width - 1 / width**2 + norm.eps) ** 0.5)
    norm.bias.fill_(1 / width)


def _attend(attention: torch.nn.Module, head: int, targets: Sequence[int]) -> None:
    """Keys are the one-hot vectors themselves, queries those of the targets, times what the softmax needs."""
    tokens, width = len(targets), attention.qkv.in_features
    for token, target in enumerate(targets):
        attention.qkv.weight[head * tokens + target, token] = ABOVE * tokens**0.5
        attention.qkv.weight[width + head * tokens + token, token] = 1
