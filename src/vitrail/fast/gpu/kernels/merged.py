"""Two products with the work between them inside: the first adds the residual sum, the second applies the norm.

The first stores z + x · Wᵀ, and for every row the mean and the squared deviations over each tile's columns, which it
can compute alone. The second multiplies z as it is, and applies the norm to the result:

    norm(z) · Wᵀ + b = rstd · (z · W'ᵀ - mean · s) + c,  W' = γ ∘ W,  s = its rows' sums,  c = W · β + b

where mean and rstd follow exactly from the tiles' statistics (Chan, Golub and LeVeque, 1983). For few rows, where
starting another kernel takes longer than the norm itself (merged_block.py). Each program computes one tile.

Shapes: M tokens, K → N features, P tiles of columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vitrail.fast.gpu.kernels.gelu import gelu
from vitrail.fast.gpu.kernels.overlap import LINE, begin, fetch_rows, fetch_share, is_compiled, overlap_options
from vitrail.fast.gpu.kernels.product import FEW, Tiling


class ResidualStream(NamedTuple):
    """z between blocks, with the statistics that its norm needs."""

    z: Tensor
    """(M, D)."""
    statistics: Tensor
    """(2, P, M), float32: for each row and tile of columns, the mean and the sum of squared deviations from it."""
    columns: int
    """Columns of a tile; the last tile may have fewer."""


@triton.jit
def multiply_and_add_kernel(
    x, w, weights, bias, factor, z, new_z, statistics, M, N,
    K: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, has_bias: tl.constexpr,
    scaled: tl.constexpr, line: tl.constexpr, lines: tl.constexpr, chip: tl.constexpr,
):  # fmt: skip
    """Compute new_z = z + factor · (x · Wᵀ + bias), and its statistics."""
    # x (M, K) and w (N, K) are descriptors for the copy engine, `weights` is a pointer to w; bias, factor (N,);
    # z, new_z (M, N); statistics (2, P, M). `line` values fit into a cache line, a row of w has at most `lines`.
    high = tl.cdiv(M, rows)
    m, tile = tl.program_id(0) % high * rows, tl.program_id(0) // high
    n = tile * columns
    if chip:
        fetch_rows(weights, n, columns, N, K, line, lines)
    begin(chip)
    row, column = m + tl.arange(0, rows), n + tl.arange(0, columns)
    inside = column < N
    mask = (row < M)[:, None] & inside[None, :]
    places = row[:, None] * N + column[None, :]
    old = tl.load(z + places, mask=mask, other=0.0)  # loaded early, so that it has arrived when the product is ready
    if has_bias:
        shift = tl.load(bias + column, mask=inside, other=0.0)
    if scaled:
        scale = tl.load(factor + column, mask=inside, other=0.0)
    total = tl.zeros((rows, columns), dtype=tl.float32)
    for k in range(0, K, depth):  # beyond K the copy engine gives zeros
        total = tl.dot(x.load([m, k]), w.load([n, k]).T, total)
    if has_bias:
        total += shift.to(tl.float32)[None, :]
    if scaled:
        total *= scale.to(tl.float32)[None, :]
    total += old.to(tl.float32)
    if new_z.dtype.element_ty == tl.float16:
        total = tl.clamp(total, -65504.0, 65504.0)
    kept = total.to(new_z.dtype.element_ty)
    tl.store(new_z + places, kept, mask=mask)
    total = kept.to(tl.float32)  # statistics of the rounded values; zero beyond N
    mean = tl.sum(total, 1) / tl.minimum(columns, N - n)
    away = tl.where(inside[None, :], total - mean[:, None], 0.0)
    own = statistics + tile * M + row
    tl.store(own, mean, mask=row < M)
    tl.store(own + tl.cdiv(N, columns) * M, tl.sum(away * away, 1), mask=row < M)


@triton.jit
def normalise_and_multiply_kernel(
    z, w, weights, next_weight, statistics, sums, constant, out, M, N,
    K: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, parts: tl.constexpr,
    padded: tl.constexpr, width: tl.constexpr, eps: tl.constexpr, centred: tl.constexpr, form: tl.constexpr,
    line: tl.constexpr, lines: tl.constexpr, share: tl.constexpr, chip: tl.constexpr,
):  # fmt: skip
    """Compute GELU(rstd · (z · Wᵀ - mean · sums) + constant)."""
    # z (M, K) and w (N, K) are descriptors for the copy engine, `weights` is a pointer to w; sums, constant (N,);
    # out (M, N); statistics (2, P, M) with P = parts, of `width` columns each; next_weight: N·K values.
    # `line` values fit into a cache line, a row of w has at most `lines`; programs fetch `share` lines of next_weight.
    high = tl.cdiv(M, rows)
    m, n = tl.program_id(0) % high * rows, tl.program_id(0) // high * columns
    if chip:
        fetch_rows(weights, n, columns, N, K, line, lines)
    begin(chip)
    row, column = m + tl.arange(0, rows), n + tl.arange(0, columns)
    part = tl.arange(0, padded)
    known = (part < parts)[:, None] & (row < M)[None, :]
    own = statistics + part[:, None] * M + row[None, :]
    means = tl.load(own, mask=known, other=0.0)  # loaded early, combined when the product is ready
    squares = tl.load(own + parts * M, mask=known, other=0.0)
    if centred:
        weight_sums = tl.load(sums + column, mask=column < N, other=0.0)
    shift = tl.load(constant + column, mask=column < N, other=0.0)
    if share > 0:
        fetch_share(next_weight, share, N * K, line)
    total = tl.zeros((rows, columns), dtype=tl.float32)
    for k in range(0, K, depth):  # beyond K the copy engine gives zeros
        total = tl.dot(z.load([m, k]), w.load([n, k]).T, total)
    count = tl.maximum(tl.minimum(width, K - part * width), 0).to(tl.float32)[:, None]
    mean = tl.sum(means * count, 0) / K
    away = means - mean[None, :]
    variance = tl.sum(squares + count * away * away, 0) / K
    if centred:
        total -= mean[:, None] * weight_sums[None, :]
    else:
        variance += mean * mean  # an RMSNorm does not subtract the mean
    total *= (1 / tl.sqrt(variance + eps))[:, None]
    total += shift[None, :]
    mask = (row < M)[:, None] & (column < N)[None, :]
    tl.store(out + row[:, None] * N + column[None, :], gelu(total, form, chip).to(out.dtype.element_ty), mask=mask)


def multiply_and_add(
    x: Tensor, w: Tensor, bias: Tensor | None, z: Tensor, tiling: Tiling, *, factor: Tensor | None = None
) -> ResidualStream:
    """x (M, K), w (N, K), bias (N,), z (M, N) → z + factor · (x · Wᵀ + bias), in z's type, with statistics.

    `factor`: (N,), a layer scale.
    """
    (m, k), n = x.shape, w.shape[0]
    high, wide = triton.cdiv(m, tiling.rows), triton.cdiv(n, tiling.columns)
    assert m <= FEW
    assert tiling.splits == 1
    assert z.shape == (m, n)
    assert z.is_contiguous()
    new_z = torch.empty_like(z)
    statistics = torch.empty(2, wide, m, dtype=torch.float32, device=z.device)
    line = LINE // w.element_size()
    multiply_and_add_kernel[(high * wide,)](
        TensorDescriptor.from_tensor(x, [tiling.rows, tiling.depth]),
        TensorDescriptor.from_tensor(w, [tiling.columns, tiling.depth]),
        w, bias, factor, z, new_z, statistics,
        m, n, k, tiling.rows, tiling.columns, tiling.depth, bias is not None, factor is not None,
        line, triton.next_power_of_2(triton.cdiv(k, line)), is_compiled(),
        num_warps=tiling.warps, num_stages=tiling.stages, **overlap_options(),
    )  # fmt: skip
    return ResidualStream(new_z, statistics, tiling.columns)


def normalise_and_multiply(
    stream: ResidualStream,
    w: Tensor,
    sums: Tensor,
    constant: Tensor,
    eps: float,
    tiling: Tiling,
    *,
    centred: bool = True,
    form: int = 0,
    next_weight: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Compute GELU(norm(z) · Wᵀ + bias): z (M, K), w (N, K) → (M, N).

    Args:
        stream: z (M, K) with its statistics.
        w: γ ∘ W, in z's type.
        sums: (N,), float32: the sum of each row of w, as rounded.
        constant: (N,), float32: W · β + bias.
        eps: Of the norm.
        tiling: Tile sizes.
        centred: True for a LayerNorm, False for an RMSNorm.
        form: Number of the GELU; 0 for none.
        next_weight: The weights of the next product, of the same size as w, which the cache fetches meanwhile.
        dtype: Type of the result.
    """
    z, statistics, width = stream
    (m, k), n = z.shape, w.shape[0]
    parts = triton.cdiv(k, width)
    assert m <= FEW
    assert tiling.splits == 1
    assert statistics.shape == (2, parts, m)
    assert statistics.is_contiguous()
    assert next_weight is None or next_weight.numel() == w.numel()
    out = torch.empty(m, n, dtype=dtype, device=z.device)
    count = triton.cdiv(m, tiling.rows) * triton.cdiv(n, tiling.columns)
    line = LINE // w.element_size()
    share = triton.next_power_of_2(triton.cdiv(n * k, line * count)) if is_compiled() and next_weight is not None else 0
    normalise_and_multiply_kernel[(count,)](
        TensorDescriptor.from_tensor(z, [tiling.rows, tiling.depth]),
        TensorDescriptor.from_tensor(w, [tiling.columns, tiling.depth]),
        w, next_weight, statistics, sums, constant, out,
        m, n, k, tiling.rows, tiling.columns, tiling.depth,
        parts, triton.next_power_of_2(parts), width, eps, centred, form,
        line, triton.next_power_of_2(triton.cdiv(k, line)), share, is_compiled(),
        num_warps=tiling.warps, num_stages=tiling.stages, **overlap_options(),
    )  # fmt: skip
    return out
