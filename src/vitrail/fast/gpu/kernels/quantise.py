"""Quantise to FP8 with a scale for each row.

Shapes: M rows, N columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.fast.gpu.kernels.norm import FP8, LARGEST
from vitrail.fast.gpu.kernels.overlap import begin, is_compiled, overlap_options


@triton.jit
def quantise_kernel(x, y, scales, width: tl.constexpr, padded: tl.constexpr, chip: tl.constexpr):
    """Quantise one row of x, and write its scale."""
    # x, y (M, N); scales (M, 1). width = N, padded = the next power of two.
    begin(chip)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, padded)
    values = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values)), 1e-12) / 448.0
    tl.store(scales + row, scale)
    tl.store(y + row * width + column, (values * (1 / scale)).to(y.dtype.element_ty), mask=column < width)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """(M, N) → FP8 (M, N), and the scale of each row (M, 1)."""
    count, width = x.shape
    y = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(count, 1, dtype=torch.float32, device=x.device)
    quantise_kernel[(count,)](
        x, y, scales, width, triton.next_power_of_2(width), is_compiled(),
        num_warps=8 if width > 2048 else 4, **overlap_options(),
    )  # fmt: skip
    return y, scales


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise the weight of a dense layer (N, K) in plain torch → FP8 (N, K), and the scale of each row (N,)."""
    whole = weight.detach().float()
    scales = whole.abs().amax(1).clamp_min(1e-12) / LARGEST
    return (whole / scales[:, None]).to(FP8), scales
