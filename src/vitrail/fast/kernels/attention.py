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
from triton.tools.tensor_descriptor import TensorDescriptor

from vitrail.fast.kernels.product import multiprocessors

MOST_TOKENS = 272
"""All scores of a tile lie in registers."""


@triton.jit
def _masked(scores, first: tl.constexpr, count: tl.constexpr, tokens: tl.constexpr):
    if first + count > tokens:
        scores = tl.where((first + tl.arange(0, count) < tokens)[None, :], scores, float("-inf"))
    return scores


@triton.jit
def attention_kernel(
    queries,
    first_part,
    second_part,
    third_part,
    out,
    factor,
    images,
    programs,
    heads: tl.constexpr,
    tokens: tl.constexpr,
    width: tl.constexpr,
    n0: tl.constexpr,
    n1: tl.constexpr,
    n2: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
):
    """softmax(q · kᵀ · factor, to the base 2) · v of one head of one image, for one tile of queries.

    All parts are views of one (B, T, 3·H·d). The copy engine fills rows beyond T with zeros, and drops them at the end.
    """
    parts: tl.constexpr = (tokens + tile - 1) // tile
    for number in tl.range(tl.program_id(0), images * heads * parts, programs, num_stages=stages):
        first = number % parts * tile
        image, head = number // parts // heads, number // parts % heads
        q_at, k_at, v_at = head * width, (heads + head) * width, (2 * heads + head) * width
        q = queries.load([image, first, q_at]).reshape(tile, width)
        k0 = first_part.load([image, 0, k_at]).reshape(n0, width)
        s0 = _masked(tl.dot(q, k0.T), 0, n0, tokens)
        largest = tl.max(s0, 1)
        if n1 > 0:
            k1 = second_part.load([image, n0, k_at]).reshape(n1, width)
            s1 = _masked(tl.dot(q, k1.T), n0, n1, tokens)
            largest = tl.maximum(largest, tl.max(s1, 1))
        if n2 > 0:
            k2 = third_part.load([image, n0 + n1, k_at]).reshape(n2, width)
            s2 = _masked(tl.dot(q, k2.T), n0 + n1, n2, tokens)
            largest = tl.maximum(largest, tl.max(s2, 1))
        largest *= factor
        v0 = first_part.load([image, 0, v_at]).reshape(n0, width)
        p0 = tl.exp2(s0 * factor - largest[:, None])
        total = tl.sum(p0, 1)
        y = tl.dot(p0.to(q.dtype), v0)
        if n1 > 0:
            v1 = second_part.load([image, n0, v_at]).reshape(n1, width)
            p1 = tl.exp2(s1 * factor - largest[:, None])
            total += tl.sum(p1, 1)
            y = tl.dot(p1.to(q.dtype), v1, y)
        if n2 > 0:
            v2 = third_part.load([image, n0 + n1, v_at]).reshape(n2, width)
            p2 = tl.exp2(s2 * factor - largest[:, None])
            total += tl.sum(p2, 1)
            y = tl.dot(p2.to(q.dtype), v2, y)
        y = y / total[:, None]
        out.store([image, first, q_at], y.to(out.dtype).reshape(1, tile, width))


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


def attention(
    qkv: Tensor, tokens: int, heads: int, tile: int = 64, warps: int = 4, stages: int = 2, each: int = 2
) -> Tensor:
    """(B·T, 3·H·d), queries, keys and values beside one another → (B·T, H·d)."""
    rows, columns = qkv.shape
    width, images = columns // (3 * heads), rows // tokens
    out = torch.empty(rows, heads * width, dtype=qkv.dtype, device=qkv.device)
    sequences = qkv.view(images, tokens, columns)
    parts = pieces(tokens)

    def view(count: int) -> TensorDescriptor | None:
        return TensorDescriptor.from_tensor(sequences, [1, count, width]) if count else None

    work = images * heads * triton.cdiv(tokens, tile)
    programs = min(work, multiprocessors(qkv.device) * each) if each else work
    attention_kernel[(programs,)](
        view(tile), *(view(count) for count in parts),
        TensorDescriptor.from_tensor(out.view(images, tokens, -1), [1, tile, width]),
        math.log2(math.e) * width**-0.5, images, programs, heads, tokens, width, *parts, tile, stages,
        num_warps=warps,
    )  # fmt: skip
    return out
