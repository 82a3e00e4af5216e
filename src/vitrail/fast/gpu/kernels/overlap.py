"""Kernels that follow one another without a gap (programmatic dependent launch).

A kernel that is launched with `overlapping()` may start while the one before it is still at work. Before it touches
what other kernels read or write, it calls `begin`: that lets the next one start, and waits until all that was launched
before has ended. For one image, whose kernels take a few microseconds each, starting them is a good part of the time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LINE = 128
"""Bytes that the cache fetches at once."""


def on_chip() -> bool:
    """Whether kernels are compiled, and may use the chip's own instructions; in the interpreter they may not."""
    return not triton.knobs.runtime.interpret


def overlapping() -> dict[str, bool]:
    """To launch a kernel with, so that it may start early; nothing where kernels are interpreted."""
    return {"launch_pdl": True} if on_chip() else {}


@triton.jit
def begin(chip: tl.constexpr):
    """Let the next kernel start, and wait for the one before."""
    if chip:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _fetch(places):
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fetch_rows(rows, first, count: tl.constexpr, most, width: tl.constexpr, line: tl.constexpr, lines: tl.constexpr):
    """Have the cache fetch rows of `width` values, `line` of them in a line; it never holds what is out of date."""
    row = tl.minimum(first + tl.arange(0, count), most - 1).to(tl.int64)
    place = tl.minimum(tl.arange(0, lines) * line, width - 1)
    _fetch(rows + row[:, None] * width + place[None, :])


@triton.jit
def fetch_share(values, share: tl.constexpr, most, line: tl.constexpr):
    """The same of this program's share, in lines, of `most` values; all programs together fetch them all."""
    place = (tl.program_id(0) * share + tl.arange(0, share)).to(tl.int64) * line
    _fetch(values + tl.minimum(place, most - 1))


@triton.jit
def copy_kernel(x, y, count, size: tl.constexpr, chip: tl.constexpr):
    """Copies; it stands for the kernel before, and the one after, where a way is measured in line with others."""
    begin(chip)
    place = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(y + place, tl.load(x + place, mask=place < count), mask=place < count)


def copied(x: Tensor) -> Tensor:
    """By a kernel that lets the next one start early, as ours do."""
    y = torch.empty_like(x)
    copy_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), 1024, on_chip(), num_warps=4, **overlapping())
    return y
