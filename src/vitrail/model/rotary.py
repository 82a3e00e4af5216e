"""Rotary positions: attention turns queries and keys by angles that grow with the row and the column of their patch.

The product of a query and a key then depends on the offset between their patches, not on where they are. A head of
width d has d/2 pairs of numbers, and each pair turns in its own plane at its own frequency.

Shapes: N patches on a grid of (rows, columns) in row-major order, T tokens = prefix + N, B images, L blocks, H heads,
d width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.architecture import Rotary, VitArchitecture
from vitrail.model.positions import Grid


@dataclass(frozen=True)  # no tuple: sharded training would round the tensors of a tuple to bf16
class Rotation:
    """What turns the queries and keys of one block: cosines and sines, (T, d) or (H, T, d), float32 or wider.

    Tokens that are no patch have the angle 0: they are not turned.
    """

    cos: Tensor
    sin: Tensor
    layout: str

    def __call__(self, x: Tensor) -> Tensor:
        """Turn queries or keys, (B, H, T, d) → the same."""
        return (x * self.cos + turn_by_quarter(x, self.layout) * self.sin).to(x.dtype)


def turn_by_quarter(x: Tensor, layout: str) -> Tensor:
    """Turn each pair (a, b) of the last dimension to (−b, a).

    Args:
        x: (…, d).
        layout: `halves`: i and i + d/2 are a pair. `pairs`: 2i and 2i + 1 are.
    """
    if layout == "halves":
        a, b = x.chunk(2, dim=-1)
        return torch.cat([-b, a], dim=-1)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([-b, a], dim=-1).flatten(-2)


class RotaryPositions(nn.Module):
    """Fixed frequencies: half of the pairs turn with the row, the other half with the column.

    Everything is computed anew for each call: nothing is stored, and any grid, device and dtype is exact.
    """

    def __init__(self, rotary: Rotary, head_width: int, prefix: int, depth: int) -> None:
        super().__init__()
        self.rotary, self.head_width, self.prefix, self.depth = rotary, head_width, prefix, depth

    def forward(self, grid: Grid, like: Tensor) -> list[Rotation]:
        """Return the rotation of each block.

        Args:
            grid: rows and columns of patches.
            like: a tensor on the device to compute on. Float64 tensors get float64, all others float32.
        """
        first, second = self.locate_patches(grid, like)
        frequencies = compute_frequencies(self.rotary.base, self.head_width // 4, first)
        return [self.make_rotation(torch.cat([first * frequencies, second * frequencies], dim=-1))] * self.depth

    def locate_patches(self, grid: Grid, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coordinates of the patches on the two axes, each (N, 1), that axis first which `first` names."""
        axes = self.compute_axes(grid, like)
        if self.training:
            axes = self.change_randomly(axes)
        if self.rotary.coordinates == "unit":
            axes = [2 * math.pi * axis for axis in axes]
        y = axes[0][:, None].expand(grid).reshape(-1, 1)
        x = axes[1].expand(grid).reshape(-1, 1)
        return (y, x) if self.rotary.first == "row" else (x, y)

    def compute_axes(self, grid: Grid, like: Tensor) -> list[Tensor]:
        """Return the coordinates of the rows and those of the columns."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        axes = [torch.arange(side, dtype=dtype, device=like.device) for side in grid]
        if self.rotary.coordinates == "unit":
            return [(axis + 0.5) / side * 2 - 1 for axis, side in zip(axes, grid, strict=True)]
        axes = [axis + self.rotary.offset for axis in axes]
        if self.rotary.reference_grid is None:
            return axes
        sides = zip(axes, grid, self.rotary.reference_grid, strict=True)
        return [axis / side * reference for axis, side, reference in sides]

    def change_randomly(self, axes: list[Tensor]) -> list[Tensor]:
        """Move both axes, stretch each on its own, then stretch both together: one draw for all images (DINOv3)."""
        if (most := self.rotary.shift) is not None:
            shifts = axes[0].new_empty(2).uniform_(-most, most)
            axes = [axis + shift for axis, shift in zip(axes, shifts, strict=True)]
        if (factor := self.rotary.jitter) is not None:
            jitters = axes[0].new_empty(2).uniform_(-math.log(factor), math.log(factor)).exp()
            axes = [axis * jitter for axis, jitter in zip(axes, jitters, strict=True)]
        if (factor := self.rotary.rescale) is not None:
            scale = axes[0].new_empty(1).uniform_(-math.log(factor), math.log(factor)).exp()
            axes = [axis * scale for axis in axes]
        return axes

    def make_rotation(self, angles: Tensor) -> Rotation:
        """(…, N, d/2) angles → the rotation of all tokens."""
        angles = F.pad(angles, (0, 0, self.prefix, 0))
        halves = self.rotary.layout == "halves"
        angles = torch.cat([angles, angles], dim=-1) if halves else angles.repeat_interleave(2, dim=-1)
        return Rotation(angles.cos(), angles.sin(), self.rotary.layout)


class LearnedRotaryPositions(RotaryPositions):
    """Learned frequencies for each block and head: every pair turns with the row and the column ("RoPE-Mixed").

    They start with the sizes of the fixed ones, in two directions at a right angle that are random for each head.
    """

    def __init__(self, rotary: Rotary, head_width: int, prefix: int, depth: int, num_heads: int) -> None:
        super().__init__(rotary, head_width, prefix, depth)
        self.frequencies = nn.Parameter(torch.empty(2, depth, num_heads, head_width // 2))  # 2: the two axes

    def forward(self, grid: Grid, like: Tensor) -> list[Rotation]:
        """Return the rotation of each block, (H, T, d)."""
        first, second = self.locate_patches(grid, like)
        # Elementwise: autocast would round the angles of a product of matrices to bf16.
        along_first, along_second = self.frequencies.to(first.dtype).unsqueeze(3)  # L, H, 1, d/2
        return [self.make_rotation(angles) for angles in (first * along_first + second * along_second)]

    @torch.no_grad()
    def draw_frequencies(self, generator: torch.Generator | None = None) -> None:
        """Fill the frequencies with initial values: fixed sizes in random directions."""
        sizes = compute_frequencies(self.rotary.base, self.head_width // 4, self.frequencies)
        turns = self.frequencies.new_empty(*self.frequencies.shape[1:3], 1).uniform_(
            0, 2 * math.pi, generator=generator
        )
        turns = torch.cat([turns, turns + math.pi / 2], dim=2)[..., None]  # L, H, 2, 1
        self.frequencies.copy_(torch.stack([(sizes * turns.cos()).flatten(2), (sizes * turns.sin()).flatten(2)]))


def compute_frequencies(base: float, count: int, like: Tensor) -> Tensor:
    """Return `count` frequencies base^(−i/count), from 1 down to almost 1/base."""
    frequencies: Tensor = base ** -(torch.arange(count, dtype=like.dtype, device=like.device) / count)
    return frequencies


def build_rotary(a: VitArchitecture) -> RotaryPositions | None:
    """Build the rotary positions of a model, if it has them."""
    if a.rotary is None:
        return None
    if a.rotary.learned:
        return LearnedRotaryPositions(a.rotary, a.head_width, a.prefix, a.depth, a.num_heads)
    return RotaryPositions(a.rotary, a.head_width, a.prefix, a.depth)
