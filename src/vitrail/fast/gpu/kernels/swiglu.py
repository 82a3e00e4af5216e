"""SwiGLU, silu(gate) · value, forward and backward.

Gates and values come from one product. In inference they are interleaved (gate, value, gate, value, …), so that the
product can apply SwiGLU before its result leaves the chip (product.py); else all gates come before all values.

Shapes: M tokens, N hidden features, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.fast.gpu.kernels.gelu import silu
from vitrail.fast.gpu.kernels.overlap import begin, is_compiled, overlap_options
from vitrail.fast.gpu.kernels.product import count_multiprocessors

ROWS, COLUMNS, WARPS = 4, 256, 4
"""Of a tile of the result, and warps of a program."""
BACKWARD_PROGRAMS = 8
"""On each multiprocessor."""


@triton.jit
def swiglu_kernel(
    x, y, count, width,
    rows: tl.constexpr, columns: tl.constexpr, interleaved: tl.constexpr, chip: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y = silu(gate) · value."""
    # x (M, 2·N), y (M, N). count = M, width = N.
    begin(chip)
    row = (tl.program_id(0) * rows + tl.arange(0, rows)).to(tl.int64)[:, None]
    column = tl.program_id(1) * columns + tl.arange(0, columns)[None, :]
    mask = (row < count) & (column < width)
    if interleaved:
        both = 2 * tl.program_id(1) * columns + tl.arange(0, 2 * columns)[None, :]
        loaded = tl.load(x + row * 2 * width + both, mask=(row < count) & (both < 2 * width), other=0.0)
        gate, value = tl.split(tl.reshape(loaded.to(tl.float32), (rows, columns, 2)))
    else:
        gate = tl.load(x + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, (silu(gate, chip) * value).to(y.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(dy, x, dx, sums, count, width, rows: tl.constexpr, columns: tl.constexpr):
    """From the gradient of y compute that of gates and values, and its sum over tokens."""
    # dy (M, N); x, dx (M, 2·N), gates first; sums (P, 2·N). count = M, width = N; program (i, j) takes columns i.
    column = tl.program_id(0) * columns + tl.arange(0, columns)[None, :]
    gates = tl.zeros((rows, columns), dtype=tl.float32)
    values = tl.zeros((rows, columns), dtype=tl.float32)
    for start in range(tl.program_id(1) * rows, count, tl.num_programs(1) * rows):
        row = (start + tl.arange(0, rows)).to(tl.int64)[:, None]
        mask = (row < count) & (column < width)
        places = row * 2 * width + column
        g = tl.load(dy + row * width + column, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + places + width, mask=mask, other=0.0).to(tl.float32)
        share = 1 / (1 + tl.exp(-gate))
        d_gate = g * value * share * (1 + gate * (1 - share))
        d_value = g * gate * share
        tl.store(dx + places, d_gate.to(dx.dtype.element_ty), mask=mask)
        tl.store(dx + places + width, d_value.to(dx.dtype.element_ty), mask=mask)
        gates += d_gate
        values += d_value
    base = sums + tl.program_id(1) * 2 * width + tl.program_id(0) * columns + tl.arange(0, columns)
    inside = tl.program_id(0) * columns + tl.arange(0, columns) < width
    tl.store(base, tl.sum(gates, 0), mask=inside)
    tl.store(base + width, tl.sum(values, 0), mask=inside)


def apply_swiglu(x: Tensor, interleaved: bool) -> Tensor:
    """Gates and values (M, 2·N) → silu(gate) · value (M, N); `interleaved`: gate, value, gate, value, …"""
    count, width = len(x), x.shape[1] // 2
    assert x.is_contiguous()
    y = torch.empty(count, width, dtype=x.dtype, device=x.device)
    swiglu_kernel[(triton.cdiv(count, ROWS), triton.cdiv(width, COLUMNS))](
        x, y, count, width, ROWS, COLUMNS, interleaved, is_compiled(), num_warps=WARPS, **overlap_options()
    )
    return y


def swiglu_backward(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """dy (M, N), and x (M, 2·N) with all gates first → the gradient of x, and its sum over tokens (2·N,)."""
    count, width = dy.shape
    assert dy.is_contiguous()
    assert x.is_contiguous()
    dx = torch.empty_like(x)
    across = triton.cdiv(width, COLUMNS)
    most = max(1, BACKWARD_PROGRAMS * count_multiprocessors(x.device) // across)
    down = max(1, min(triton.cdiv(count, ROWS), most))
    sums = torch.empty(down, 2 * width, dtype=torch.float32, device=x.device)
    swiglu_backward_kernel[(across, down)](dy, x, dx, sums, count, width, ROWS, COLUMNS, num_warps=WARPS)
    return dx, sums.sum(0)
