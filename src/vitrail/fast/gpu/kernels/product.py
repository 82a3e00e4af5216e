"""x · Wᵀ, with scales, bias, GELU or SwiGLU, rotation and rounding to FP8 applied before the result leaves the chip.

One program on each multiprocessor goes from tile to tile; the copy engine already loads the operands of the next tile
while the results of the last one are finished.

Shapes: M tokens, K → N features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vitrail.fast.gpu.kernels.gelu import SWIGLU, gelu, silu
from vitrail.fast.gpu.kernels.norm import FP8
from vitrail.fast.gpu.kernels.overlap import LINE, begin, fetch_rows, fetch_share, is_compiled, overlap_options


class Tiling(NamedTuple):
    """How a product is divided into tiles and programs."""

    rows: int
    """Of a tile of the result, as are `columns`."""
    columns: int
    depth: int
    """Features of K that are multiplied at a time."""
    warps: int
    stages: int
    """Loads in flight."""
    programs: int = 1
    """Programs on each multiprocessor."""
    parts: int = 1
    """In how many parts a tile's result is written: 2 takes less memory on the chip."""
    splits: int = 1
    """In how many parts K is split; the results stay separate, and the reader adds them up."""


def name_tilings(*tilings: Tiling) -> dict[str, Tiling]:
    """Return tilings by the names under which implementations are compared."""
    return {str(tuple(tiling)): tiling for tiling in tilings}


GROUP = 8
"""Rows of tiles that are computed together, so that they share the cache."""
FEW = 4096
"""Up to so many rows of x, large tiles do not fill the chip, and waiting for weights takes longer than multiplying."""


class PackedRotation(NamedTuple):
    """How a product turns the pairs (2i, 2i + 1) of its first columns, which are heads."""

    table: Tensor
    """(1, T, d/2), or (H, T, d/2) if each head turns on its own: int32, a cosine and a sine in fp16 each."""
    columns: int
    """So many columns are turned."""


def pack_rotation(cos: Tensor, sin: Tensor, columns: int) -> PackedRotation:
    """Make it of cosines and sines, (1 or H, T, d/2)."""
    table = torch.stack([cos.half(), sin.half()], dim=-1).view(torch.int32).squeeze(-1)
    return PackedRotation(table.contiguous(), columns)


@triton.jit
def _gather(places, chip: tl.constexpr):
    """Load an int32 from each place, in the layout of the accumulators: `tl.load` would first rearrange those."""
    if chip:
        return tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [places], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.load(places)


@triton.jit
def _unpack_half(bits):
    """Return the fp16 numbers in the low halves of int32 numbers, as float32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _rotate_tile(
    total, table, m, n, tokens,
    rows: tl.constexpr, columns: tl.constexpr, turned: tl.constexpr, pairs: tl.constexpr, tables: tl.constexpr,
    chip: tl.constexpr,
):  # fmt: skip
    """Turn the pairs of neighbouring columns of one tile; columns from `turned` on stay as they are."""
    # total (rows, columns), from row m, column n; table (tables, T, pairs), pairs = d/2; tokens = T.
    a, b = tl.split(tl.reshape(total, (rows, columns // 2, 2)))
    token, pair = (m + tl.arange(0, rows)[:, None]) % tokens, n // 2 + tl.arange(0, columns // 2)[None, :]
    place = (pair // pairs % tables * tokens + token) * pairs + pair % pairs  # there is one for every row and column
    packed = tl.where(2 * pair < turned, _gather(table + place, chip), 0x3C00)  # cosine 1, sine 0
    c, s = _unpack_half(packed), _unpack_half(packed >> 16)
    return tl.reshape(tl.join(a * c - b * s, b * c + a * s), (rows, columns))


@triton.jit
def _finish_tile(
    total, out, before, bias, row_scales, column_scales, out_scale, table, tokens, split, m, n, M, N,
    rows: tl.constexpr, columns: tl.constexpr, form: tl.constexpr, chip: tl.constexpr, scaled: tl.constexpr,
    has_bias: tl.constexpr, keeps: tl.constexpr, to_fp8: tl.constexpr, splits: tl.constexpr,
    gated: tl.constexpr, turned: tl.constexpr, pairs: tl.constexpr, tables: tl.constexpr,
):  # fmt: skip
    """Apply scales, bias, GELU or SwiGLU, rotation and rounding to one tile, and store it."""
    # total (rows, columns) float32: the tile of the result that begins at row m, column n; the rest as below.
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
    if gated:
        gate, value = tl.split(tl.reshape(total, (rows, columns // 2, 2)))
        total = silu(gate, chip) * value
    else:
        total = gelu(total, form, chip)
    if turned > 0:
        total = _rotate_tile(total, table, m, n, tokens, rows, columns, turned, pairs, tables, chip)
    if to_fp8:
        total = tl.clamp(total * (1 / tl.load(out_scale)), -448.0, 448.0)
    if gated:
        out.store([m, n // 2], total.to(out.dtype))
    elif splits == 1:
        out.store([m, n], total.to(out.dtype))
    else:
        out.store([split, m, n], total.to(out.dtype).reshape(1, rows, columns))


@triton.jit
def _locate_tile(number, high, in_group, group: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """Return the first row and column of the tile with this number."""
    first = number // in_group * group
    here = min(high - first, group)
    return (first + number % in_group % here) * rows, number % in_group // here * columns


@triton.jit
def product_kernel(
    x, w, weights, next_weight, out, before, bias, row_scales, column_scales, out_scale, table, tokens, M, N,
    K: tl.constexpr, programs,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, group: tl.constexpr, parts: tl.constexpr,
    form: tl.constexpr, chip: tl.constexpr, scaled: tl.constexpr, has_bias: tl.constexpr, keeps: tl.constexpr,
    to_fp8: tl.constexpr, line: tl.constexpr, lines: tl.constexpr, share: tl.constexpr, splits: tl.constexpr,
    gated: tl.constexpr, turned: tl.constexpr, pairs: tl.constexpr, tables: tl.constexpr,
):  # fmt: skip
    """Compute out = GELU(x · Wᵀ · scales + bias), tile by tile; or SwiGLU, or a rotation, instead of the GELU."""
    # x (M, K), w (N, K), out (M, N) or (splits, M, N) and before (M, N) are descriptors for the copy engine; `weights`
    # is a pointer to w; bias, column_scales (N,); row_scales (M, 1) or (); out_scale (); next_weight: N·K values.
    # `scaled`: 0 without scales; 1 by row and by column; 2 by one scale for all rows, and by column.
    # `gated`: SwiGLU of neighbouring columns, out is (M, N/2). `turned`: so many columns are rotated; table (tables, T,
    # pairs), pairs = d/2, tokens = T.
    # `line` values fit into a cache line; a row of w has at most `lines` (0: do not prefetch the first tile's weights);
    # each program fetches `share` lines of next_weight (0: none).
    high, wide = tl.cdiv(M, rows), tl.cdiv(N, columns)
    in_group = group * wide
    if lines > 0:
        _, n = _locate_tile(tl.program_id(0) % (high * wide), high, in_group, group, rows, columns)
        fetch_rows(weights, n, columns, N, K, line, lines)
    begin(chip)
    if share > 0:
        fetch_share(next_weight, share, N * K, line)
    for number in tl.range(tl.program_id(0), high * wide * splits, programs, flatten=chip):
        m, n = _locate_tile(number % (high * wide), high, in_group, group, rows, columns)
        split = number // (high * wide)
        total = tl.zeros((rows, columns), dtype=tl.float32)
        for k in range(0, K // splits, depth):  # beyond K the copy engine gives zeros
            at = split * (K // splits) + k
            total = tl.dot(x.load([m, at]), w.load([n, at]).T, total)
        if parts == 2:
            left, right = tl.split(tl.permute(tl.reshape(total, (rows, 2, columns // 2)), (0, 2, 1)))
            _finish_tile(
                left, out, before, bias, row_scales, column_scales, out_scale, table, tokens, split, m, n, M, N,
                rows, columns // 2, form, chip, scaled, has_bias, keeps, to_fp8, splits,
                gated, turned, pairs, tables,
            )  # fmt: skip
            _finish_tile(
                right, out, before, bias, row_scales, column_scales, out_scale, table, tokens, split, m,
                n + columns // 2, M, N, rows, columns // 2, form, chip, scaled, has_bias, keeps, to_fp8, splits,
                gated, turned, pairs, tables,
            )  # fmt: skip
        else:
            _finish_tile(
                total, out, before, bias, row_scales, column_scales, out_scale, table, tokens, split, m, n, M, N,
                rows, columns, form, chip, scaled, has_bias, keeps, to_fp8, splits,
                gated, turned, pairs, tables,
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
    next_weight: Tensor | None = None,
    rotation: PackedRotation | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return GELU(x · Wᵀ + bias) (M, N); or parts (splits, M, N) to be added up, where K is split.

    SwiGLU takes neighbouring columns as a gate and a value, and returns (M, N/2).

    Args:
        x: (M, K), in half precision or FP8.
        w: (N, K), of the same type.
        bias: (N,) or None.
        tiling: Tile sizes.
        form: Number of the GELU, or `SWIGLU`; 0 for none.
        row_scales: Of x in FP8: (M, 1), or one number for all rows.
        column_scales: (N,), of the rows of w in FP8.
        out_scale: If given, the result is FP8, in units of this number.
        before: (M, N), a tensor that receives the result before the GELU.
        next_weight: The weights of the next product, of the same size as w, which the cache fetches meanwhile.
        rotation: Turns the first columns, as queries and keys need it; rows are tokens, image after image.
        dtype: Type of the result, if it is not FP8.
    """
    (m, k), n = x.shape, w.shape[0]
    splits, gated = tiling.splits, form == SWIGLU
    assert not gated or (splits == 1 and before is None and rotation is None)
    assert rotation is None or (splits == 1 and form == 0)
    assert next_weight is None or next_weight.numel() == w.numel()
    assert splits == 1 or (form == 0 and out_scale is None and before is None and k % (splits * tiling.depth) == 0)
    shape = (m, n // 2 if gated else n) if splits == 1 else (splits, m, n)
    out = torch.empty(shape, dtype=dtype if out_scale is None else FP8, device=x.device)
    tiles = triton.cdiv(m, tiling.rows) * triton.cdiv(n, tiling.columns) * splits
    count = min(tiles, count_multiprocessors(x.device) * tiling.programs)
    operands = [tiling.rows, tiling.depth], [tiling.columns, tiling.depth]
    result = [tiling.rows, tiling.columns // tiling.parts // (2 if gated else 1)]
    tables, tokens, pairs = (0, 1, 0) if rotation is None else rotation.table.shape
    line, fetched = LINE // w.element_size(), m <= FEW and is_compiled()
    share = triton.cdiv(n * k, line * count) if fetched and next_weight is not None else 0
    product_kernel[(count,)](
        TensorDescriptor.from_tensor(x, operands[0]),
        TensorDescriptor.from_tensor(w, operands[1]),
        w,
        next_weight,
        TensorDescriptor.from_tensor(out, result if splits == 1 else [1, *result]),
        None if before is None else TensorDescriptor.from_tensor(before, result),
        bias, row_scales, column_scales, out_scale, None if rotation is None else rotation.table, tokens,
        m, n, k, count, tiling.rows, tiling.columns, tiling.depth, GROUP, tiling.parts,
        0 if gated else form, is_compiled(), 0 if row_scales is None else 1 if row_scales.numel() > 1 else 2,
        bias is not None, before is not None, out_scale is not None,
        line, triton.next_power_of_2(triton.cdiv(k, line)) if fetched else 0,
        triton.next_power_of_2(share) if share else 0, splits,
        gated, 0 if rotation is None else rotation.columns, pairs, tables,
        num_warps=tiling.warps, num_stages=tiling.stages, **overlap_options(),
    )  # fmt: skip
    return out


def count_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 on a CPU, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
