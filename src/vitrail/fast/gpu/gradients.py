"""The parts of a fused training step, each with its gradient: what `learning` puts together.

z, the sum that goes from block to block, may be finer (float32) than what products take (bf16). Its gradient is kept in
the products' type: that is a third less for the backward passes of norms to read and write. Autograd wants a tensor and
its gradient to have one type. So z itself is outside of it, and a `link` stands for z there: of z's shape and the
gradient's type, zero everywhere, without memory of its own.

Shapes: B images, T tokens, R tokens that are read, M = B·T, D width, H heads, d = D/H.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from vitrail.fast.gpu.choice import bucket, choose
from vitrail.fast.gpu.fused import BYTES, WIDE
from vitrail.fast.gpu.kernels.backward import gelu_backward, norm_backward, pack
from vitrail.fast.gpu.kernels.norm import Normed, add_norm, assemble_norm
from vitrail.fast.gpu.kernels.product import Tiling, product
from vitrail.fast.gpu.kernels.quantise import quantise
from vitrail.fast.gpu.kernels.reading import read_backward, read_forward

GELUS = {1: "tanh", 2: "none"}
"""The forms that there is a gradient for, by their numbers, and torch's names of them."""
Shape = tuple[int, int, int]
"""B, T, H"""


class AddNorm(torch.autograd.Function):
    """z + keep · (branch + its bias), and the norm of it; with a twin in FP8, if asked for, and its scales."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, link: Tensor, branch: Tensor, branch_bias: Tensor, weight: Tensor, bias: Tensor,
        keep: Tensor | None, count: int, eps: float, dtype: torch.dtype, twin: bool,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """(M, D) all → the sum, in z's type, its norm, in `dtype`, what FP8 needs, and a link for the sum."""
        made = add_norm(
            z, branch, weight, bias, eps, branch_bias=branch_bias, keep=keep, tokens=count, dtype=dtype, twin=twin
        )
        ctx.save_for_backward(made.z, weight, keep)
        ctx.tokens, ctx.eps = count, eps
        return _given(ctx, made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        """Of what went in."""
        z, weight, keep = ctx.saved_tensors
        found = norm_backward(*_gradients(given), z, weight, ctx.eps, keep=keep, tokens=ctx.tokens)
        return None, found.z, found.branch, found.branch_bias, found.weight, found.bias, None, None, None, None, None


class AssembleNorm(torch.autograd.Function):
    """The prefix and the embedded patches, with positions, as tokens, and the norm of them."""

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, patches: Tensor, weight: Tensor, bias: Tensor,
        prefix: int, eps: float, stream: torch.dtype, dtype: torch.dtype, twin: bool,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """(T, D) that every image begins from, (B·N, D) → (B·T, D)."""
        made = assemble_norm(table, patches, weight, bias, eps, prefix=prefix, stream=stream, dtype=dtype, twin=twin)
        ctx.save_for_backward(made.z, weight)
        ctx.tokens, ctx.prefix, ctx.eps = len(table), prefix, eps
        return _given(ctx, made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        """Of what went in."""
        z, weight = ctx.saved_tensors
        found = norm_backward(*_gradients(given), z, weight, ctx.eps)
        by_token = found.branch.view(-1, ctx.tokens, z.shape[1])
        patches = by_token[:, ctx.prefix :].flatten(0, 1)
        return by_token.sum(0, dtype=torch.float32), patches, found.weight, found.bias, None, None, None, None, None


def _given(ctx: Any, made: Normed) -> tuple[Tensor | None, ...]:
    """What a norm's function gives out: all of `made`, of which y alone has a gradient, and the link."""
    ctx.mark_non_differentiable(*(each for each in (made.z, made.scales, made.twin) if each is not None))
    ctx.set_materialize_grads(False)
    return *made, torch.zeros((), dtype=made.y.dtype, device=made.y.device).expand(made.z.shape)


def _gradients(given: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None]:
    """Of y, and of the link where z is used further."""
    dz, dy, link = given[0], given[1], given[4]
    assert dz is None
    assert dy is not None
    return dy.contiguous(), None if link is None else link.contiguous()


class Read(torch.autograd.Function):
    """Attention of the tokens that are read to all."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, heads: int) -> Tensor:
        """(B, R, D), (B, T, 2·D) → (B, R, D)."""
        ctx.save_for_backward(q, kv)
        ctx.heads = heads
        return read_forward(q, kv, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Of both."""
        q, kv = ctx.saved_tensors
        return *read_backward(dy, q, kv, ctx.heads), None


class Product(torch.autograd.Function):
    """x · Wᵀ, of a whole W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """(M, K), (N, K) → (M, N)."""
        cast = weight.to(x.dtype)
        ctx.save_for_backward(x, cast)
        return x @ cast.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor]:
        """Of both."""
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        return dy @ weight if ctx.needs_input_grad[0] else None, outer(dy, x)


class Attend(torch.autograd.Function):
    """The product with queries, keys and values, and attention: x → softmax(q kᵀ / √d) v."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, shape: Shape, twin: Tensor | None, scales: Tensor | None
    ) -> Tensor:
        """(M, D), and the same in FP8 with its scales, where the product is to be in that → (M, D)."""
        cast = weight.to(x.dtype)
        qkv = dense(x, cast, bias, twin, scales)
        q, k, v = heads(qkv, shape)
        y, *kept = attention_forward(q, k, v)
        ctx.save_for_backward(x, cast, qkv, y, *(each for each in kept if isinstance(each, Tensor)))
        ctx.shape, ctx.kept = shape, [None if isinstance(each, Tensor) else (each,) for each in kept]
        mixed: Tensor = y.transpose(1, 2).reshape(x.shape)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Of x, the weight and the bias."""
        x, weight, qkv, y, *tensors = ctx.saved_tensors
        waiting = iter(tensors)
        kept = [next(waiting) if each is None else each[0] for each in ctx.kept]
        images, tokens, count = ctx.shape
        dy = dy.contiguous().view(images, tokens, count, -1).transpose(1, 2)
        dq, dk, dv = attention_backward(dy, *heads(qkv, ctx.shape), y, kept)
        dqkv, d_bias = pack(dq, dk, dv)
        return dqkv @ weight, outer(dqkv, x), d_bias, None, None, None


class Mix(torch.autograd.Function):
    """The MLP without its last bias: gelu(x · W₁ᵀ + b₁) · W₂ᵀ."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, form: int,
        twin: Tensor | None, scales: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """(M, D), and the same in FP8 with its scales, where the first product is to be in that → (M, D)."""
        cast1, cast2 = weight1.to(x.dtype), weight2.to(x.dtype)
        before, hidden = activated(x, cast1, bias1.to(x.dtype), form, twin, scales)
        ctx.save_for_backward(x, cast1, cast2, before, hidden)
        ctx.form = form
        return hidden @ cast2.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Of x and what is learned."""
        x, weight1, weight2, before, hidden = ctx.saved_tensors
        dy = dy.contiguous()
        d_before = dy @ weight2
        d_weight2 = outer(dy, hidden)
        d_bias1 = gelu_backward(d_before, before, ctx.form)
        return d_before @ weight1, outer(d_before, x), d_bias1, d_weight2, None, None, None


def dense(x: Tensor, weight: Tensor, bias: Tensor, twin: Tensor | None, scales: Tensor | None) -> Tensor:
    """x · Wᵀ + bias; in FP8 where x has a twin."""
    if twin is None or scales is None:
        return F.linear(x, weight, bias.to(x.dtype))
    weight8, weight_scales = quantise(weight)
    y: Tensor = torch._scaled_mm(
        twin, weight8.t(), scales, weight_scales.t(), bias=bias.to(x.dtype), out_dtype=x.dtype, use_fast_accum=True
    )
    return y


def activated(
    x: Tensor, weight: Tensor, bias: Tensor, form: int, twin: Tensor | None, scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x · Wᵀ + bias, and the GELU of it; in FP8 where x has a twin."""
    operand, kernel, kernel_scales = x, weight, None
    if twin is not None:
        operand, (kernel, kernel_scales) = twin, quantise(weight)

    def by_library(operand: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
        before = F.linear(operand, kernel, bias)
        return before, F.gelu(before, approximate=GELUS[form])

    def by_ours(tiling: Tiling, operand: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
        before = torch.empty(len(operand), len(kernel), dtype=x.dtype, device=x.device)
        hidden = product(
            operand, kernel, bias, tiling,
            form=form, before=before, row_scales=scales, column_scales=kernel_scales, dtype=x.dtype,
        )  # fmt: skip
        return before, hidden

    ways: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {} if twin is not None else {"library": by_library}
    for name, tiling in (WIDE if twin is None else BYTES).items():
        ways[name] = partial(by_ours, tiling)
    key = "activated", *weight.shape, bucket(len(x)), form, twin is not None
    return choose(key, ways, operand, kernel)(operand, kernel)


def outer(dy: Tensor, x: Tensor) -> Tensor:
    """(M, N), (M, K) → (N, K) float32, added up in it: the gradient of a weight."""
    if dy.is_cuda and dy.dtype != torch.float32:
        found: Tensor = torch.mm(dy.t(), x, out_dtype=torch.float32)
        return found
    return (dy.t() @ x).float()


def heads(qkv: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """(M, 3·D) → queries, keys and values, each (B, H, T, d)."""
    images, tokens, count = shape
    q, k, v = qkv.view(images, tokens, 3, count, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def attention_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Attention by cuDNN's kernel, the operator that torch itself dispatches to, and what its gradient needs."""
    if not q.is_cuda:
        return (F.scaled_dot_product_attention(q, k, v),)
    y, *kept = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False)
    return y, *kept[:-1]  # log-sum-exp, two cumulative lengths, two largest lengths, seed and offset; no debug mask


def attention_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, kept: list[Any]) -> tuple[Tensor, ...]:
    """The gradients of queries, keys and values."""
    if not q.is_cuda:
        with torch.enable_grad():
            q, k, v = (each.detach().requires_grad_() for each in (q, k, v))
            again = F.scaled_dot_product_attention(q, k, v)
        return torch.autograd.grad(again, (q, k, v), dy)
    lse, cumulative_q, cumulative_k, most_q, most_k, seed, offset = kept
    found: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dy, q, k, v, y, lse, seed, offset, None, cumulative_q, cumulative_k, most_q, most_k, 0.0, False
    )
    return found
