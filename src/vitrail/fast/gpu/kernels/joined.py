"""Products with what stands between them inside: the residual sum in the one before, the norm in the one after.

z + x · Wᵀ is stored by the product that computes it, with the mean and the squared deviations of every row over each
tile's columns: numbers that a tile has without asking another. The next product reads z as it is and norms its result:

    norm(z) · Wᵀ + b = rstd · (z · W'ᵀ - mean · s) + c,  W' = γ ∘ W,  s = its rows' sums,  c = W · β + b

where mean and rstd are put together from the tiles' statistics, exactly (Chan, Golub and LeVeque, 1983). For few rows,
where starting one more kernel takes longer than norming: each program has one tile.

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
from vitrail.fast.gpu.kernels.overlap import LINE, begin, fetch_rows, fetch_share, on_chip, overlapping
from vitrail.fast.gpu.kernels.product import FEW, Tiling


class Stream(NamedTuple):
    """z as it flows from block to block, and what its norm needs to be known."""

    z: Tensor
    """(M, D)."""
    statistics: Tensor
    """(2, P, M), float32: of each row, over each tile's columns, the mean and the sum of squared deviations from it."""
    columns: int
    """Of a tile; the last one may have fewer."""


@triton.jit
def joining_kernel(
    x,
    w,
    weights,
    bias,
    factor,
    z,
    new_z,
    statistics,
    M,
    N,
    K: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    has_bias: tl.constexpr,
    scaled: tl.constexpr,
    line: tl.constexpr,
    lines: tl.constexpr,
    chip: tl.constexpr,
):
    """new_z = z + factor · (x · Wᵀ + bias), and its statistics. `lines`: that a row of weights has in the cache."""
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
    old = tl.load(z + places, mask=mask, other=0.0)  # asked for here, so that it is there when the product is
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
    total = kept.to(tl.float32)  # the norm is of what is read; beyond N it is zero
    mean = tl.sum(total, 1) / tl.minimum(columns, N - n)
    away = tl.where(inside[None, :], total - mean[:, None], 0.0)
    own = statistics + tile * M + row
    tl.store(own, mean, mask=row < M)
    tl.store(own + tl.cdiv(N, columns) * M, tl.sum(away * away, 1), mask=row < M)


@triton.jit
def norming_kernel(
    z,
    w,
    weights,
    following,
    statistics,
    sums,
    constant,
    out,
    M,
    N,
    K: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    parts: tl.constexpr,
    padded: tl.constexpr,
    width: tl.constexpr,
    eps: tl.constexpr,
    centred: tl.constexpr,
    form: tl.constexpr,
    line: tl.constexpr,
    lines: tl.constexpr,
    share: tl.constexpr,
    chip: tl.constexpr,
):
    """GELU(rstd · (z · Wᵀ - mean · sums) + constant), the statistics being of `parts` of `width` columns each.

    `lines` and `share` as in a product.
    """
    high = tl.cdiv(M, rows)
    m, n = tl.program_id(0) % high * rows, tl.program_id(0) // high * columns
    if chip:
        fetch_rows(weights, n, columns, N, K, line, lines)
    begin(chip)
    row, column = m + tl.arange(0, rows), n + tl.arange(0, columns)
    part = tl.arange(0, padded)
    known = (part < parts)[:, None] & (row < M)[None, :]
    own = statistics + part[:, None] * M + row[None, :]
    means = tl.load(own, mask=known, other=0.0)  # asked for here, and put together when the product is there
    squares = tl.load(own + parts * M, mask=known, other=0.0)
    if centred:
        of_weights = tl.load(sums + column, mask=column < N, other=0.0)
    shift = tl.load(constant + column, mask=column < N, other=0.0)
    if share > 0:
        fetch_share(following, share, N * K, line)
    total = tl.zeros((rows, columns), dtype=tl.float32)
    for k in range(0, K, depth):  # beyond K the copy engine gives zeros
        total = tl.dot(z.load([m, k]), w.load([n, k]).T, total)
    count = tl.maximum(tl.minimum(width, K - part * width), 0).to(tl.float32)[:, None]
    mean = tl.sum(means * count, 0) / K
    away = means - mean[None, :]
    variance = tl.sum(squares + count * away * away, 0) / K
    if centred:
        total -= mean[:, None] * of_weights[None, :]
    else:
        variance += mean * mean  # of an RMSNorm, which takes deviations from zero
    total *= (1 / tl.sqrt(variance + eps))[:, None]
    total += shift[None, :]
    mask = (row < M)[:, None] & (column < N)[None, :]
    tl.store(out + row[:, None] * N + column[None, :], gelu(total, form, chip).to(out.dtype.element_ty), mask=mask)


def joining_product(
    x: Tensor, w: Tensor, bias: Tensor | None, z: Tensor, tiling: Tiling, *, factor: Tensor | None = None
) -> Stream:
    """(M, K), (N, K) and z (M, N) → z + factor · (x · Wᵀ + bias), in z's type, with its statistics.

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
    joining_kernel[(high * wide,)](
        TensorDescriptor.from_tensor(x, [tiling.rows, tiling.depth]),
        TensorDescriptor.from_tensor(w, [tiling.columns, tiling.depth]),
        w, bias, factor, z, new_z, statistics,
        m, n, k, tiling.rows, tiling.columns, tiling.depth, bias is not None, factor is not None,
        line, triton.next_power_of_2(triton.cdiv(k, line)), on_chip(),
        num_warps=tiling.warps, num_stages=tiling.stages, **overlapping(),
    )  # fmt: skip
    return Stream(new_z, statistics, tiling.columns)


def norming_product(
    stream: Stream,
    w: Tensor,
    sums: Tensor,
    constant: Tensor,
    eps: float,
    tiling: Tiling,
    *,
    centred: bool = True,
    form: int = 0,
    following: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """z (M, K), (N, K) → (M, N), of z's norm.

    Args:
        w: γ ∘ W, in z's type. `sums`: (N,), float32, of its rows, as they are rounded.
        constant: (N,), float32: W · β + bias.
        centred: a LayerNorm; else an RMSNorm, which does not centre.
        form: of the GELU behind it; 0 is none.
        following: the weights of the product after this one, as many as here, for the cache to fetch in the meantime.
    """
    z, statistics, width = stream
    (m, k), n = z.shape, w.shape[0]
    parts = triton.cdiv(k, width)
    assert m <= FEW
    assert tiling.splits == 1
    assert statistics.shape == (2, parts, m)
    assert statistics.is_contiguous()
    assert following is None or following.numel() == w.numel()
    out = torch.empty(m, n, dtype=dtype, device=z.device)
    count = triton.cdiv(m, tiling.rows) * triton.cdiv(n, tiling.columns)
    line = LINE // w.element_size()
    share = triton.next_power_of_2(triton.cdiv(n * k, line * count)) if on_chip() and following is not None else 0
    norming_kernel[(count,)](
        TensorDescriptor.from_tensor(z, [tiling.rows, tiling.depth]),
        TensorDescriptor.from_tensor(w, [tiling.columns, tiling.depth]),
        w, following, statistics, sums, constant, out,
        m, n, k, tiling.rows, tiling.columns, tiling.depth,
        parts, triton.next_power_of_2(parts), width, eps, centred, form,
        line, triton.next_power_of_2(triton.cdiv(k, line)), share, on_chip(),
        num_warps=tiling.warps, num_stages=tiling.stages, **overlapping(),
    )  # fmt: skip
    return out
