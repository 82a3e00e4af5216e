"""Position embeddings in a graph of any size.

`vitrail.model.positions` asks whether a grid is the model's own, and whether it is smaller. A trace would keep the
answers that its example gives and be wrong for others, so while one is made these are in their place: the same numbers,
and no questions.

Shapes: N patches on a grid of (rows, columns), D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from vitrail.model import positions
from vitrail.model.positions import Grid, SinCosPositions, sin_cos_table


@contextmanager
def positions_of_any_grid() -> Iterator[None]:
    """Within, position embeddings are traced for every grid."""
    with (
        mock.patch.object(positions, "resize_position_embedding", _resized),
        mock.patch.object(SinCosPositions, "forward", _sines),
    ):
        yield


def _resized(table: Tensor, old_grid: Grid, new_grid: Grid, prefix: int = 0) -> Tensor:
    """(prefix + N, D) → the same for another grid; as `resize_position_embedding`."""
    rows, columns = (_weights(old, new, table) for old, new in zip(old_grid, new_grid, strict=True))
    patches = torch.einsum("ir,jc,rcd->ijd", rows, columns, table[prefix:].unflatten(0, old_grid)).flatten(0, 1)
    return torch.cat([table[:prefix], patches])


def _weights(old: int, new: int, like: Tensor) -> Tensor:
    """(new, old), as `cubic_weights`; the scale is a tensor, which a trace follows."""
    scale = old / torch.full((), new, dtype=torch.int64, device=like.device).to(like.dtype)
    centres = (torch.arange(new, dtype=like.dtype, device=like.device) + 0.5) * scale
    points = torch.arange(old, dtype=like.dtype, device=like.device) + 0.5
    weights = cubic((points - centres[:, None]).abs() / scale.clamp(min=1.0))
    return weights / weights.sum(dim=1, keepdim=True)


def _sines(module: SinCosPositions, grid: Grid) -> Tensor:
    return sin_cos_table(grid, module.width).to(module.table)


def cubic(x: Tensor) -> Tensor:
    """Keys' kernel with a = −1/2."""
    near, far = (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
