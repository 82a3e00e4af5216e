"""Dropout masks that kernels compute from a counter, so that no pass over memory writes or reads them.

A mask is a function of the step's key, its place in the model, the number of the image in the step, the token and the
channel. So it is the same for any number of ranks and parts of a batch, and after a restart; the backward pass computes
it again.

The generator is Philox4x32 with 7 rounds (Salmon et al., SC 2011: the fewest that pass all of their tests). One call
gives 128 bits, for 8 neighbouring channels of 16 bits each: a rate is rounded to a multiple of 1/65536, and what
remains is scaled by exactly 1 / (1 - rounded rate).

Shapes: B images, T tokens, C channels.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.fast.gpu.kernels.gelu import gelu
from vitrail.fast.gpu.kernels.overlap import is_compiled

LEVELS = 65536
"""Random numbers for one channel are below this."""
COLUMNS = 1024
"""Channels that a program of `read_mask` takes at a time."""
GELU_ROWS, GELU_COLUMNS, GELU_WARPS = 8, 256, 4
"""Tokens and channels that a program of `activate_and_drop` takes, and its warps."""


class DropoutMask(NamedTuple):
    """A mask that kernels compute where they need it: 0 for what is dropped, 1 / (1 - rate) for the rest."""

    key: Tensor
    """(2,) int64 on the device: the step's key, and the number of the first image in the step."""
    place: int
    """Number of the place in the model: no two places have the same mask."""
    dropped: int
    """How many of 65536 values are dropped."""

    @classmethod
    def from_rate(cls, key: Tensor, place: int, rate: float) -> Self | None:
        """Return the mask of a place; None if nothing is dropped there. `rate` is below 1."""
        dropped = min(round(rate * LEVELS), LEVELS - 1)
        return cls(key, place, dropped) if dropped else None


@triton.jit
def drop(x, key, place, row, tokens, column, dropped: tl.constexpr):
    """Return x with a part of a mask applied to it; x itself if `dropped` is 0."""
    # x (rows, columns) float32; key: two int64; row (rows,) counts the tokens of all images, `tokens` of each; column
    # (columns,). A thread that holds 8 neighbouring channels of a token calls the generator once for all of them: the
    # compiler finds that the counters are equal.
    if dropped == 0:
        return x
    else:
        row = row.to(tl.int32)  # dividing 64 bits would take longer than the generator
        image = row // tokens
        blank = tl.zeros(x.shape, dtype=tl.uint32)
        first, second, third, fourth = tl.philox(
            tl.load(key),
            blank + (column >> 3).to(tl.uint32)[None, :],
            blank + (row - image * tokens).to(tl.uint32)[:, None],
            blank + (image + tl.load(key + 1)).to(tl.uint32)[:, None],
            blank + place.to(tl.uint32),
            7,
        )
        piece = (column & 7)[None, :]
        low, high = tl.where((piece & 2) == 0, first, second), tl.where((piece & 2) == 0, third, fourth)
        word = tl.where((piece & 4) == 0, low, high)
        word = tl.where((piece & 1) == 0, word << 16, word)  # 16 random bits at the top
        return tl.where(word >= dropped * 65536, x * (65536.0 / (65536 - dropped)), 0.0)


@triton.jit(do_not_specialize=["place"])
def read_mask_kernel(key, place, out, tokens, width, dropped: tl.constexpr, columns: tl.constexpr):
    """Write a mask, one token at a time."""
    # out (B·T, C); width = C; program (i, j) takes row i, block j of columns.
    row = tl.program_id(0) + tl.zeros((1,), dtype=tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    mask = drop(tl.full((1, columns), 1.0, dtype=tl.float32), key, place, row, tokens, column, dropped)
    tl.store(out + row[:, None] * width + column[None, :], mask, mask=(column < width)[None, :])


def read_mask(mask: DropoutMask, images: int, tokens: int, channels: int) -> Tensor:
    """Return a mask (B, T, C) as float32, for what torch computes and for tests."""
    out = torch.empty(images, tokens, channels, device=mask.key.device)
    columns = min(COLUMNS, max(triton.next_power_of_2(channels), 8))
    read_mask_kernel[(images * tokens, triton.cdiv(channels, columns))](
        mask.key, mask.place, out, tokens, channels, mask.dropped, columns, num_warps=4
    )
    return out


@triton.jit(do_not_specialize=["place"])
def activate_and_drop_kernel(
    before, out, key, place, count, width, tokens,
    form: tl.constexpr, chip: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, dropped: tl.constexpr,
):  # fmt: skip
    """Compute out = mask · gelu(before)."""
    # before, out (M, N); count = M, width = N; program (i, j) takes block i of rows, block j of columns.
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    mask = (row < count)[:, None] & (column < width)[None, :]
    places = row[:, None] * width + column[None, :]
    x = gelu(tl.load(before + places, mask=mask, other=0.0).to(tl.float32), form, chip)
    x = drop(x, key, place, row, tokens, column, dropped)
    tl.store(out + places, x.to(out.dtype.element_ty), mask=mask)


def activate_and_drop(before: Tensor, form: int, mask: DropoutMask, tokens: int) -> Tensor:
    """Return the GELU of a form of `before` (M, N) with dropout after it; `tokens`: T, of one image."""
    count, width = before.shape
    assert before.is_contiguous()
    out = torch.empty_like(before)
    activate_and_drop_kernel[(triton.cdiv(count, GELU_ROWS), triton.cdiv(width, GELU_COLUMNS))](
        before, out, mask.key, mask.place, count, width, tokens,
        form, is_compiled(), GELU_ROWS, GELU_COLUMNS, mask.dropped,
        num_warps=GELU_WARPS,
    )  # fmt: skip
    return out
