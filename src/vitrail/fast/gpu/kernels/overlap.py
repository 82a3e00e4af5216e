"""Let kernels follow one another without a gap (programmatic dependent launch), and prefetch weights into the cache.

A kernel that is launched with `overlap_options()` may start while the one before it still runs. Before it touches
memory that other kernels read or write, it calls `begin`: that lets the next kernel start, and waits until everything
launched before has ended. For one image, whose kernels take a few microseconds each, starting them takes much of the
time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LINE = 128
"""Bytes of a cache line."""


def is_compiled() -> bool:
    """Return whether kernels are compiled, and may use the chip's own instructions; False in Triton's interpreter."""
    return not triton.knobs.runtime.interpret


def overlap_options() -> dict[str, bool]:
    """Return the launch options of a kernel that may start early; none in Triton's interpreter."""
    return {"launch_pdl": True} if is_compiled() else {}


@triton.jit
def begin(chip: tl.constexpr):
    """Let the next kernel start, and wait for the kernels before this one."""
    if chip:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _fetch(places):
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fetch_rows(rows, first, count: tl.constexpr, most, width: tl.constexpr, line: tl.constexpr, lines: tl.constexpr):
    """Fetch `count` rows of `width` values into the cache; `line` values fit into a cache line."""
    row = tl.minimum(first + tl.arange(0, count), most - 1).to(tl.int64)
    place = tl.minimum(tl.arange(0, lines) * line, width - 1)
    _fetch(rows + row[:, None] * width + place[None, :])


@triton.jit
def fetch_share(values, share: tl.constexpr, most, line: tl.constexpr):
    """Fetch this program's `share` of lines of `most` values into the cache; all programs together fetch everything."""
    place = (tl.program_id(0) * share + tl.arange(0, share)).to(tl.int64) * line
    _fetch(values + tl.minimum(place, most - 1))


@triton.jit
def copy_kernel(x, y, count, size: tl.constexpr, chip: tl.constexpr):
    """Copy x to y; stands for the neighbouring kernels when a kernel is timed with a cold cache (autotune.py)."""
    # x, y: `count` values; a program copies `size` of them.
    begin(chip)
    place = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(y + place, tl.load(x + place, mask=place < count), mask=place < count)


def copy_tensor(x: Tensor) -> Tensor:
    """Copy a tensor by a kernel that lets the next one start early, as ours do."""
    y = torch.empty_like(x)
    copy_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), 1024, is_compiled(), num_warps=4, **overlap_options())
    return y
