"""Self-attention for the short sequences of a Vision Transformer: all keys at once, so the softmax is a plain one.

An image of 224 pixels is 197 tokens: kernels made for thousands of tokens pad them to 256, and rescale running sums for
blocks of keys that are never more than two. Here a program takes a tile of queries of one head against all keys, which
are cut into powers of two that fit closely (197 → 128 + 64 + 16).

Shapes: B images, T tokens, H heads, d their width.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.fast.gpu.kernels.overlap import begin, on_chip, overlapping

MOST_TOKENS = 272
"""All scores of a tile lie in registers."""


@triton.jit
def _masked(scores, first: tl.constexpr, count: tl.constexpr, tokens: tl.constexpr):
    if first + count > tokens:
        scores = tl.where((first + tl.arange(0, count) < tokens)[None, :], scores, float("-inf"))
    return scores


@triton.jit
def _rows(matrix, first, count: tl.constexpr, tokens: tl.constexpr, step: tl.constexpr, width: tl.constexpr):
    """Some rows of a matrix whose rows are `step` apart; zeros beyond the last."""
    row = first + tl.arange(0, count)
    places = row[:, None] * step + tl.arange(0, width)[None, :]
    return tl.load(matrix + places, mask=(row < tokens)[:, None], other=0.0)


@triton.jit
def attention_kernel(
    qkv,
    out,
    factor,
    heads: tl.constexpr,
    tokens: tl.constexpr,
    width: tl.constexpr,
    n0: tl.constexpr,
    n1: tl.constexpr,
    n2: tl.constexpr,
    tile: tl.constexpr,
    chip: tl.constexpr,
):
    """softmax(q · kᵀ · factor, to the base 2) · v of one head of one image, for one tile of queries.

    All that is read is asked for at once, before anything is computed: the time that this takes is that of waiting.
    """
    begin(chip)
    parts: tl.constexpr = (tokens + tile - 1) // tile
    step: tl.constexpr = 3 * heads * width
    number = tl.program_id(0)
    first = number % parts * tile
    image, head = (number // parts // heads).to(tl.int64), number // parts % heads
    queries = qkv + image * tokens * step + head * width
    keys, values = queries + heads * width, queries + 2 * heads * width
    q, k0 = _rows(queries, first, tile, tokens, step, width), _rows(keys, 0, n0, tokens, step, width)
    if n1 > 0:
        k1 = _rows(keys, n0, n1, tokens, step, width)
    if n2 > 0:
        k2 = _rows(keys, n0 + n1, n2, tokens, step, width)
    v0 = _rows(values, 0, n0, tokens, step, width)
    if n1 > 0:
        v1 = _rows(values, n0, n1, tokens, step, width)
    if n2 > 0:
        v2 = _rows(values, n0 + n1, n2, tokens, step, width)
    s0 = _masked(tl.dot(q, k0.T), 0, n0, tokens)
    largest = tl.max(s0, 1)
    if n1 > 0:
        s1 = _masked(tl.dot(q, k1.T), n0, n1, tokens)
        largest = tl.maximum(largest, tl.max(s1, 1))
    if n2 > 0:
        s2 = _masked(tl.dot(q, k2.T), n0 + n1, n2, tokens)
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


def pieces(tokens: int) -> tuple[int, int, int]:
    """Up to three powers of two, 16 at least, that together are as many or a few more: 197 → 128, 64, 16."""
    found, left = list[int](), tokens
    while left > 0:
        size = 1 << (left - 1).bit_length() if len(found) == 2 else 1 << (left.bit_length() - 1)
        found.append(max(16, size))
        left -= found[-1]
    while len(found) > 1 and found[-1] == found[-2]:  # 128 + 64 + 64 is 128 + 128, which is 256
        found[-2:] = [2 * found[-1]]
    first, second, third, *_ = [*found, 0, 0]
    return first, second, third


def applies(tokens: int, width: int) -> bool:
    """Whether the kernel is made for it."""
    return tokens <= MOST_TOKENS and width in (16, 32, 64, 128)


def attention(qkv: Tensor, tokens: int, heads: int, tile: int = 64, warps: int = 4) -> Tensor:
    """(B·T, 3·H·d), queries, keys and values beside one another → (B·T, H·d). A program takes `tile` queries."""
    rows, columns = qkv.shape
    width, images = columns // (3 * heads), rows // tokens
    assert qkv.is_contiguous()
    out = torch.empty(rows, heads * width, dtype=qkv.dtype, device=qkv.device)
    attention_kernel[(images * heads * triton.cdiv(tokens, tile),)](
        qkv, out, math.log2(math.e) * width**-0.5, heads, tokens, width, *pieces(tokens), tile, on_chip(),
        num_warps=warps, **overlapping(),
    )  # fmt: skip
    return out
