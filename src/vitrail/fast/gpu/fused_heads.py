"""Queries, keys and values of a fused model: their product, and what happens to queries and keys after it.

Queries and keys may be normed, rotated, or both. A rotation alone can be a part of the product itself; a norm, which
needs whole heads, is a pass of its own.

Shapes: M = B·T tokens, T of one image, D width, H heads, d = D/H.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import torch
from torch import Tensor, nn

from vitrail.fast.gpu.autotune import Implementation
from vitrail.fast.gpu.fused_layers import DenseWeights, FusedLinear
from vitrail.fast.gpu.kernels.product import PackedRotation, Tiling, pack_rotation
from vitrail.fast.gpu.kernels.rotate import HeadTransform, transform_heads
from vitrail.model.attention import SelfAttention
from vitrail.model.rotary import Rotation


class FusedQkv(FusedLinear):
    """Normed tokens (M, D) → queries, keys and values side by side (M, 3·D), or some of the three, ready for attention.

    A row is a token, image after image.
    """

    def __init__(
        self,
        attention: SelfAttention,
        rotation: Rotation | None = None,
        fp8: bool = False,
        queries: bool = True,
        keys: bool = True,
    ) -> None:
        """Take the weights of attention.

        Args:
            attention: The plain layer.
            rotation: Of its block.
            fp8: Quantise the weights to FP8.
            queries: Whether to compute queries.
            keys: Whether to compute keys and values. Without them, rows are tokens before the patches: they never turn.
        """
        width = attention.qkv.in_features
        rows = slice(0 if queries else width, 3 * width if keys else width)
        super().__init__(join_weights(attention, rotation), fp8=fp8, rows=rows)
        self.transform = build_transform(attention, rotation, turns=keys)
        self.has_queries, self.has_keys = queries, keys
        self.rotation: PackedRotation | None = None
        """What the product can turn by itself: no norms, which need whole heads."""
        if self.transform is not None and self.transform.q_weight is None:
            assert self.transform.cos is not None
            assert self.transform.sin is not None
            self.rotation = pack_rotation(self.transform.cos, self.transform.sin, (queries + keys) * width)

    def describe(self) -> tuple[Hashable, ...]:
        """Return what its time depends on, besides the input."""
        transform = self.transform
        if transform is None:
            return super().describe()
        tables = () if transform.cos is None else transform.cos.shape
        return *super().describe(), transform.heads, *tables, transform.q_weight is not None, self.has_queries

    def list_implementations(self, rows: int, by_row: bool, to_fp8: bool) -> dict[str, Implementation]:
        """Return what can compute it, by name; `turned`: the product turns queries and keys by itself."""
        candidates = super().list_implementations(rows, by_row, to_fp8)
        if self.rotation is not None:
            for name, tiling in self.list_tilings(rows).items():
                candidates[f"turned {name}"] = partial(super().run_kernel, tiling, rotation=self.rotation)
        return candidates

    def run_kernel(
        self,
        tiling: Tiling,
        x: Tensor,
        scales: Tensor | None,
        out_scale: Tensor | None,
        rotation: PackedRotation | None = None,
    ) -> Tensor:
        return self.finish(super().run_kernel(tiling, x, scales, out_scale, rotation))

    def finish(self, y: Tensor) -> Tensor:
        """Norm and rotate queries and keys, in place."""
        if self.transform is None:
            return y
        return transform_heads(y, self.transform, queries=self.has_queries, keys=self.has_keys)


def build_transform(attention: SelfAttention, rotation: Rotation | None, turns: bool) -> HeadTransform | None:
    """Return what happens to the queries and keys of attention; None if nothing does.

    Args:
        attention: The plain layer.
        rotation: Of its block.
        turns: Whether queries and keys turn. If not, only their order within a head is the rotation's.
    """
    q_norm, k_norm = attention.q_norm, attention.k_norm
    transform = HeadTransform(attention.num_heads, attention.qkv.in_features // attention.num_heads)
    if rotation is not None and turns:
        cos, sin = (select_angles(each, rotation.layout) for each in (rotation.cos, rotation.sin))
        transform = transform._replace(cos=cos, sin=sin)
    if isinstance(q_norm, nn.LayerNorm | nn.RMSNorm) and isinstance(k_norm, nn.LayerNorm | nn.RMSNorm):
        assert q_norm.eps is not None
        q_weight, q_bias, k_weight, k_bias = (
            None if each is None else order_pairs(each.detach().float(), 1, rotation)
            for norm in (q_norm, k_norm)
            for each in (norm.weight, norm.bias if isinstance(norm, nn.LayerNorm) else None)
        )
        return transform._replace(q_weight=q_weight, q_bias=q_bias, k_weight=k_weight, k_bias=k_bias, eps=q_norm.eps)
    return None if transform.cos is None else transform


def join_weights(attention: SelfAttention, rotation: Rotation | None) -> DenseWeights:
    """Return the weights (3·D, D) and the bias (3·D,), if any, of queries, keys and values."""
    weight, bias, heads = attention.qkv.weight.detach(), join_bias(attention), 2 * attention.num_heads
    return DenseWeights(
        order_pairs(weight, heads, rotation), None if bias is None else order_pairs(bias.detach(), heads, rotation)
    )


def join_bias(attention: SelfAttention) -> Tensor | None:
    """Return the bias (3·D,) of queries, keys and values, with zeros where keys have none; None without any."""
    if attention.q_bias is None or attention.v_bias is None:
        return attention.qkv.bias
    return torch.cat([attention.q_bias, torch.zeros_like(attention.q_bias), attention.v_bias])


def order_pairs(x: Tensor, heads: int, rotation: Rotation | None) -> Tensor:
    """Make neighbours of the numbers that turn together, in the first `heads` heads of x (3·D or d, …).

    No result changes: attention multiplies queries by keys, number by number, in any order.
    """
    if rotation is None or rotation.layout == "pairs":
        return x
    width = rotation.cos.shape[-1]
    turned = x[: heads * width].unflatten(0, (heads, 2, width // 2)).transpose(1, 2).flatten(0, 2)
    return torch.cat([turned, x[heads * width :]])


def select_angles(table: Tensor, layout: str) -> Tensor:
    """Return the cosine or sine of every pair once: (T, d) or (H, T, d) → (1 or H, T, d/2), float32."""
    angles = table[..., : table.shape[-1] // 2] if layout == "halves" else table[..., ::2]
    return angles.detach().float().reshape(-1, *angles.shape[-2:]).contiguous()
