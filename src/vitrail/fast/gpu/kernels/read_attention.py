"""Attention of the few tokens that are read in the end, such as the class token, to all tokens: forward and backward.

Used in the last block. With so few queries, reading keys and values once takes all of the time.

Shapes: B images, T tokens, R tokens that are read, H heads, d their width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from vitrail.fast.gpu.kernels.overlap import begin, is_compiled, overlap_options

MOST_TOKENS = 512
"""A head's keys and values must fit into registers."""


@triton.jit
def read_kernel(
    q, kv, dy, y, dq, dkv, factor, q_image, q_token, kv_token,
    read: tl.constexpr, tokens: tl.constexpr, heads: tl.constexpr, width: tl.constexpr, padded_tokens: tl.constexpr,
    padded_width: tl.constexpr, backward: tl.constexpr, chip: tl.constexpr,
):  # fmt: skip
    """Compute y = softmax(q · kᵀ · factor) · v for one head of one image, or from dy the gradients of q, k and v."""
    # q, dy, y, dq (B, R, H·d); kv, dkv (B, T, 2·H·d). q_image, q_token, kv_token: strides of q and kv. factor = 1/√d.
    # read = R, width = d; tokens and widths are padded to powers of two.
    begin(chip)
    number = tl.program_id(0)
    image, head = (number // heads).to(tl.int64), number % heads
    row, column = tl.arange(0, padded_tokens), tl.arange(0, padded_width)
    inside = column < width
    mask = (row < tokens)[:, None] & inside[None, :]
    places = (image * tokens + row)[:, None] * kv_token + head * width + column[None, :]
    k = tl.load(kv + places, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(kv + heads * width + places, mask=mask, other=0.0).to(tl.float32)
    if backward:
        dk = tl.zeros((padded_tokens, padded_width), dtype=tl.float32)
        dv = tl.zeros((padded_tokens, padded_width), dtype=tl.float32)
    for index in tl.static_range(read):
        place = (image * read + index) * heads * width + head * width + column
        asking = q + image * q_image + index * q_token + head * width + column
        query = tl.load(asking, mask=inside, other=0.0).to(tl.float32)
        scores = tl.where(row < tokens, tl.sum(k * query[None, :], 1) * factor, float("-inf"))
        p = tl.exp(scores - tl.max(scores, 0))
        p = p / tl.sum(p, 0)
        if backward:
            g = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
            dp = tl.sum(v * g[None, :], 1)
            ds = p * (dp - tl.sum(p * dp, 0)) * factor
            tl.store(dq + place, tl.sum(k * ds[:, None], 0).to(dq.dtype.element_ty), mask=inside)
            dk += ds[:, None] * query[None, :]
            dv += p[:, None] * g[None, :]
        else:
            tl.store(y + place, tl.sum(v * p[:, None], 0).to(y.dtype.element_ty), mask=inside)
    if backward:
        tl.store(dkv + places, dk.to(dkv.dtype.element_ty), mask=mask)
        tl.store(dkv + heads * width + places, dv.to(dkv.dtype.element_ty), mask=mask)


def read_with_torch(q: Tensor, kv: Tensor, heads: int) -> Tensor:
    """Compute the same as `read_forward` by torch: for any number of tokens, with a gradient."""
    k, v = kv.unflatten(2, (2, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    y = F.scaled_dot_product_attention(q.unflatten(2, (heads, -1)).transpose(1, 2), k, v)
    return y.transpose(1, 2).flatten(2)


def read_forward(q: Tensor, kv: Tensor, heads: int) -> Tensor:
    """Queries (B, R, H·d), keys and values side by side (B, T, 2·H·d) → (B, R, H·d). Rows may be part of wider ones."""
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(q, kv, None, y, None, None, heads)
    return y


def read_backward(dy: Tensor, q: Tensor, kv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and kv, which must be contiguous."""
    assert q.is_contiguous()
    assert kv.is_contiguous()
    dq, dkv = torch.empty_like(q), torch.empty_like(kv)
    _launch(q, kv, dy.contiguous(), None, dq, dkv, heads)
    return dq, dkv


def _launch(
    q: Tensor, kv: Tensor, dy: Tensor | None, y: Tensor | None, dq: Tensor | None, dkv: Tensor | None, heads: int
) -> None:
    (images, read, columns), tokens = q.shape, kv.shape[1]
    width = columns // heads
    read_kernel[(images * heads,)](
        q, kv, dy, y, dq, dkv, width**-0.5, q.stride(0), q.stride(1), kv.stride(1),
        read, tokens, heads, width,
        triton.next_power_of_2(tokens), triton.next_power_of_2(width), dy is not None, is_compiled(),
        num_warps=8 if dy is None else 16, **overlap_options(),
    )  # fmt: skip
