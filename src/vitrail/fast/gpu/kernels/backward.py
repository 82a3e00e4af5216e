"""Backward kernels for the work between matrix products; each makes one pass over memory and also sums over tokens.

Used by gradients.py. For a sum over tokens every program adds up its own rows and writes one row; torch adds up those.

Shapes: M = B·T tokens, D width, N features, P programs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.fast.gpu.kernels.dropout import DropoutMask, drop
from vitrail.fast.gpu.kernels.gelu import gelu_derivative
from vitrail.fast.gpu.kernels.overlap import is_compiled
from vitrail.fast.gpu.kernels.product import count_multiprocessors


class Walk(NamedTuple):
    """How programs go through a matrix, from top to bottom."""

    rows: int
    """Rows that a program takes at a time."""
    columns: int
    warps: int
    programs: int
    """Programs on each multiprocessor."""


NORM = Walk(1, 0, 1, 8)
"""A program takes all columns at a time, so `columns` is not used."""
GELU = Walk(8, 256, 2, 8)
QKV = Walk(2, 256, 2, 8)


@triton.jit(do_not_specialize=["place"])
def norm_backward_kernel(
    dy, dz, z, keep, weight, new_dz, dbranch, sums, key, place, count, tokens,
    width: tl.constexpr, padded: tl.constexpr, eps: tl.constexpr, rows: tl.constexpr, adds: tl.constexpr,
    thinned: tl.constexpr, centred: tl.constexpr, dropped: tl.constexpr,
):  # fmt: skip
    """From the gradients of y = norm(z) · weight + bias and of z itself, compute those of z and of the branch."""
    # dy, dz, z, new_dz, dbranch (M, D); weight (D,); keep (B,); sums (P, 3, D): of weight, bias and branch bias.
    # count = M, width = D, padded = the next power of two; a program takes `rows` rows at a time. `dropped`, key,
    # place: of the branch's dropout mask; there is none if `dropped` is 0.
    column = tl.arange(0, padded)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    d_weight = tl.zeros((rows, padded), dtype=tl.float32)
    d_bias = tl.zeros((rows, padded), dtype=tl.float32)
    d_branch = tl.zeros((rows, padded), dtype=tl.float32)
    for start in range(tl.program_id(0) * rows, count, tl.num_programs(0) * rows):
        row = (start + tl.arange(0, rows)).to(tl.int64)
        there = row < count
        mask = there[:, None] & inside[None, :]
        places = row[:, None] * width + column[None, :]
        x = tl.load(z + places, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy + places, mask=mask, other=0.0).to(tl.float32)
        if centred:
            x = tl.where(inside[None, :], x - (tl.sum(x, 1) / width)[:, None], 0.0)
        inverse = (1 / tl.sqrt(tl.sum(x * x, 1) / width + eps))[:, None]
        x *= inverse
        d_weight += g * x
        d_bias += g
        g *= w
        d = g - x * (tl.sum(g * x, 1) / width)[:, None]
        if centred:
            d -= (tl.sum(g, 1) / width)[:, None]
        d = tl.where(mask, d * inverse, 0.0)
        if adds:
            d += tl.load(dz + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(new_dz + places, d.to(new_dz.dtype.element_ty), mask=mask)
        if thinned:
            d *= tl.load(keep + row.to(tl.int32) // tokens, mask=there, other=0.0).to(tl.float32)[:, None]
        d = drop(d, key, place, row, tokens, column, dropped)
        if thinned or dropped > 0:
            tl.store(dbranch + places, d.to(dbranch.dtype.element_ty), mask=mask)
        d_branch += d
    base = sums + tl.program_id(0) * 3 * width + column
    tl.store(base, tl.sum(d_weight, 0), mask=inside)
    tl.store(base + width, tl.sum(d_bias, 0), mask=inside)
    tl.store(base + 2 * width, tl.sum(d_branch, 0), mask=inside)


class NormGradients(NamedTuple):
    """Gradients of a residual sum and its norm."""

    z: Tensor
    """(M, D)"""
    branch: Tensor
    """(M, D); the same tensor as z where they are equal."""
    weight: Tensor
    """(D,), like the biases."""
    bias: Tensor
    branch_bias: Tensor


def norm_backward(
    dy: Tensor,
    dz: Tensor | None,
    z: Tensor,
    weight: Tensor,
    eps: float,
    *,
    centred: bool = True,
    keep: Tensor | None = None,
    mask: DropoutMask | None = None,
    tokens: int = 1,
    walk: Walk = NORM,
) -> NormGradients:
    """Compute the backward pass of `add_norm`.

    Args:
        dy: (M, D), gradient of the norm.
        dz: (M, D), gradient of the sum z from elsewhere; None if z is not used elsewhere.
        z: (M, D), the sum.
        weight: (D,), of the norm.
        eps: Of the norm.
        centred: True for a LayerNorm, False for an RMSNorm.
        keep: (B,), what each image's branch was multiplied by (stochastic depth).
        mask: Of dropout on the branch.
        tokens: T, of one image; used with `keep` and `mask`.
        walk: How the programs go through the rows.
    """
    count, width = z.shape
    assert all(each is None or each.is_contiguous() for each in (dy, dz, z))
    new_dz = torch.empty_like(dy)
    dbranch = new_dz if keep is None and mask is None else torch.empty_like(dy)
    key, place, dropped = mask or (None, 0, 0)
    programs = min(triton.cdiv(count, walk.rows), walk.programs * count_multiprocessors(z.device))
    sums = torch.empty(programs, 3, width, dtype=torch.float32, device=z.device)
    norm_backward_kernel[(programs,)](
        dy, dz, z, keep, weight, new_dz, dbranch, sums, key, place,
        count, tokens, width, triton.next_power_of_2(width), eps, walk.rows,
        dz is not None, keep is not None, centred, dropped,
        num_warps=walk.warps,
    )  # fmt: skip
    d_weight, d_bias, d_branch = sums.sum(0)
    return NormGradients(new_dz, dbranch, d_weight, d_bias, d_branch)


@triton.jit(do_not_specialize=["place"])
def gelu_backward_kernel(
    dh, before, sums, key, place, count, width, tokens,
    form: tl.constexpr, chip: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, dropped: tl.constexpr,
):  # fmt: skip
    """Replace dh by dh · mask · gelu'(before), and sum it over tokens."""
    # dh, before (M, N); sums (P, N). count = M, width = N; program (i, j) takes block i of columns. `dropped`, key,
    # place: of the dropout mask; there is none if `dropped` is 0.
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    total = tl.zeros((rows, columns), dtype=tl.float32)
    for start in range(tl.program_id(1) * rows, count, tl.num_programs(1) * rows):
        row = (start + tl.arange(0, rows)).to(tl.int64)
        mask = (row < count)[:, None] & (column < width)[None, :]
        places = row[:, None] * width + column[None, :]
        g = tl.load(dh + places, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(before + places, mask=mask, other=0.0).to(tl.float32)
        g *= gelu_derivative(x, form, chip)
        g = drop(g, key, place, row, tokens, column, dropped)
        tl.store(dh + places, g.to(dh.dtype.element_ty), mask=mask)
        total += g
    tl.store(sums + tl.program_id(1) * width + column, tl.sum(total, 0), mask=column < width)


def gelu_backward(
    dh: Tensor, before: Tensor, form: int, walk: Walk = GELU, *, mask: DropoutMask | None = None, tokens: int = 1
) -> Tensor:
    """Turn the gradient after a GELU, dh (M, N), into the one before it, in place; return its sum over tokens (N,).

    `mask`: of dropout after the GELU; `tokens`: T, of one image, used with it.
    """
    count, width = dh.shape
    assert dh.is_contiguous()
    assert before.is_contiguous()
    grid, sums = _plan_programs(dh, width, walk)
    key, place, dropped = mask or (None, 0, 0)
    gelu_backward_kernel[grid](
        dh, before, sums, key, place, count, width, tokens,
        form, is_compiled(), walk.rows, walk.columns, dropped,
        num_warps=walk.warps,
    )  # fmt: skip
    total: Tensor = sums.sum(0)
    return total


@triton.jit
def join_qkv_gradients_kernel(
    dq, dk, dv, out, sums, count, tokens, by_image, by_head, by_token,
    width: tl.constexpr, head_width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Copy the gradients of queries, keys and values side by side, and sum them over tokens."""
    # dq, dk, dv (B, H, T, d) with strides by_image, by_head, by_token; out (B·T, 3·D); sums (P, 3·D). count = B·T.
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    within = (column // head_width * by_head + column % head_width)[None, :]
    which = tl.program_id(2)
    source = dq
    if which == 1:
        source = dk
    if which == 2:
        source = dv
    total = tl.zeros((rows, columns), dtype=tl.float32)
    for start in range(tl.program_id(1) * rows, count, tl.num_programs(1) * rows):
        row = (start + tl.arange(0, rows)).to(tl.int64)
        mask = (row < count)[:, None] & (column < width)[None, :]
        place = (row // tokens * by_image + row % tokens * by_token)[:, None] + within
        g = tl.load(source + place, mask=mask, other=0.0)
        tl.store(out + row[:, None] * 3 * width + which * width + column[None, :], g, mask=mask)
        total += g.to(tl.float32)
    tl.store(sums + tl.program_id(1) * 3 * width + which * width + column, tl.sum(total, 0), mask=column < width)


def join_qkv_gradients(dq: Tensor, dk: Tensor, dv: Tensor, *, walk: Walk = QKV) -> tuple[Tensor, Tensor]:
    """dq, dk, dv (B, H, T, d) → side by side (B·T, 3·H·d), and their sum over tokens (3·H·d,)."""
    images, heads, tokens, head_width = dq.shape
    if not dq.stride() == dk.stride() == dv.stride() or dq.stride(3) != 1:
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    count, width = images * tokens, heads * head_width
    out = torch.empty(count, 3 * width, dtype=dq.dtype, device=dq.device)
    (across, down), sums = _plan_programs(out, width, walk)
    by_image, by_head, by_token, _ = dq.stride()
    join_qkv_gradients_kernel[(across, down, 3)](
        dq, dk, dv, out, sums, count, tokens, by_image, by_head, by_token, width, head_width, walk.rows, walk.columns,
        num_warps=walk.warps,
    )  # fmt: skip
    total: Tensor = sums.sum(0)
    return out, total


def _plan_programs(x: Tensor, width: int, walk: Walk) -> tuple[tuple[int, int], Tensor]:
    """Return the numbers of programs across and down a matrix, and memory for their sums."""
    across = triton.cdiv(width, walk.columns)
    down = max(1, min(triton.cdiv(len(x), walk.rows), walk.programs * count_multiprocessors(x.device) // across))
    return (across, down), torch.empty(down, x.shape[1], dtype=torch.float32, device=x.device)
