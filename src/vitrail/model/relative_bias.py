"""BEiT's relative positions: a learned number for each head and each offset between two patches, added to the logits.

Shapes: N patches on a grid of R rows and C columns, T tokens = prefix + N (the prefix is the class token or nothing),
H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.model.architecture import VitArchitecture
from vitrail.model.positions import Grid, compute_resize_weights, is_same_grid

CLASS_TOKEN_ROWS = 3
"""Rows at the end of the table: from the class token to a patch, from a patch to the class token, and to itself."""


class RelativeBias(nn.Module):
    """bias[q, k] = table[row of q − row of k, column of q − column of k] for each head."""

    def __init__(self, grid: Grid, num_heads: int, class_token: bool, evenly: bool = False) -> None:
        """Make the table. For other grids its offsets are stretched as `resize_relative_bias` does, or `evenly`."""
        super().__init__()
        self.grid = grid
        self.evenly = evenly
        self.extra = CLASS_TOKEN_ROWS * class_token
        self.table = nn.Parameter(torch.empty((2 * grid[0] - 1) * (2 * grid[1] - 1) + self.extra, num_heads))

    def forward(self, grid: Grid) -> Tensor:
        """Return the bias for a grid, (1, H, T, T); queries are rows, keys are columns."""
        table = resize_relative_bias(self.table, self.grid, grid, self.extra, self.evenly)
        (rows, columns), (offsets, of_class_token) = grid, _split_table(table, self.extra)
        row_offsets, column_offsets = (_subtract_places(side, table.device) for side in grid)
        index = row_offsets[:, None, :, None] * (2 * columns - 1) + column_offsets[None, :, None, :]  # R, C, R, C
        bias = offsets[index.reshape(rows * columns, rows * columns)]  # N, N, H
        if self.extra:
            to_patch, from_patch, to_itself = (of_class_token[row][None, None] for row in range(CLASS_TOKEN_ROWS))
            above = torch.cat([to_itself, to_patch.expand(1, rows * columns, -1)], dim=1)
            bias = torch.cat([above, torch.cat([from_patch.expand(rows * columns, 1, -1), bias], dim=1)])
        return bias.permute(2, 0, 1)[None]

    @torch.no_grad()
    def resize(self, grid: Grid) -> None:
        """Change the module's own grid for good."""
        table = resize_relative_bias(self.table, self.grid, grid, self.extra, self.evenly)
        self.table = nn.Parameter(table.clone(), self.table.requires_grad)
        self.grid = grid


def build_relative_bias(a: VitArchitecture, grid: Grid) -> RelativeBias:
    """Build the table of one attention, or of all."""
    return RelativeBias(grid, a.num_heads, a.class_token, evenly=a.position_resize == "bilinear")


def _split_table(table: Tensor, extra: int) -> tuple[Tensor, Tensor]:
    """Return the rows of offsets, and the `extra` ones after them."""
    count = table.shape[0] - extra  # `len` would fix the size of a table that is traced for any grid
    return table[:count], table[count:]


def _subtract_places(side: int, device: torch.device) -> Tensor:
    """Return q − k + side − 1 for all places q and k of an axis, (side, side): a number from 0 on."""
    places = torch.arange(side, device=device)
    return places[:, None] - places + (side - 1)


def resize_relative_bias(table: Tensor, old_grid: Grid, new_grid: Grid, extra: int = 0, evenly: bool = False) -> Tensor:
    """Interpolate a table of offsets to another grid, as timm does (after BEiT's own code).

    The old offsets are spread over the new range with steps that grow from the centre outwards, by the same factor from
    step to step; between them the table is linear. So short offsets keep their meaning in patches, and long ones are
    stretched. On a smaller grid the centre of the table remains. transformers stretches all offsets evenly instead.

    Args:
        table: ((2R − 1)·(2C − 1) + extra, H) for the old grid of R×C patches.
        old_grid: rows and columns of patches of the table.
        new_grid: rows and columns of patches of the result.
        extra: rows at the end that are no offsets between patches; they stay unchanged.
        evenly: stretch as transformers does, bilinearly.

    Returns:
        The table for the new grid; the table itself if the grids are equal.
    """
    if is_same_grid(old_grid, new_grid):
        return table
    offsets, rest = _split_table(table, extra)
    offsets = offsets.unflatten(0, (2 * old_grid[0] - 1, 2 * old_grid[1] - 1))
    offsets = offsets.to(torch.promote_types(table.dtype, torch.float32))  # half precision is too coarse
    sides = list(zip(old_grid, new_grid, strict=True))
    if evenly:
        rows, columns = (compute_resize_weights(2 * old - 1, 2 * new - 1, offsets, "bilinear") for old, new in sides)
    else:
        # 0 for equal grids, which a trace sees too: their table stays as it is. A comparison would be fixed in it.
        changed = torch.sym_min(sum(torch.sym_max(new - old, old - new) for old, new in sides), 1)
        rows, columns = (
            changed * compute_offset_weights(old, new, offsets) + (1 - changed) * _match_offsets(old, new, offsets)
            for old, new in sides
        )
    offsets = torch.einsum("ir,jc,rch->ijh", rows, columns, offsets).flatten(0, 1)
    return torch.cat([offsets.to(table.dtype), rest])


def compute_offset_weights(old: int, new: int, like: Tensor) -> Tensor:
    """Return the (2·new − 1, 2·old − 1) matrix that interpolates the offsets on an axis of `old` patches linearly."""
    wanted = torch.arange(2 * new - 1, dtype=like.dtype, device=like.device) - (new - 1)
    if old == 1:
        return torch.ones_like(wanted)[:, None]
    steps = torch.arange(1, old, dtype=like.dtype, device=like.device)
    positive = _sum_powers(_find_growth(old - 1, wanted[-1]), steps)
    known = torch.cat([-positive.flip(0), positive.new_zeros(1), positive])
    wanted = wanted.clamp(-positive[-1], positive[-1])[:, None]  # beyond the ends the table is constant
    gaps = known.diff()
    rising = (wanted - known[:-1]) / gaps  # 0 to 1 between a known place and the next
    ones = torch.ones_like(wanted)
    weights = torch.minimum(torch.cat([ones, rising], dim=1), torch.cat([1 - rising, ones], dim=1))
    return weights.clamp(min=0)


def _match_offsets(old: int, new: int, like: Tensor) -> Tensor:
    """Return a (2·new − 1, 2·old − 1) matrix with 1 where the offsets are equal: the identity for equal grids."""
    wanted, known = (torch.arange(2 * side - 1, device=like.device) - (side - 1) for side in (new, old))
    return (wanted[:, None] == known).to(like.dtype)


def _sum_powers(growth: Tensor, count: Tensor | int) -> Tensor:
    """Return 1 + growth + growth² + … with `count` terms."""
    total: Tensor = (1 - growth**count) / (1 - growth)
    return total


def _find_growth(count: int, reach: Tensor) -> Tensor:
    """Return the factor from step to step, 1.01 to 1.5, with which `count` steps, the first of length 1, go to `reach`.

    It halves the range 19 times, until it is below 1e-6, as BEiT's code does; written with tensors, it can be traced
    for sizes that are not known yet.
    """
    low, high = torch.full_like(reach, 1.01), torch.full_like(reach, 1.5)
    growth = (low + high) / 2
    for _ in range(19):
        growth = (low + high) / 2
        too_far = _sum_powers(growth, count) > reach
        low, high = low.where(too_far, growth), growth.where(too_far, high)
    return growth
