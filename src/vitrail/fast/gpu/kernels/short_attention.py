"""Self-attention of at most 128 tokens, forward and backward: one program computes a whole head of an image.

Small images have 64 tokens. Kernels for long sequences take tiles of 128 queries, and half of the work is thrown away.
Here all scores of a head fit into registers, so the backward pass computes them again and nothing is kept for it. It
writes the gradients of queries, keys and values side by side, as the product before it needs them, and sums them over
tokens for the gradient of the bias.

Shapes: B images, T tokens, H heads, d their width, P programs for each head.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.fast.gpu.kernels.product import count_multiprocessors

MOST_TOKENS = 128
PROGRAMS = 4
"""Programs on each multiprocessor, in the backward pass."""


@triton.jit
def _softmax_scores(q, k, factor, tokens: tl.constexpr, padded: tl.constexpr):
    """Return softmax(q · kᵀ · factor) over the keys that exist; `factor` contains log2(e), for exp2 is used."""
    scores = tl.dot(q, k.T, input_precision="ieee") * factor
    scores = tl.where((tl.arange(0, padded) < tokens)[None, :], scores, float("-inf"))
    p = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@triton.jit
def short_forward_kernel(
    qkv, out, factor,
    heads: tl.constexpr, tokens: tl.constexpr, width: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """Compute softmax(q · kᵀ · factor) · v for one head of one image."""
    # qkv (B·T, 3·H·d), out (B·T, H·d); padded: T as a power of two.
    image, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    row, column = tl.arange(0, padded), tl.arange(0, width)
    mask = (row < tokens)[:, None]
    places = (image * tokens + row)[:, None] * (3 * heads * width) + head * width + column[None, :]
    q = tl.load(qkv + places, mask=mask, other=0.0)
    k = tl.load(qkv + heads * width + places, mask=mask, other=0.0)
    v = tl.load(qkv + 2 * heads * width + places, mask=mask, other=0.0)
    p = _softmax_scores(q, k, factor, tokens, padded)
    y = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    to = (image * tokens + row)[:, None] * (heads * width) + head * width + column[None, :]
    tl.store(out + to, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def short_backward_kernel(
    dy, qkv, dqkv, sums, factor, scale, images,
    heads: tl.constexpr, tokens: tl.constexpr, width: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries, keys and values of one head, image after image, and sum them over tokens."""
    # dy (B·T, H·d), qkv and dqkv (B·T, 3·H·d), sums (P, 3·H·d); scale = 1/√d, factor = scale · log2(e).
    head = tl.program_id(0)
    row, column = tl.arange(0, padded), tl.arange(0, width)
    mask = (row < tokens)[:, None]
    sum_q = tl.zeros((width,), dtype=tl.float32)
    sum_k = tl.zeros((width,), dtype=tl.float32)
    sum_v = tl.zeros((width,), dtype=tl.float32)
    for image in range(tl.program_id(1), images, tl.num_programs(1)):
        token = (image * tokens + row).to(tl.int64)[:, None]
        places = token * (3 * heads * width) + head * width + column[None, :]
        q = tl.load(qkv + places, mask=mask, other=0.0)
        k = tl.load(qkv + heads * width + places, mask=mask, other=0.0)
        v = tl.load(qkv + 2 * heads * width + places, mask=mask, other=0.0)
        g = tl.load(dy + token * (heads * width) + head * width + column[None, :], mask=mask, other=0.0)
        p = _softmax_scores(q, k, factor, tokens, padded)
        dv = tl.dot(p.to(g.dtype).T, g, input_precision="ieee")
        dp = tl.dot(g, v.T, input_precision="ieee")
        ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(q.dtype)
        dq = tl.dot(ds, k, input_precision="ieee")
        dk = tl.dot(ds.T, q, input_precision="ieee")
        tl.store(dqkv + places, dq.to(dqkv.dtype.element_ty), mask=mask)
        tl.store(dqkv + heads * width + places, dk.to(dqkv.dtype.element_ty), mask=mask)
        tl.store(dqkv + 2 * heads * width + places, dv.to(dqkv.dtype.element_ty), mask=mask)
        sum_q += tl.sum(dq, 0)
        sum_k += tl.sum(dk, 0)
        sum_v += tl.sum(dv, 0)
    base = sums + tl.program_id(1) * (3 * heads * width) + head * width + column
    tl.store(base, sum_q)
    tl.store(base + heads * width, sum_k)
    tl.store(base + 2 * heads * width, sum_v)


def supports_short(tokens: int, width: int) -> bool:
    """Return whether these kernels can compute heads of this width for so many tokens."""
    return tokens <= MOST_TOKENS and width in (16, 32, 64, 128)


def short_forward(qkv: Tensor, tokens: int, heads: int) -> Tensor:
    """Queries, keys and values side by side (B·T, 3·H·d) → attention (B·T, H·d)."""
    rows, width = len(qkv), qkv.shape[1] // (3 * heads)
    assert qkv.is_contiguous()
    out = torch.empty(rows, heads * width, dtype=qkv.dtype, device=qkv.device)
    short_forward_kernel[(rows // tokens * heads,)](
        qkv, out, math.log2(math.e) * width**-0.5, heads, tokens, width, **_choose_options(tokens)
    )
    return out


def short_backward(dy: Tensor, qkv: Tensor, tokens: int, heads: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of qkv (B·T, 3·H·d), and their sum over all tokens (3·H·d,); dy is (B·T, H·d)."""
    images, width = len(qkv) // tokens, qkv.shape[1] // (3 * heads)
    assert dy.is_contiguous()
    assert qkv.is_contiguous()
    dqkv = torch.empty_like(qkv)
    programs = max(1, min(images, PROGRAMS * count_multiprocessors(qkv.device) // heads))
    sums = torch.empty(programs, qkv.shape[1], dtype=torch.float32, device=qkv.device)
    scale = width**-0.5
    short_backward_kernel[(heads, programs)](
        dy, qkv, dqkv, sums, math.log2(math.e) * scale, scale, images, heads, tokens, width, **_choose_options(tokens)
    )
    total: Tensor = sums.sum(0)
    return dqkv, total


def _choose_options(tokens: int) -> dict[str, int]:
    """Return the tokens as a power of two, at least 16 as a product needs, and how a program is compiled for them.

    One stage: loading the next image ahead would take the shared memory that other programs need.
    """
    padded = max(16, triton.next_power_of_2(tokens))
    return {"padded": padded, "num_warps": 4 if padded <= 64 else 8, "num_stages": 1}
