"""Position embeddings: learned 1-D and 2-D, sine-cosine and relative; `resize_position_embedding` interpolates them.

Shapes: N patches on a grid of (rows, columns) in row-major order, D width, T tokens = prefix + N, H heads, d = D/H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.errors import InputError
from vitrail.model.architecture import PositionResize, VitArchitecture

Grid = tuple[int, int]
"""Rows and columns of patches."""
OFFSET = 0.1
"""What DINOv2's code adds to the rows and columns of a new grid before it divides them by the old ones."""


def resize_position_embedding(
    table: Tensor, old_grid: Grid, new_grid: Grid, prefix: int = 0, how: PositionResize = "bicubic-antialias"
) -> Tensor:
    """Interpolate a learned position table to another grid, in two dimensions (section 3.2 of the paper).

    Args:
        table: (prefix + old rows · old columns, D), patches in row-major order.
        old_grid: rows and columns of patches of the table.
        new_grid: rows and columns of patches of the result.
        prefix: rows at the front that belong to no patch (class token, registers); they stay unchanged.
        how: the interpolation (see `compute_resize_weights`): weights keep the one that their authors use.

    Returns:
        (prefix + new rows · new columns, D); the table itself if the grids are equal.
    """
    if is_same_grid(old_grid, new_grid):
        return table
    patches = table[prefix:].to(torch.promote_types(table.dtype, torch.float32))  # half precision is too coarse
    sides = list(zip(old_grid, new_grid, strict=True))
    # 0 for equal grids, which a trace sees too: their table stays as it is. A comparison would be fixed in the trace.
    offset = OFFSET * torch.sym_min(sum(torch.sym_max(new - old, old - new) for old, new in sides), 1)
    rows, columns = (compute_resize_weights(old, new, patches, how, offset) for old, new in sides)
    patches = torch.einsum("ir,jc,rcd->ijd", rows, columns, patches.unflatten(0, old_grid)).flatten(0, 1)
    return torch.cat([table[:prefix], patches.to(table.dtype)])


def compute_resize_weights(old: int, new: int, like: Tensor, how: PositionResize, offset: float = OFFSET) -> Tensor:
    """Return the (new, old) matrix that resizes a row of `old` points to `new` points.

    | how | point i of the result lies at | the same as |
    |---|---|---|
    | bicubic-antialias | (i + ½) · old / new − ½ | timm; torch's bicubic with antialias |
    | bicubic | (i + ½) · old / new − ½ | transformers; torch's bicubic |
    | bicubic-offset | (i + ½) · old / (new + 0.1) − ½ | DINOv2's own code; torch's bicubic with a scale_factor |
    | bicubic-corners | i · (old − 1) / (new − 1) | torchvision; torch's bicubic with align_corners |
    | bilinear-corners | i · (old − 1) / (new − 1) | Google's code; scipy's zoom of order 1 |
    | bilinear | (i + ½) · old / new − ½ | transformers' BEiT; torch's bilinear |
    | bilinear-antialias | (i + ½) · old / new − ½ | SigLIP 2 for any shape; torch's bilinear with antialias |

    `torch.nn.functional.interpolate` cannot train in a graph compiled for changing sizes, is missing on some devices
    and exports badly; a matrix product works everywhere.
    """
    linear = how.startswith("bilinear")
    if how.endswith("-antialias"):
        return compute_antialias_weights(old, new, like, compute_linear_kernel if linear else compute_cubic_kernel)
    steps = torch.arange(new, dtype=like.dtype, device=like.device)
    if how.endswith("-corners"):
        places = steps * ((old - 1) / torch.sym_max(new - 1, 1))
    else:
        places = (steps + 0.5) * (old / (new + offset if how == "bicubic-offset" else new)) - 0.5
    # Two points beyond each end: the kernel reaches so far, and they have the values of the first and the last point.
    points = torch.arange(-2, old + 2, dtype=like.dtype, device=like.device)
    distances = (points - places[:, None]).abs()
    weights = compute_linear_kernel(distances) if linear else compute_cubic_kernel(distances, a=-0.75)
    return weights @ (points.clamp(0, old - 1)[:, None] == points[2:-2]).to(like.dtype)


def compute_antialias_weights(old: int, new: int, like: Tensor, kernel: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the (new, old) matrix of a resize with antialias (see `compute_resize_weights`)."""
    scale = old / new
    centres = (torch.arange(new, dtype=like.dtype, device=like.device) + 0.5) * scale
    points = torch.arange(old, dtype=like.dtype, device=like.device) + 0.5
    # Shrinking widens the kernel. `max` would fix the result of the comparison in a trace; `sym_max` does not.
    weights = kernel((points - centres[:, None]).abs() / torch.sym_max(scale, 1.0))
    return weights / weights.sum(dim=1, keepdim=True)


def compute_linear_kernel(x: Tensor) -> Tensor:
    """Return 1 − x, and 0 from x = 1 on, at the distances x ≥ 0."""
    return (1 - x).clamp(min=0.0)


def compute_cubic_kernel(x: Tensor, a: float = -0.5) -> Tensor:
    """Return Keys' cubic kernel at the distances x ≥ 0; torch has a = −1/2 with antialias and −3/4 without."""
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return near.where(x < 1, far.where(x < 2, 0.0))


def is_same_grid(own: Grid, grid: Grid) -> bool:
    """Return whether two grids are equal; False for symbolic sizes, so that a trace does not fix the answer."""
    return not any(isinstance(side, torch.SymInt) for side in grid) and own == grid


class LearnedPositions1d(nn.Module):
    """E_pos of equation 1: one learned row for each token, patches in row-major order."""

    def __init__(
        self, grid: Grid, width: int, prefix: int, position_resize: PositionResize = "bicubic-antialias"
    ) -> None:
        """Make the table; `prefix` tokens before the patches have a row in it."""
        super().__init__()
        self.position_resize = position_resize
        self.grid = grid
        self.prefix = prefix
        self.table = nn.Parameter(torch.empty(prefix + grid[0] * grid[1], width))

    def forward(self, grid: Grid) -> Tensor:
        """Return the table for a grid, (prefix + N, D), interpolated if the grid is not the module's own."""
        return resize_position_embedding(self.table, self.grid, grid, self.prefix, self.position_resize)

    @torch.no_grad()
    def resize(self, grid: Grid) -> None:
        """Change the module's own grid for good."""
        self.table = nn.Parameter(self(grid).clone(), self.table.requires_grad)
        self.grid = grid


class LearnedPositions2d(nn.Module):
    """Two learned tables of width D/2, one for the column (x) and one for the row (y) of a patch, concatenated."""

    def __init__(
        self, grid: Grid, width: int, prefix: int, position_resize: PositionResize = "bicubic-antialias"
    ) -> None:
        super().__init__()
        self.position_resize = position_resize
        self.grid = grid
        self.prefix = prefix
        self.prefix_table = nn.Parameter(torch.empty(prefix, width)) if prefix else None
        self.row_table = nn.Parameter(torch.empty(grid[0], width // 2))
        self.column_table = nn.Parameter(torch.empty(grid[1], width // 2))

    def forward(self, grid: Grid) -> Tensor:
        """Return the table for a grid, (prefix + N, D)."""
        rows, columns = self._resize_axes(grid)
        x = columns[None, :].expand(*grid, -1)
        y = rows[:, None].expand(*grid, -1)
        patches = torch.cat([x, y], dim=-1).flatten(0, 1)
        return patches if self.prefix_table is None else torch.cat([self.prefix_table, patches])

    def _resize_axes(self, grid: Grid) -> tuple[Tensor, Tensor]:
        # Interpolation in two dimensions is separable, so resizing each axis resizes the grid.
        how = self.position_resize
        rows = resize_position_embedding(self.row_table, (self.grid[0], 1), (grid[0], 1), how=how)
        columns = resize_position_embedding(self.column_table, (1, self.grid[1]), (1, grid[1]), how=how)
        return rows, columns

    @torch.no_grad()
    def resize(self, grid: Grid) -> None:
        """Change the module's own grid for good."""
        rows, columns = self._resize_axes(grid)
        self.row_table = nn.Parameter(rows.clone(), self.row_table.requires_grad)
        self.column_table = nn.Parameter(columns.clone(), self.column_table.requires_grad)
        self.grid = grid


class SinCosPositions(nn.Module):
    """Fixed sines and cosines of the patch's row and column; nothing is learned, and any grid is exact."""

    table: Tensor
    prefix = 0
    """Tokens that are no patch have no position."""

    def __init__(self, grid: Grid, width: int) -> None:
        super().__init__()
        self.grid = grid
        self.width = width
        self.register_buffer("table", torch.empty(grid[0] * grid[1], width))

    def fill_table(self) -> None:
        """Compute the table of the module's own grid."""
        if not self.table.is_meta:
            self.table.copy_(compute_sin_cos_table(self.grid, self.width))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Called when the module is moved or converted: the table is computed anew, so that it is exact in every dtype.
        super()._apply(fn, recurse)
        self.fill_table()
        return self

    def forward(self, grid: Grid) -> Tensor:
        """Return the table for a grid, (N, D)."""
        if is_same_grid(self.grid, grid):
            return self.table
        return compute_sin_cos_table(grid, self.width).to(self.table)

    def resize(self, grid: Grid) -> None:
        """Change the module's own grid for good."""
        self.table = self(grid)
        self.grid = grid


def compute_sin_cos_table(grid: Grid, width: int, temperature: float = 10_000.0) -> Tensor:
    """Return (N, D) in float64: sin x, cos x, sin y, cos y at D/4 frequencies from 1 to 1/temperature (MoCo v3)."""
    # Always on the CPU, because some devices have no float64.
    frequencies = temperature ** -torch.linspace(0, 1, width // 4, dtype=torch.float64, device="cpu")
    axes = [torch.arange(side, dtype=torch.float64, device="cpu") for side in grid]
    y, x = torch.meshgrid(*axes, indexing="ij")
    x, y = x.flatten()[:, None] * frequencies, y.flatten()[:, None] * frequencies
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)


class RelativePositions(nn.Module):
    """Learned embeddings of 1-D offsets between patches, used as extra keys: a bias on the attention logits.

    bias[q, k] = query_q · r[p_q − p_k] / √d over patches in raster order, one table for each layer, shared by its
    heads. The paper does not say what tokens that are no patch get; here they get no bias.
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
        """Raise an InputError for another grid: with other columns, a raster offset means another place."""
        if grid != self.grid:
            raise InputError(explain_relative_resize(self.grid, grid))


def explain_relative_resize(old: Grid, new: Grid) -> str:
    """Return the error message for a grid that relative positions were not learned for."""
    return (
        f"relative position embeddings are tables of raster offsets, and those for {old[0]}×{old[1]} patches cannot be "
        f"resized to {new[0]}×{new[1]}: keep the image size, or train with another position embedding"
    )


InputPositions = LearnedPositions1d | LearnedPositions2d | SinCosPositions


def build_position_embedding(a: VitArchitecture, grid: Grid) -> nn.ModuleList:
    """Build the tables that are added to the tokens: none, one, or one for each layer (`position_at`)."""

    def build_table() -> InputPositions | None:
        if a.position == "learned-1d":
            return LearnedPositions1d(grid, a.width, a.position_rows, a.position_resize)
        if a.position == "learned-2d":
            return LearnedPositions2d(grid, a.width, a.position_rows, a.position_resize)
        return SinCosPositions(grid, a.width) if a.position == "sin-cos" else None

    tables = [build_table() for _ in range(a.depth if a.position_at == "every-layer" else 1)]
    return nn.ModuleList(table for table in tables if table is not None)
