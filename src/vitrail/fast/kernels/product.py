"""x · Wᵀ, and what follows it before the result leaves the chip: scales, bias, GELU, FP8.

One program on each multiprocessor goes from tile to tile; the next tile's operands are on their way, by the chip's copy
engine, while the last one's results are finished.

Shapes: M tokens, K → N features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vitrail.fast.kernels.gelu import gelu, on_chip
from vitrail.fast.kernels.norm import FP8


class Tiling(NamedTuple):
    """How a product is cut up."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    programs: int = 1
    """On a multiprocessor."""
    parts: int = 1
    """In which the result of a tile is written: 2 takes less memory on the chip."""


def named(*tilings: Tiling) -> dict[str, Tiling]:
    """By what they are called where ways are compared."""
    return {str(tuple(tiling)): tiling for tiling in tilings}


GROUP = 8
"""Rows of tiles that are worked on together, so that they share what is in the cache."""


@triton.jit
def _finished(
    total,
    out,
    before,
    bias,
    row_scales,
    column_scales,
    out_scale,
    m,
    n,
    M,
    N,
    rows: tl.constexpr,
    columns: tl.constexpr,
    form: tl.constexpr,
    chip: tl.constexpr,
    scaled: tl.constexpr,
    has_bias: tl.constexpr,
    keeps: tl.constexpr,
    to_fp8: tl.constexpr,
):
    row, column = m + tl.arange(0, rows), n + tl.arange(0, columns)
    if scaled == 1:
        total *= tl.load(row_scales + row, mask=row < M, other=0.0)[:, None]
    elif scaled == 2:
        total *= tl.load(row_scales)
    if scaled > 0:
        total *= tl.load(column_scales + column, mask=column < N, other=0.0)[None, :]
    if has_bias:
        total += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if keeps:
        rounded = total.to(before.dtype)
        before.store([m, n], rounded)
    total = gelu(total, form, chip)
    if to_fp8:
        total = tl.clamp(total * (1 / tl.load(out_scale)), -448.0, 448.0)
    out.store([m, n], total.to(out.dtype))


@triton.jit
def product_kernel(
    x,
    w,
    out,
    before,
    bias,
    row_scales,
    column_scales,
    out_scale,
    M,
    N,
    K: tl.constexpr,
    programs,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    group: tl.constexpr,
    parts: tl.constexpr,
    form: tl.constexpr,
    chip: tl.constexpr,
    scaled: tl.constexpr,
    has_bias: tl.constexpr,
    keeps: tl.constexpr,
    to_fp8: tl.constexpr,
):
    """`scaled`: 0 not; 1 by row and by column; 2 by one for all rows, and by column."""
    high, wide = tl.cdiv(M, rows), tl.cdiv(N, columns)
    in_group = group * wide
    for number in tl.range(tl.program_id(0), high * wide, programs, flatten=chip):
        first = number // in_group * group
        here = min(high - first, group)
        m = (first + number % in_group % here) * rows
        n = number % in_group // here * columns
        total = tl.zeros((rows, columns), dtype=tl.float32)
        for k in range(0, K, depth):  # beyond K the copy engine gives zeros
            total = tl.dot(x.load([m, k]), w.load([n, k]).T, total)
        if parts == 2:
            left, right = tl.split(tl.permute(tl.reshape(total, (rows, 2, columns // 2)), (0, 2, 1)))
            _finished(
                left, out, before, bias, row_scales, column_scales, out_scale, m, n, M, N,
                rows, columns // 2, form, chip, scaled, has_bias, keeps, to_fp8,
            )  # fmt: skip
            _finished(
                right, out, before, bias, row_scales, column_scales, out_scale, m, n + columns // 2, M, N,
                rows, columns // 2, form, chip, scaled, has_bias, keeps, to_fp8,
            )  # fmt: skip
        else:
            _finished(
                total, out, before, bias, row_scales, column_scales, out_scale, m, n, M, N,
                rows, columns, form, chip, scaled, has_bias, keeps, to_fp8,
            )  # fmt: skip


def product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    tiling: Tiling,
    *,
    form: int = 0,
    row_scales: Tensor | None = None,
    column_scales: Tensor | None = None,
    out_scale: Tensor | None = None,
    before: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """(M, K), (N, K) → (M, N).

    Args:
        form: of the GELU behind it; 0 is none.
        row_scales: of x in FP8: one for each row, or one for all. `column_scales` of w, one for each of its rows.
        out_scale: given, the result is FP8, in units of this.
        before: (M, N), where the result before the GELU is put too.
    """
    (m, k), n = x.shape, w.shape[0]
    out = torch.empty(m, n, dtype=dtype if out_scale is None else FP8, device=x.device)
    tiles = triton.cdiv(m, tiling.rows) * triton.cdiv(n, tiling.columns)
    count = min(tiles, multiprocessors(x.device) * tiling.programs)
    operands = [tiling.rows, tiling.depth], [tiling.columns, tiling.depth]
    result = [tiling.rows, tiling.columns // tiling.parts]
    product_kernel[(count,)](
        TensorDescriptor.from_tensor(x, operands[0]),
        TensorDescriptor.from_tensor(w, operands[1]),
        TensorDescriptor.from_tensor(out, result),
        None if before is None else TensorDescriptor.from_tensor(before, result),
        bias, row_scales, column_scales, out_scale,
        m, n, k, count, tiling.rows, tiling.columns, tiling.depth, GROUP, tiling.parts,
        form, on_chip(), 0 if row_scales is None else 1 if row_scales.numel() > 1 else 2,
        bias is not None, before is not None, out_scale is not None,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; one, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
