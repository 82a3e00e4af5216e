"""x · Wᵀ + bias, and a GELU, for up to four rows, such as class tokens: reading W takes all of the time.

Shapes: M rows, at most MOST, K → N features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.fast.gpu.kernels.gelu import gelu
from vitrail.fast.gpu.kernels.overlap import LINE, begin, fetch_rows, is_compiled, overlap_options

MOST = 4
DEPTH = 1024
"""Features that are multiplied at a time."""
COLUMNS, WARPS = 8, 4
"""Columns of y that a program computes, and its warps."""


@triton.jit
def few_rows_kernel(
    x, w, bias, y, N,
    M: tl.constexpr, K: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, form: tl.constexpr,
    has_bias: tl.constexpr, line: tl.constexpr, lines: tl.constexpr, chip: tl.constexpr,
):  # fmt: skip
    """Compute `columns` columns of y for every row."""
    # x (M, K), w (N, K), bias (N,), y (M, N); `line` values fit into a cache line, a row of w has at most `lines`.
    first = tl.program_id(0) * columns
    if chip:
        fetch_rows(w, first, columns, N, K, line, lines)
    begin(chip)
    column, place = first + tl.arange(0, columns), tl.arange(0, depth)
    there = column < N
    for row in tl.static_range(M):
        total = tl.zeros((columns, depth), dtype=tl.float32)
        for k in range(0, K, depth):
            inside = k + place < K
            features = tl.load(x + row * K + k + place, mask=inside, other=0.0).to(tl.float32)
            kernel = tl.load(
                w + column.to(tl.int64)[:, None] * K + k + place[None, :],
                mask=there[:, None] & inside[None, :],
                other=0.0,
            )
            total += kernel.to(tl.float32) * features[None, :]
        result = tl.sum(total, 1)
        if has_bias:
            result += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
        tl.store(y + row * N + column, gelu(result, form, chip).to(y.dtype.element_ty), mask=there)


def multiply_few_rows(x: Tensor, w: Tensor, bias: Tensor | None, form: int = 0) -> Tensor:
    """x (M, K), w (N, K), bias (N,) → (M, N), in x's type; `form`: number of the GELU, 0 for none."""
    (m, k), n = x.shape, w.shape[0]
    assert m <= MOST
    assert x.is_contiguous()
    assert w.is_contiguous()
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    line = LINE // w.element_size()
    few_rows_kernel[(triton.cdiv(n, COLUMNS),)](
        x, w, bias, y, n, m, k, COLUMNS, min(DEPTH, triton.next_power_of_2(k)), form, bias is not None,
        line, triton.next_power_of_2(triton.cdiv(k, line)), is_compiled(),
        num_warps=WARPS, **overlap_options(),
    )  # fmt: skip
    return y
