"""Position embeddings: learned 1-D and 2-D, fixed sine-cosine, relative; and their resize from grid to grid.

Shapes: N patches on a grid of (rows, columns) in row-major order, D width, T tokens = prefix + N, H heads, d = D/H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.errors import InputError

Grid = tuple[int, int]
"""Rows and columns of patches."""


def resize_position_embedding(table: Tensor, old_grid: Grid, new_grid: Grid, prefix: int = 0) -> Tensor:
    """A learned table for a grid of another size, by 2-D interpolation according to the place in the image.

    Args:
        table: (prefix + old rows · old columns, D).
        prefix: rows at the front that belong to no patch (class token, registers); they are left alone.

    Returns:
        (prefix + new rows · new columns, D); the same tensor, bit for bit, when the grids are equal.
    """
    if _is_same_grid(old_grid, new_grid):
        return table
    patches = table[prefix:].to(torch.promote_types(table.dtype, torch.float32))  # half precision is too coarse
    rows, columns = (compute_cubic_weights(old, new, patches) for old, new in zip(old_grid, new_grid, strict=True))
    patches = torch.einsum("ir,jc,rcd->ijd", rows, columns, patches.unflatten(0, old_grid)).flatten(0, 1)
    return torch.cat([table[:prefix], patches.to(table.dtype)])


def compute_cubic_weights(old: int, new: int, like: Tensor) -> Tensor:
    """(new, old): the weights that resize a row of `old` points to `new` ones, bicubic with antialias.

    The same as `torch.nn.functional.interpolate`, as a matrix: that function cannot train in a graph compiled for
    changing sizes, is missing on some devices and exports badly; a product works everywhere.
    """
    scale = old / new
    centres = (torch.arange(new, dtype=like.dtype, device=like.device) + 0.5) * scale
    points = torch.arange(old, dtype=like.dtype, device=like.device) + 0.5
    # Shrinking widens the kernel. `max` would ask which is larger, and a trace would keep the answer for every size.
    weights = compute_cubic_kernel((points - centres[:, None]).abs() / torch.sym_max(scale, 1.0))
    return weights / weights.sum(dim=1, keepdim=True)


def compute_cubic_kernel(x: Tensor) -> Tensor:
    """Keys' kernel with a = −1/2, of distances."""
    near, far = (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
    return near.where(x < 1, far.where(x < 2, 0.0))


def _is_same_grid(own: Grid, grid: Grid) -> bool:
    """Whether a grid is a table's own; not where a trace leaves it open, which would keep the answer for every grid."""
    return not any(isinstance(side, torch.SymInt) for side in grid) and own == grid


class LearnedPositions1d(nn.Module):
    """E_pos of equation 1: one learned row for each token, patches in row-major order."""

    def __init__(self, grid: Grid, width: int, prefix: int) -> None:
        """`prefix`: how many tokens before the patches have a row."""
        super().__init__()
        self.grid = grid
        self.prefix = prefix
        self.table = nn.Parameter(torch.empty(prefix + grid[0] * grid[1], width))

    def forward(self, grid: Grid) -> Tensor:
        """(prefix + N, D) for a grid; interpolated where it is not the module's own."""
        return resize_position_embedding(self.table, self.grid, grid, self.prefix)

    @torch.no_grad()
    def resize(self, grid: Grid) -> None:
        """Change the grid for good."""
        self.table = nn.Parameter(self(grid).clone(), self.table.requires_grad)
        self.grid = grid


class LearnedPositions2d(nn.Module):
    """Two learned tables of width D/2, one for the column (x) and one for the row (y), concatenated."""

    def __init__(self, grid: Grid, width: int, prefix: int) -> None:
        super().__init__()
        self.grid = grid
        self.prefix = prefix
        self.prefix_table = nn.Parameter(torch.empty(prefix, width)) if prefix else None
        self.row_table = nn.Parameter(torch.empty(grid[0], width // 2))
        self.column_table = nn.Parameter(torch.empty(grid[1], width // 2))

    def forward(self, grid: Grid) -> Tensor:
        """(prefix + N, D) for a grid."""
        rows, columns = self._axes(grid)
        x = columns[None, :].expand(*grid, -1)
        y = rows[:, None].expand(*grid, -1)
        patches = torch.cat([x, y], dim=-1).flatten(0, 1)
        return patches if self.prefix_table is None else torch.cat([self.prefix_table, patches])

    def _axes(self, grid: Grid) -> tuple[Tensor, Tensor]:
        # Interpolation in two dimensions is separable, so resizing each axis resizes the grid.
        rows = resize_position_embedding(self.row_table, (self.grid[0], 1), (grid[0], 1))
        columns = resize_position_embedding(self.column_table, (1, self.grid[1]), (1, grid[1]))
        return rows, columns

    @torch.no_grad()
    def resize(self, grid: Grid) -> None:
        """Change the grid for good."""
        rows, columns = self._axes(grid)
        self.row_table = nn.Parameter(rows.clone(), self.row_table.requires_grad)
        self.column_table = nn.Parameter(columns.clone(), self.column_table.requires_grad)
        self.grid = grid


class SinCosPositions(nn.Module):
    """Fixed sines and cosines of the patch's place in two dimensions; exact at any grid, nothing to learn."""

    table: Tensor
    prefix = 0
    """Tokens that are no patch have no place."""

    def __init__(self, grid: Grid, width: int) -> None:
        super().__init__()
        self.grid = grid
        self.width = width
        self.register_buffer("table", torch.empty(grid[0] * grid[1], width))

    def fill(self) -> None:
        """Compute the table of the module's own grid."""
        if not self.table.is_meta:
            self.table.copy_(compute_sin_cos_table(self.grid, self.width))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # What moves or converts a module passes here. Computed anew, the table is exact in every dtype.
        super()._apply(fn, recurse)
        self.fill()
        return self

    def forward(self, grid: Grid) -> Tensor:
        """(N, D) for a grid."""
        if _is_same_grid(self.grid, grid):
            return self.table
        return compute_sin_cos_table(grid, self.width).to(self.table)

    def resize(self, grid: Grid) -> None:
        """Change the grid for good."""
        self.table = self(grid)
        self.grid = grid


def compute_sin_cos_table(grid: Grid, width: int, temperature: float = 10_000.0) -> Tensor:
    """(N, D) in float64: sin x, cos x, sin y, cos y, each at D/4 frequencies from 1 to 1/temperature (MoCo v3's)."""
    # On the CPU whatever the default device: float64 does not exist everywhere.
    frequencies = temperature ** -torch.linspace(0, 1, width // 4, dtype=torch.float64, device="cpu")
    axes = [torch.arange(side, dtype=torch.float64, device="cpu") for side in grid]
    y, x = torch.meshgrid(*axes, indexing="ij")
    x, y = x.flatten()[:, None] * frequencies, y.flatten()[:, None] * frequencies
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)


class RelativePositions(nn.Module):
    """Learned embeddings of 1-D offsets between patches, used as extra keys: a bias on the attention logits.

    bias[q, k] = query_q · r[p_q − p_k] / √d over patches in raster order, one table for each layer, shared by its
    heads. Where the paper is silent: pairs with a token that is no patch get no bias.
    """

    def __init__(self, grid: Grid, head_width: int, prefix: int) -> None:
        super().__init__()
        self.grid = grid
        self.prefix = prefix
        self.patches = grid[0] * grid[1]
        self.table = nn.Parameter(torch.empty(2 * self.patches - 1, head_width))  # row p_q − p_k + N − 1

    def forward(self, queries: Tensor) -> Tensor:
        """(B, H, T, d) queries → (B, H, T, T) bias."""
        n = self.patches
        queries = queries[:, :, self.prefix :]
        logits = queries @ self.table.flip(0).T * queries.shape[-1] ** -0.5  # column k − q + N − 1
        # Skew: padded to 2N columns and read back as 2N − 1, row q has moved q places, and the key is the column.
        logits = F.pad(logits, (0, 1)).flatten(2)[..., : n * (2 * n - 1)]
        logits = logits.unflatten(2, (n, 2 * n - 1))[..., n - 1 :]
        return F.pad(logits, (self.prefix, 0, self.prefix, 0))

    def resize(self, grid: Grid) -> None:
        """Refused for another grid: an offset in raster order means another place once the columns change."""
        if grid != self.grid:
            raise InputError(explain_relative_resize(self.grid, grid))


def explain_relative_resize(old: Grid, new: Grid) -> str:
    """The sentence on a grid that relative positions were not learned for."""
    return (
        f"relative position embeddings are tables of raster offsets, and those for {old[0]}×{old[1]} patches cannot be "
        f"resized to {new[0]}×{new[1]}: keep the image size, or train with another position embedding"
    )


InputPositions = LearnedPositions1d | LearnedPositions2d | SinCosPositions


def build_input_positions(kind: str, grid: Grid, width: int, prefix: int) -> InputPositions | None:
    """The module that is added to the tokens; None for those that are not (none, relative)."""
    if kind == "learned-1d":
        return LearnedPositions1d(grid, width, prefix)
    if kind == "learned-2d":
        return LearnedPositions2d(grid, width, prefix)
    if kind == "sin-cos":
        return SinCosPositions(grid, width)
    return None
