"""z + branch and its norm in one pass over memory; the norm in half precision, or in FP8 with scales.

Shapes: M = B·T tokens, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.fast.gpu.kernels.dropout import DropoutMask, drop
from vitrail.fast.gpu.kernels.overlap import begin, is_compiled, overlap_options

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest FP8 number."""
ROWS, WARPS = 2, 4
"""Tokens that a program takes, and its warps: slightly the fastest on an H200."""
SPARSE = 1024
"""Up to so many tokens do not fill the chip: then each token has its own program, with more warps."""


@triton.jit(do_not_specialize=["place"])
def add_norm_kernel(
    z, branch, branch_bias, keep, factor, weight, bias, new_z, y, twin, scales, key, place, count, tokens, prefix,
    width: tl.constexpr, padded: tl.constexpr, eps: tl.constexpr, rows: tl.constexpr, adds: tl.constexpr,
    assembles: tl.constexpr, biased: tl.constexpr, thinned: tl.constexpr, scaled: tl.constexpr, centred: tl.constexpr,
    quantised: tl.constexpr, twinned: tl.constexpr, splits: tl.constexpr, dropped: tl.constexpr, chip: tl.constexpr,
):  # fmt: skip
    """Compute new_z = z + mask · keep · factor · (branch + branch_bias) and y = norm(new_z) · weight + bias."""
    # z, branch, new_z, y, twin (M, D); branch_bias, factor, weight, bias (D,); keep (B,); scales (M, 1). count = M,
    # width = D, padded = the next power of two. `splits`: branch is (splits, M, D), to be added up.
    # `assembles`: z is a table (T, D) for every image, and branch has the patches (B·(T - prefix), D) only; the mask
    # then acts on their sum. `dropped`, key, place: of the dropout mask; there is none if `dropped` is 0.
    begin(chip)
    row = (tl.program_id(0) * rows + tl.arange(0, rows)).to(tl.int64)
    column = tl.arange(0, padded)
    inside = column < width
    there = row < count
    mask = there[:, None] & inside[None, :]
    places = row[:, None] * width + column[None, :]
    if assembles:
        token = row % tokens
        x = tl.load(z + token[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
        patch = row // tokens * (tokens - prefix) + token - prefix
        is_patch = mask & (token >= prefix)[:, None]
        x += tl.load(branch + patch[:, None] * width + column[None, :], mask=is_patch, other=0.0).to(tl.float32)
        x = drop(x, key, place, row, tokens, column, dropped)
    else:
        x = tl.load(z + places, mask=mask, other=0.0).to(tl.float32)
    if adds:
        more = tl.load(branch + places, mask=mask, other=0.0).to(tl.float32)
        for split in tl.static_range(1, splits):
            part = branch + split * tl.cast(count, tl.int64) * width + places
            more += tl.load(part, mask=mask, other=0.0).to(tl.float32)
        if biased:
            more += tl.load(branch_bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        if scaled:
            more *= tl.load(factor + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        if thinned:
            more *= tl.load(keep + row.to(tl.int32) // tokens, mask=there, other=0.0).to(tl.float32)[:, None]
        more = drop(more, key, place, row, tokens, column, dropped)
        x += more
    if adds or assembles:
        if new_z.dtype.element_ty == tl.float16:
            x = tl.clamp(x, -65504.0, 65504.0)
        kept = x.to(new_z.dtype.element_ty)
        tl.store(new_z + places, kept, mask=mask)
        x = kept.to(tl.float32)  # the norm of the rounded values, which the next block reads
    if centred:
        x = tl.where(inside[None, :], x - (tl.sum(x, 1) / width)[:, None], 0.0)
    x *= (1 / tl.sqrt(tl.sum(x * x, 1) / width + eps))[:, None]
    x *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if centred:
        x += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if not quantised or twinned:
        tl.store(y + places, x.to(y.dtype.element_ty), mask=mask)
    if quantised:
        scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-12) / 448.0
        tl.store(scales + row, scale, mask=there)
        tl.store(twin + places, (x / scale[:, None]).to(twin.dtype.element_ty), mask=mask)


class NormedTokens(NamedTuple):
    """Tokens z and their norm y, as the kernels of this module return them."""

    z: Tensor
    """(M, D), the tokens."""
    y: Tensor
    """(M, D), their norm."""
    scales: Tensor | None
    """(M, 1), of the norm in FP8."""
    twin: Tensor | None
    """(M, D), the norm in FP8 as well, if requested."""


def add_norm(
    z: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    branch_bias: Tensor | None = None,
    factor: Tensor | None = None,
    keep: Tensor | None = None,
    mask: DropoutMask | None = None,
    tokens: int = 1,
    dtype: torch.dtype | None = None,
    twin: bool = False,
) -> NormedTokens:
    """Add a branch to z and return the sum and its norm.

    Args:
        z: (M, D).
        branch: (M, D), or parts (S, M, D) that are added up, or None.
        weight: (D,), of the norm.
        bias: (D,), of the norm; None for an RMSNorm, which does not subtract the mean.
        eps: Of the norm.
        branch_bias: (D,), added to the branch first.
        factor: (D,), multiplied with the branch (layer scale).
        keep: (B,), multiplied with the branch of each image (stochastic depth).
        mask: Of dropout on the branch.
        tokens: T, of one image; used with `keep` and `mask`.
        dtype: Type of the norm; z's if None.
        twin: Return the norm in FP8 as well.
    """
    new_z = z if branch is None else torch.empty_like(z)
    dtype = dtype or z.dtype
    return _launch_add_norm(
        z, branch, weight, bias, eps, new_z, branch_bias, factor, keep, mask, tokens, 0, dtype, twin, False
    )


def assemble_norm(
    table: Tensor,
    patches: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    prefix: int,
    stream: torch.dtype,
    dtype: torch.dtype,
    twin: bool = False,
    mask: DropoutMask | None = None,
) -> NormedTokens:
    """Add a table (T, D) to every image's embedded patches (B·N, D); return the tokens (B·T, D) and their norm.

    Args:
        table: (T, D): positions; the first `prefix` rows also hold class token and registers.
        patches: (B·N, D), with N = T - prefix.
        weight: (D,), of the norm.
        bias: (D,), of the norm, or None.
        eps: Of the norm.
        prefix: Number of tokens before the patches.
        stream: Type of the tokens.
        dtype: Type of the norm.
        twin: Return the norm in FP8 as well.
        mask: Of dropout on the tokens.
    """
    tokens = len(table)
    images = len(patches) // (tokens - prefix)
    z = torch.empty(images * tokens, table.shape[1], dtype=stream, device=patches.device)
    return _launch_add_norm(
        table, patches, weight, bias, eps, z, None, None, None, mask, tokens, prefix, dtype, twin, True
    )


def _launch_add_norm(
    z: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, new_z: Tensor,
    branch_bias: Tensor | None, factor: Tensor | None, keep: Tensor | None, mask: DropoutMask | None, tokens: int,
    prefix: int, dtype: torch.dtype, twin: bool, assembles: bool,
) -> NormedTokens:  # fmt: skip
    count, width = new_z.shape
    assert all(each is None or each.is_contiguous() for each in (z, branch, new_z))
    fp8 = twin or dtype == FP8
    y = torch.empty(new_z.shape, dtype=dtype, device=new_z.device)
    y8 = torch.empty(new_z.shape, dtype=FP8, device=new_z.device) if twin else y if fp8 else None
    scales = torch.empty(count, 1, dtype=torch.float32, device=new_z.device) if fp8 else None
    rows, warps = (ROWS, WARPS) if count > SPARSE else (1, 8)
    key, place, dropped = mask or (None, 0, 0)
    add_norm_kernel[(triton.cdiv(count, rows),)](
        z, branch, branch_bias, keep, factor, weight, bias, new_z, y, y8, scales, key, place,
        count, tokens, prefix,
        width, triton.next_power_of_2(width), eps, rows,
        branch is not None and not assembles, assembles, branch_bias is not None, keep is not None, factor is not None,
        bias is not None, fp8, twin, len(branch) if branch is not None and branch.ndim == 3 else 1, dropped,
        is_compiled(),
        num_warps=warps, **overlap_options(),
    )  # fmt: skip
    return NormedTokens(new_z, y, scales, y8 if twin else None)
