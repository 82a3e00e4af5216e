"""x · Wᵀ + bias, and a GELU, for the few tokens that are read in the end: all the time it takes is that of reading W.

Shapes: M tokens, at most MOST, K → N features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.fast.gpu.kernels.gelu import gelu
from vitrail.fast.gpu.kernels.overlap import LINE, begin, fetch_rows, on_chip, overlapping

MOST = 4
DEPTH = 1024
"""Features that are added up at a time."""
COLUMNS, WARPS = 8, 4
"""Results of a program, and its warps."""


@triton.jit
def few_rows_kernel(
    x,
    w,
    bias,
    y,
    N,
    M: tl.constexpr,
    K: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    form: tl.constexpr,
    has_bias: tl.constexpr,
    line: tl.constexpr,
    lines: tl.constexpr,
    chip: tl.constexpr,
):
    """Some columns of y, for every row."""
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


def few_rows(x: Tensor, w: Tensor, bias: Tensor | None, form: int = 0) -> Tensor:
    """(M, K), (N, K) → (M, N), in x's type."""
    (m, k), n = x.shape, w.shape[0]
    assert m <= MOST
    assert x.is_contiguous()
    assert w.is_contiguous()
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    line = LINE // w.element_size()
    few_rows_kernel[(triton.cdiv(n, COLUMNS),)](
        x, w, bias, y, n, m, k, COLUMNS, min(DEPTH, triton.next_power_of_2(k)), form, bias is not None,
        line, triton.next_power_of_2(triton.cdiv(k, line)), on_chip(),
        num_warps=WARPS, **overlapping(),
    )  # fmt: skip
    return y
