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

from vitrail.fast.gpu.kernels.gelu import gelu
from vitrail.fast.gpu.kernels.norm import FP8
from vitrail.fast.gpu.kernels.overlap import LINE, begin, fetch_rows, fetch_share, on_chip, overlapping


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
    splits: int = 1
    """Parts of K, whose results are left apart, for who reads them to add up."""


def named(*tilings: Tiling) -> dict[str, Tiling]:
    """By what they are called where ways are compared."""
    return {str(tuple(tiling)): tiling for tiling in tilings}


GROUP = 8
"""Rows of tiles that are worked on together, so that they share what is in the cache."""
FEW = 4096
"""Rows of x up to which a product does not fill the chip with large tiles, and waiting for weights takes more time than
working with them."""


@triton.jit
def _finished(
    total,
    out,
    before,
    bias,
    row_scales,
    column_scales,
    out_scale,
    split,
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
    splits: tl.constexpr,
):
    row, column = m + tl.arange(0, rows), n + tl.arange(0, columns)
    if scaled == 1:
        total *= tl.load(row_scales + row, mask=row < M, other=0.0)[:, None]
    elif scaled == 2:
        total *= tl.load(row_scales)
    if scaled > 0:
        total *= tl.load(column_scales + column, mask=column < N, other=0.0)[None, :]
    if has_bias:
        asked = column < N if splits == 1 else (column < N) & (split == 0)
        total += tl.load(bias + column, mask=asked, other=0.0).to(tl.float32)[None, :]
    if keeps:
        rounded = total.to(before.dtype)
        before.store([m, n], rounded)
    total = gelu(total, form, chip)
    if to_fp8:
        total = tl.clamp(total * (1 / tl.load(out_scale)), -448.0, 448.0)
    if splits == 1:
        out.store([m, n], total.to(out.dtype))
    else:
        out.store([split, m, n], total.to(out.dtype).reshape(1, rows, columns))


@triton.jit
def _place(number, high, in_group, group: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """Where the tile with this number begins."""
    first = number // in_group * group
    here = min(high - first, group)
    return (first + number % in_group % here) * rows, number % in_group // here * columns


@triton.jit
def product_kernel(
    x,
    w,
    weights,
    following,
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
    line: tl.constexpr,
    lines: tl.constexpr,
    share: tl.constexpr,
    splits: tl.constexpr,
):
    """`scaled`: 0 not; 1 by row and by column; 2 by one for all rows, and by column.

    `lines`: that a row of weights has in the cache, which is to fetch those of the first tile; 0: it is not. `share`:
    lines of the `following` weights, N·K values too, that each program has it fetch.
    """
    high, wide = tl.cdiv(M, rows), tl.cdiv(N, columns)
    in_group = group * wide
    if lines > 0:
        _, n = _place(tl.program_id(0) % (high * wide), high, in_group, group, rows, columns)
        fetch_rows(weights, n, columns, N, K, line, lines)
    begin(chip)
    if share > 0:
        fetch_share(following, share, N * K, line)
    for number in tl.range(tl.program_id(0), high * wide * splits, programs, flatten=chip):
        m, n = _place(number % (high * wide), high, in_group, group, rows, columns)
        split = number // (high * wide)
        total = tl.zeros((rows, columns), dtype=tl.float32)
        for k in range(0, K // splits, depth):  # beyond K the copy engine gives zeros
            at = split * (K // splits) + k
            total = tl.dot(x.load([m, at]), w.load([n, at]).T, total)
        if parts == 2:
            left, right = tl.split(tl.permute(tl.reshape(total, (rows, 2, columns // 2)), (0, 2, 1)))
            _finished(
                left, out, before, bias, row_scales, column_scales, out_scale, split, m, n, M, N,
                rows, columns // 2, form, chip, scaled, has_bias, keeps, to_fp8, splits,
            )  # fmt: skip
            _finished(
                right, out, before, bias, row_scales, column_scales, out_scale, split, m, n + columns // 2, M, N,
                rows, columns // 2, form, chip, scaled, has_bias, keeps, to_fp8, splits,
            )  # fmt: skip
        else:
            _finished(
                total, out, before, bias, row_scales, column_scales, out_scale, split, m, n, M, N,
                rows, columns, form, chip, scaled, has_bias, keeps, to_fp8, splits,
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
    following: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """(M, K), (N, K) → (M, N); or (splits, M, N), where the sum over K is split, of parts to be added up.

    Args:
        form: of the GELU behind it; 0 is none.
        row_scales: of x in FP8: one for each row, or one for all. `column_scales` of w, one for each of its rows.
        out_scale: given, the result is FP8, in units of this.
        before: (M, N), where the result before the GELU is put too.
        following: the weights of the product after this one, as many as here, for the cache to fetch in the meantime.
    """
    (m, k), n = x.shape, w.shape[0]
    splits = tiling.splits
    assert following is None or following.numel() == w.numel()
    assert splits == 1 or (form == 0 and out_scale is None and before is None and k % (splits * tiling.depth) == 0)
    shape = (m, n) if splits == 1 else (splits, m, n)
    out = torch.empty(shape, dtype=dtype if out_scale is None else FP8, device=x.device)
    tiles = triton.cdiv(m, tiling.rows) * triton.cdiv(n, tiling.columns) * splits
    count = min(tiles, multiprocessors(x.device) * tiling.programs)
    operands = [tiling.rows, tiling.depth], [tiling.columns, tiling.depth]
    result = [tiling.rows, tiling.columns // tiling.parts]
    line, fetched = LINE // w.element_size(), m <= FEW and on_chip()
    share = triton.cdiv(n * k, line * count) if fetched and following is not None else 0
    product_kernel[(count,)](
        TensorDescriptor.from_tensor(x, operands[0]),
        TensorDescriptor.from_tensor(w, operands[1]),
        w,
        following,
        TensorDescriptor.from_tensor(out, result if splits == 1 else [1, *result]),
        None if before is None else TensorDescriptor.from_tensor(before, result),
        bias, row_scales, column_scales, out_scale,
        m, n, k, count, tiling.rows, tiling.columns, tiling.depth, GROUP, tiling.parts,
        form, on_chip(), 0 if row_scales is None else 1 if row_scales.numel() > 1 else 2,
        bias is not None, before is not None, out_scale is not None,
        line, triton.next_power_of_2(triton.cdiv(k, line)) if fetched else 0,
        triton.next_power_of_2(share) if share else 0, splits,
        num_warps=tiling.warps, num_stages=tiling.stages, **overlapping(),
    )  # fmt: skip
    return out


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; one, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
