"""Self-attention for short sequences, up to 272 tokens: all keys at once, with a plain softmax.

An image of 224 pixels has 197 tokens. Kernels for thousands of tokens pad them to 256 and keep running sums over blocks
of keys. Here a program takes a tile of queries of one head and all keys, which are split into powers of two that fit
closely (197 → 128 + 64 + 16).

Shapes: B images, T tokens, H heads, d their width.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.fast.gpu.kernels.overlap import begin, is_compiled, overlap_options

MOST_TOKENS = 272
"""All scores of a tile must fit into registers."""


@triton.jit
def _mask_scores(scores, first: tl.constexpr, count: tl.constexpr, tokens: tl.constexpr):
    if first + count > tokens:
        scores = tl.where((first + tl.arange(0, count) < tokens)[None, :], scores, float("-inf"))
    return scores


@triton.jit
def _load_rows(matrix, first, count: tl.constexpr, tokens: tl.constexpr, step: tl.constexpr, width: tl.constexpr):
    """Load `count` rows of a matrix whose rows are `step` values apart; zeros after row `tokens`."""
    row = first + tl.arange(0, count)
    places = row[:, None] * step + tl.arange(0, width)[None, :]
    return tl.load(matrix + places, mask=(row < tokens)[:, None], other=0.0)


@triton.jit
def attention_kernel(
    qkv, out, factor,
    heads: tl.constexpr, tokens: tl.constexpr, width: tl.constexpr, n0: tl.constexpr, n1: tl.constexpr,
    n2: tl.constexpr, tile: tl.constexpr, chip: tl.constexpr,
):  # fmt: skip
    """Compute softmax(q · kᵀ · factor) · v for one tile of queries of one head of one image.

    Everything is loaded before anything is computed, because waiting for memory takes most of the time.
    """
    # qkv (B·T, 3·H·d), out (B·T, H·d); factor = log2(e) / √d, since exp2 is used; T = tokens = at most n0 + n1 + n2.
    # One program per (image, head, tile of queries): q (tile, d), k and v (n0 + n1 + n2, d).
    begin(chip)
    parts: tl.constexpr = (tokens + tile - 1) // tile
    step: tl.constexpr = 3 * heads * width
    number = tl.program_id(0)
    first = number % parts * tile
    image, head = (number // parts // heads).to(tl.int64), number // parts % heads
    queries = qkv + image * tokens * step + head * width
    keys, values = queries + heads * width, queries + 2 * heads * width
    q, k0 = _load_rows(queries, first, tile, tokens, step, width), _load_rows(keys, 0, n0, tokens, step, width)
    if n1 > 0:
        k1 = _load_rows(keys, n0, n1, tokens, step, width)
    if n2 > 0:
        k2 = _load_rows(keys, n0 + n1, n2, tokens, step, width)
    v0 = _load_rows(values, 0, n0, tokens, step, width)
    if n1 > 0:
        v1 = _load_rows(values, n0, n1, tokens, step, width)
    if n2 > 0:
        v2 = _load_rows(values, n0 + n1, n2, tokens, step, width)
    s0 = _mask_scores(tl.dot(q, k0.T), 0, n0, tokens)
    largest = tl.max(s0, 1)
    if n1 > 0:
        s1 = _mask_scores(tl.dot(q, k1.T), n0, n1, tokens)
        largest = tl.maximum(largest, tl.max(s1, 1))
    if n2 > 0:
        s2 = _mask_scores(tl.dot(q, k2.T), n0 + n1, n2, tokens)
        largest = tl.maximum(largest, tl.max(s2, 1))
    largest *= factor
    p0 = tl.exp2(s0 * factor - largest[:, None])
    total = tl.sum(p0, 1)
    y = tl.dot(p0.to(q.dtype), v0)
    if n1 > 0:
        p1 = tl.exp2(s1 * factor - largest[:, None])
        total += tl.sum(p1, 1)
        y = tl.dot(p1.to(q.dtype), v1, y)
    if n2 > 0:
        p2 = tl.exp2(s2 * factor - largest[:, None])
        total += tl.sum(p2, 1)
        y = tl.dot(p2.to(q.dtype), v2, y)
    y = y / total[:, None]
    row = first + tl.arange(0, tile)
    places = (image * tokens + row)[:, None] * (heads * width) + head * width + tl.arange(0, width)[None, :]
    tl.store(out + places, y.to(out.dtype.element_ty), mask=(row < tokens)[:, None])


def split_tokens(tokens: int) -> tuple[int, int, int]:
    """Return up to three powers of two, at least 16, whose sum is at least `tokens`: 197 → 128, 64, 16."""
    sizes, left = list[int](), tokens
    while left > 0:
        size = 1 << (left - 1).bit_length() if len(sizes) == 2 else 1 << (left.bit_length() - 1)
        sizes.append(max(16, size))
        left -= sizes[-1]
    while len(sizes) > 1 and sizes[-1] == sizes[-2]:  # 128 + 64 + 64 is 128 + 128, which is 256
        sizes[-2:] = [2 * sizes[-1]]
    first, second, third, *_ = [*sizes, 0, 0]
    return first, second, third


def supports_shape(tokens: int, width: int) -> bool:
    """Return whether the kernel can compute heads of this width for so many tokens."""
    return tokens <= MOST_TOKENS and width in (16, 32, 64, 128)


def attention(qkv: Tensor, tokens: int, heads: int, tile: int = 64, warps: int = 4) -> Tensor:
    """Queries, keys and values side by side (B·T, 3·H·d) → (B·T, H·d). One program computes `tile` queries."""
    rows, columns = qkv.shape
    width, images = columns // (3 * heads), rows // tokens
    assert qkv.is_contiguous()
    out = torch.empty(rows, heads * width, dtype=qkv.dtype, device=qkv.device)
    attention_kernel[(images * heads * triton.cdiv(tokens, tile),)](
        qkv, out, math.log2(math.e) * width**-0.5, heads, tokens, width, *split_tokens(tokens), tile, is_compiled(),
        num_warps=warps, **overlap_options(),
    )  # fmt: skip
    return out
