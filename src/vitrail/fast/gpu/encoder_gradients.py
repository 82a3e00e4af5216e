"""Attention with rotated or normed queries and keys, and SwiGLU, as autograd functions, each with its gradient.

They stand beside `QkvAttention` and `MlpProducts` of gradients.py, for encoders that have these parts.

Shapes: B images, T tokens, M = B·T, N hidden features, D width, H heads, d = D/H.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from vitrail.fast.gpu.fused_heads import join_bias, select_angles
from vitrail.fast.gpu.gradients import (
    QkvAttention,
    QkvShortAttention,
    Shape,
    attention_backward,
    attention_forward,
    multiply,
    split_heads,
    weight_gradient,
)
from vitrail.fast.gpu.kernels.backward import join_qkv_gradients
from vitrail.fast.gpu.kernels.rotate import HeadTransform, transform_heads, transform_heads_backward
from vitrail.fast.gpu.kernels.short_attention import supports_short
from vitrail.fast.gpu.kernels.swiglu import apply_swiglu, swiglu_backward
from vitrail.model.architecture import VitArchitecture
from vitrail.model.attention import SelfAttention
from vitrail.model.rotary import Rotation


class TransformedAttention(torch.autograd.Function):
    """Queries, keys and values of normed tokens; queries and keys normed and rotated; then attention.

    The product's result is kept only where a norm needs it: a rotation alone is undone in the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, q_weight: Tensor | None, q_bias: Tensor | None,
        k_weight: Tensor | None, k_bias: Tensor | None, transform: HeadTransform, shape: Shape,
        twin: Tensor | None = None, scales: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute it.

        Args:
            ctx: Of autograd.
            x: (M, D).
            weight: (3·D, D), cast to x's type, like the bias.
            bias: (3·D,) or None.
            q_weight: (d,), of the norm on queries, or None; like the three others a parameter, here for its gradient.
            q_bias: (d,) or None.
            k_weight: (d,) or None.
            k_bias: (d,) or None.
            transform: Rotation and eps; its own weights are not used. Angles get no gradient.
            shape: (B, T, H).
            twin: x in FP8; if given, the product is computed in FP8.
            scales: Of `twin`.
        """
        transform = transform._replace(q_weight=q_weight, q_bias=q_bias, k_weight=k_weight, k_bias=k_bias)
        cast = weight.to(x.dtype)
        qkv = multiply(x, cast, x.new_zeros(len(weight)) if bias is None else bias, twin, scales)
        heads = transform_heads(qkv if q_weight is None else qkv.clone(), transform)
        y, *kept = attention_forward(*split_heads(heads, shape))
        tensors = [each for each in kept if isinstance(each, Tensor)]
        ctx.kept = [None if isinstance(each, Tensor) else (each,) for each in kept]
        ctx.transform = transform._replace(q_weight=None, q_bias=None, k_weight=None, k_bias=None)
        ctx.shape, ctx.has_bias = shape, bias is not None
        ctx.save_for_backward(x, cast, heads, qkv, y, q_weight, q_bias, k_weight, k_bias, *tensors)
        images, tokens, _ = shape
        mixed: Tensor = y.transpose(1, 2).reshape(images * tokens, -1)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, heads, qkv, y, q_weight, q_bias, k_weight, k_bias, *tensors = ctx.saved_tensors
        remaining = iter(tensors)
        kept = [next(remaining) if each is None else each[0] for each in ctx.kept]
        transform = ctx.transform._replace(q_weight=q_weight, q_bias=q_bias, k_weight=k_weight, k_bias=k_bias)
        images, tokens, count = ctx.shape
        dy = dy.contiguous().view(images, tokens, count, -1).transpose(1, 2)
        dqkv, sums = join_qkv_gradients(*attention_backward(dy, *split_heads(heads, ctx.shape), y, kept))
        found = transform_heads_backward(dqkv, qkv, transform)
        d_bias = torch.cat([found.bias, sums[len(found.bias) :]]) if ctx.has_bias else None
        norms = (
            None if parameter is None else gradient
            for parameter, gradient in zip((q_weight, q_bias, k_weight, k_bias), found[1:], strict=True)
        )
        return dqkv @ weight, weight_gradient(dqkv, x), d_bias, *norms, None, None, None, None


class SwigluProducts(torch.autograd.Function):
    """The MLP with SwiGLU, without its last bias: (silu(gate) · value) · W₂ᵀ; x · W₁ᵀ + b₁ is gates, then values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor) -> Tensor:
        """x (M, D), weight1 (2·N, D), bias1 (2·N,) or None, weight2 (D, N) → (M, D)."""
        cast1, cast2 = weight1.to(x.dtype), weight2.to(x.dtype)
        before = F.linear(x, cast1, None if bias1 is None else bias1.to(x.dtype))
        hidden = apply_swiglu(before, interleaved=False)
        ctx.save_for_backward(x, cast1, cast2, before, hidden)
        ctx.has_bias = bias1 is not None
        return hidden @ cast2.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight1, weight2, before, hidden = ctx.saved_tensors
        dy = dy.contiguous()
        d_before, d_bias1 = swiglu_backward(dy @ weight2, before)
        d_weight2 = weight_gradient(dy, hidden)
        return d_before @ weight1, weight_gradient(d_before, x), d_bias1 if ctx.has_bias else None, d_weight2


def has_own_attention(a: VitArchitecture) -> bool:
    """Return whether queries or keys differ from the paper's: they turn, have norms, or lack a bias."""
    return a.rotary is not None or a.qk_norm or not a.qkv_bias or not a.key_bias


def uses_short_attention(a: VitArchitecture, tokens: int) -> bool:
    """Return whether our own kernels for few tokens compute the attention of a model."""
    return not has_own_attention(a) and supports_short(tokens, a.head_width)


def attend(
    x: Tensor,
    attention: SelfAttention,
    rotation: Rotation | None,
    shape: Shape,
    twin: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Compute attention without its output projection, with a gradient: normed tokens (M, D) → (M, D).

    Args:
        x: (M, D).
        attention: The plain layer, whose parameters get the gradient.
        rotation: Turns queries and keys; its angles get no gradient.
        shape: (B, T, H).
        twin: x in FP8; if given, the product is computed in FP8.
        scales: Of `twin`.
    """
    weight, bias = attention.qkv.weight, join_bias(attention)
    norms = [getattr(norm, name, None) for norm in (attention.q_norm, attention.k_norm) for name in ("weight", "bias")]
    mixed: Tensor
    if rotation is None and norms[0] is None and bias is not None:
        is_short = supports_short(shape[1], x.shape[1] // attention.num_heads)
        mixed = (QkvShortAttention if is_short else QkvAttention).apply(x, weight, bias, shape, twin, scales)
        return mixed
    transform = HeadTransform(attention.num_heads, x.shape[1] // attention.num_heads)
    if isinstance(attention.q_norm, nn.LayerNorm | nn.RMSNorm):
        assert attention.q_norm.eps is not None
        transform = transform._replace(eps=attention.q_norm.eps)
    if rotation is not None:
        cos, sin = (select_angles(each, rotation.layout) for each in (rotation.cos, rotation.sin))
        transform = transform._replace(cos=cos, sin=sin, paired=rotation.layout == "pairs")
    mixed = TransformedAttention.apply(x, weight, bias, *norms, transform, shape, twin, scales)
    return mixed
