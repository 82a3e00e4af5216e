"""The parts of a fused training step as autograd functions, each with its gradient; training.py puts them together.

z, the residual stream, may have a finer type (float32) than the products take (bf16). Its gradient has the products'
type, so that the backward passes of norms read and write a third less. But autograd wants a tensor and its gradient to
have the same type. So autograd does not see z; it sees a `link` instead, a tensor of zeros with z's shape and the
gradient's type, which takes no memory.

Shapes: B images, T tokens, R tokens that are read, N patches or features, M = B·T, D width, H heads, d = D/H.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from vitrail.fast.gpu.autotune import choose_fastest, round_up_rows
from vitrail.fast.gpu.fused_layers import BYTES, WIDE
from vitrail.fast.gpu.kernels.backward import gelu_backward, join_qkv_gradients, norm_backward
from vitrail.fast.gpu.kernels.dropout import DropoutMask, activate_and_drop
from vitrail.fast.gpu.kernels.norm import NormedTokens, add_norm, assemble_norm
from vitrail.fast.gpu.kernels.product import Tiling, product
from vitrail.fast.gpu.kernels.quantise import quantise
from vitrail.fast.gpu.kernels.read_attention import read_backward, read_forward
from vitrail.fast.gpu.kernels.short_attention import short_backward, short_forward

GELUS = {1: "tanh", 2: "none"}
"""torch's names of the forms of the GELU that have a gradient here, by number."""
Shape = tuple[int, int, int]
"""(B, T, H)."""


class AddNorm(torch.autograd.Function):
    """z + mask · keep · (branch + branch_bias), and its norm; optionally with a twin in FP8 and its scales."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, link: Tensor, branch: Tensor, branch_bias: Tensor, weight: Tensor, bias: Tensor,
        keep: Tensor | None, mask: DropoutMask | None, count: int, eps: float, dtype: torch.dtype, twin: bool,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Tensors (M, D) → the sum in z's type, its norm as `dtype`, scales and twin for FP8, and a link."""
        made = add_norm(
            z, branch, weight, bias, eps,
            branch_bias=branch_bias, keep=keep, mask=mask, tokens=count, dtype=dtype, twin=twin,
        )  # fmt: skip
        ctx.save_for_backward(made.z, weight, keep)
        ctx.mask, ctx.tokens, ctx.eps = mask, count, eps
        return _list_outputs(ctx, made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        z, weight, keep = ctx.saved_tensors
        found = norm_backward(
            *_pick_gradients(gradients), z, weight, ctx.eps, keep=keep, mask=ctx.mask, tokens=ctx.tokens
        )
        return None, found.z, found.branch, found.branch_bias, found.weight, found.bias, *[None] * 6


class AssembleNorm(torch.autograd.Function):
    """Class token, registers and embedded patches, with positions, as tokens; and their norm."""

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, patches: Tensor, weight: Tensor, bias: Tensor,
        mask: DropoutMask | None, prefix: int, eps: float, stream: torch.dtype, dtype: torch.dtype, twin: bool,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """table (T, D), the same for every image, and patches (B·N, D) → (B·T, D)."""
        made = assemble_norm(
            table, patches, weight, bias, eps, prefix=prefix, stream=stream, dtype=dtype, twin=twin, mask=mask
        )
        ctx.save_for_backward(made.z, weight)
        ctx.mask, ctx.tokens, ctx.prefix, ctx.eps = mask, len(table), prefix, eps
        return _list_outputs(ctx, made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        z, weight = ctx.saved_tensors
        found = norm_backward(*_pick_gradients(gradients), z, weight, ctx.eps, mask=ctx.mask, tokens=ctx.tokens)
        by_token = found.branch.view(-1, ctx.tokens, z.shape[1])
        patches = by_token[:, ctx.prefix :].flatten(0, 1)
        return by_token.sum(0, dtype=torch.float32), patches, found.weight, found.bias, *[None] * 6


def _list_outputs(ctx: Any, made: NormedTokens) -> tuple[Tensor | None, ...]:
    """Return the outputs of a norm's function: all of `made`, of which only y has a gradient, and the link."""
    ctx.mark_non_differentiable(*(each for each in (made.z, made.scales, made.twin) if each is not None))
    ctx.set_materialize_grads(False)
    return *made, torch.zeros((), dtype=made.y.dtype, device=made.y.device).expand(made.z.shape)


def _pick_gradients(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of y, and that of the link (None if z is not used elsewhere)."""
    dz, dy, link = gradients[0], gradients[1], gradients[4]
    assert dz is None
    assert dy is not None
    return dy.contiguous(), None if link is None else link.contiguous()


class ReadAttention(torch.autograd.Function):
    """Attention of the tokens that are read to all tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, heads: int) -> Tensor:
        """Queries (B, R, D), keys and values (B, T, 2·D) → (B, R, D)."""
        ctx.save_for_backward(q, kv)
        ctx.heads = heads
        return read_forward(q, kv, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, kv = ctx.saved_tensors
        return *read_backward(dy, q, kv, ctx.heads), None


class MatrixProduct(torch.autograd.Function):
    """x · Wᵀ, with a float32 W that is cast to x's type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """x (M, K), weight (N, K) → (M, N)."""
        cast = weight.to(x.dtype)
        ctx.save_for_backward(x, cast)
        return x @ cast.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        return dy @ weight if ctx.needs_input_grad[0] else None, weight_gradient(dy, x)


class QkvAttention(torch.autograd.Function):
    """The product that gives queries, keys and values, and attention: x → softmax(q kᵀ / √d) v."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, shape: Shape, twin: Tensor | None, scales: Tensor | None
    ) -> Tensor:
        """x (M, D) → (M, D). `twin` and `scales`: x in FP8; if given, the product is computed in FP8."""
        cast = weight.to(x.dtype)
        qkv = multiply(x, cast, bias, twin, scales)
        q, k, v = split_heads(qkv, shape)
        y, *kept = attention_forward(q, k, v)
        ctx.save_for_backward(x, cast, qkv, y, *(each for each in kept if isinstance(each, Tensor)))
        ctx.shape, ctx.kept = shape, [None if isinstance(each, Tensor) else (each,) for each in kept]
        mixed: Tensor = y.transpose(1, 2).reshape(x.shape)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, qkv, y, *tensors = ctx.saved_tensors
        remaining = iter(tensors)
        kept = [next(remaining) if each is None else each[0] for each in ctx.kept]
        images, tokens, count = ctx.shape
        dy = dy.contiguous().view(images, tokens, count, -1).transpose(1, 2)
        dq, dk, dv = attention_backward(dy, *split_heads(qkv, ctx.shape), y, kept)
        dqkv, d_bias = join_qkv_gradients(dq, dk, dv)
        return dqkv @ weight, weight_gradient(dqkv, x), d_bias, None, None, None


class QkvShortAttention(torch.autograd.Function):
    """What `QkvAttention` computes, by our own kernels for short sequences (`supports_short`)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, shape: Shape, twin: Tensor | None, scales: Tensor | None
    ) -> Tensor:
        """x (M, D) → (M, D). `twin` and `scales`: x in FP8; if given, the product is computed in FP8."""
        cast = weight.to(x.dtype)
        qkv = multiply(x, cast, bias, twin, scales)
        ctx.save_for_backward(x, cast, qkv)
        ctx.shape = shape
        return short_forward(qkv, *shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, qkv = ctx.saved_tensors
        dqkv, d_bias = short_backward(dy.contiguous(), qkv, *ctx.shape[1:])
        return dqkv @ weight, weight_gradient(dqkv, x), d_bias, None, None, None


class MlpProducts(torch.autograd.Function):
    """The MLP without its last bias: mask · gelu(x · W₁ᵀ + b₁) · W₂ᵀ."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, form: int,
        twin: Tensor | None, scales: Tensor | None, mask: DropoutMask | None, count: int,
    ) -> Tensor:  # fmt: skip
        """x (M, D) → (M, D). `twin` and `scales`: x in FP8; if given, the first product is computed in FP8."""
        cast1, cast2 = weight1.to(x.dtype), weight2.to(x.dtype)
        if mask is None:
            before, hidden = multiply_and_activate(x, cast1, bias1.to(x.dtype), form, twin, scales)
        else:
            # A pass of its own, which reads the hidden layer once more: inside the product no thread holds 8
            # neighbouring channels, so that computing the mask would take several times as many instructions.
            before = multiply(x, cast1, bias1, twin, scales)
            hidden = activate_and_drop(before, form, mask, count)
        ctx.save_for_backward(x, cast1, cast2, before, hidden)
        ctx.form, ctx.mask, ctx.tokens = form, mask, count
        return hidden @ cast2.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight1, weight2, before, hidden = ctx.saved_tensors
        dy = dy.contiguous()
        d_before = dy @ weight2
        d_weight2 = weight_gradient(dy, hidden)
        d_bias1 = gelu_backward(d_before, before, ctx.form, mask=ctx.mask, tokens=ctx.tokens)
        return d_before @ weight1, weight_gradient(d_before, x), d_bias1, d_weight2, *[None] * 5


def multiply(x: Tensor, weight: Tensor, bias: Tensor, twin: Tensor | None, scales: Tensor | None) -> Tensor:
    """Return x · Wᵀ + bias (M, N); computed in FP8 if x has a twin."""
    if twin is None or scales is None:
        return F.linear(x, weight, bias.to(x.dtype))
    weight8, weight_scales = quantise(weight)
    y: Tensor = torch._scaled_mm(
        twin, weight8.t(), scales, weight_scales.t(), bias=bias.to(x.dtype), out_dtype=x.dtype, use_fast_accum=True
    )
    return y


def multiply_and_activate(
    x: Tensor, weight: Tensor, bias: Tensor, form: int, twin: Tensor | None, scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return x · Wᵀ + bias and its GELU, both (M, N); computed in FP8 if x has a twin."""
    operand, kernel, kernel_scales = x, weight, None
    if twin is not None:
        operand, (kernel, kernel_scales) = twin, quantise(weight)

    def run_torch(operand: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
        before = F.linear(operand, kernel, bias)
        return before, F.gelu(before, approximate=GELUS[form])

    def run_kernel(tiling: Tiling, operand: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
        before = torch.empty(len(operand), len(kernel), dtype=x.dtype, device=x.device)
        hidden = product(
            operand, kernel, bias, tiling,
            form=form, before=before, row_scales=scales, column_scales=kernel_scales, dtype=x.dtype,
        )  # fmt: skip
        return before, hidden

    candidates: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {} if twin is not None else {"library": run_torch}
    for name, tiling in (WIDE if twin is None else BYTES).items():
        candidates[name] = partial(run_kernel, tiling)
    key = "activated", *weight.shape, round_up_rows(len(x)), form, twin is not None
    return choose_fastest(key, candidates, operand, kernel)(operand, kernel)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dy (M, N), x (M, K) → the gradient of a weight (N, K), float32, also summed in float32."""
    if dy.is_cuda and dy.dtype != torch.float32:
        gradient: Tensor = torch.mm(dy.t(), x, out_dtype=torch.float32)
        return gradient
    return (dy.t() @ x).float()


def split_heads(qkv: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """(M, 3·D) → queries, keys and values, each (B, H, T, d)."""
    images, tokens, count = shape
    q, k, v = qkv.view(images, tokens, 3, count, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def attention_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Return attention by cuDNN's kernel, called as torch itself does, and what its gradient needs."""
    if not q.is_cuda:
        return (F.scaled_dot_product_attention(q, k, v),)
    y, *kept = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False)
    return y, *kept[:-1]  # log-sum-exp, two cumulative lengths, two largest lengths, seed and offset; no debug mask


def attention_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, kept: list[Any]) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values, each (B, H, T, d)."""
    if not q.is_cuda:
        with torch.enable_grad():
            q, k, v = (each.detach().requires_grad_() for each in (q, k, v))
            again = F.scaled_dot_product_attention(q, k, v)
        return torch.autograd.grad(again, (q, k, v), dy)
    lse, cumulative_q, cumulative_k, most_q, most_k, seed, offset = kept
    gradients: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dy, q, k, v, y, lse, seed, offset, None, cumulative_q, cumulative_k, most_q, most_k, 0.0, False
    )
    return gradients
