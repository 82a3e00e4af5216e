"""Multi-head self-attention, and what it knows of positions.

Shapes: B images, T tokens, D width, H heads, d = D/H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.architecture import VitArchitecture
from vitrail.model.norms import build_norm_if
from vitrail.model.positions import Grid, RelativePositions
from vitrail.model.relative_bias import RelativeBias, build_relative_bias
from vitrail.model.rotary import Rotation


@dataclass(frozen=True)
class Places:
    """Where the tokens of a forward pass are, for the attention of one block."""

    grid: Grid
    rotation: Rotation | None = None
    """Turns queries and keys."""
    bias: Tensor | None = None
    """(1, H, T, T), added to the logits: the same in all blocks."""


class SelfAttention(nn.Module):
    """Multi-head self-attention (MSA), computed by the fused kernel that fits the device."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        relative: RelativePositions | None = None,
        *,
        key_bias: bool = True,
        out_bias: bool = True,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        norm: nn.Module | None = None,
        relative_bias: RelativeBias | None = None,
    ) -> None:
        """Build it.

        Args:
            width: D.
            num_heads: H.
            qkv_bias: whether queries, keys and values have a bias.
            dropout: rate for attention weights.
            relative: the paper's relative positions.
            key_bias: with `qkv_bias`, whether keys have one too.
            out_bias: whether the output projection has a bias.
            q_norm: a norm over d on every query.
            k_norm: a norm over d on every key.
            norm: a norm over D on the mixed values, before the output projection.
            relative_bias: BEiT's relative positions.
        """
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias and key_bias)
        separate = qkv_bias and not key_bias
        self.q_bias = nn.Parameter(torch.empty(width)) if separate else None
        self.v_bias = nn.Parameter(torch.empty(width)) if separate else None
        self.q_norm, self.k_norm, self.norm = (part or nn.Identity() for part in (q_norm, k_norm, norm))
        self.out = nn.Linear(width, width, bias=out_bias)
        self.relative = relative
        self.relative_bias = relative_bias

    def split_heads(self, x: Tensor, places: Places | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D) → queries, keys and values, each (B, H, T, d), normed and turned."""
        qkv = self.qkv(x)
        if self.q_bias is not None and self.v_bias is not None:
            qkv = qkv + torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias]).to(qkv.dtype)
        q, k, v = qkv.unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)  # under autocast a norm returns float32
        if places is not None and places.rotation is not None:
            q, k = places.rotation(q), places.rotation(k)
        return q, k, v

    def compute_bias(self, q: Tensor, places: Places | None = None) -> Tensor | None:
        """Return what is added to the logits, (B or 1, H, T, T), if anything is."""
        if self.relative is not None:
            relative: Tensor = self.relative(q)
            return relative
        if self.relative_bias is not None:
            if places is None:
                raise ValueError("attention with a relative bias needs to know the grid of patches: give it places")
            bias: Tensor = self.relative_bias(places.grid)
            return bias.to(q.dtype)
        return None if places is None or places.bias is None else places.bias.to(q.dtype)

    def forward(self, x: Tensor, places: Places | None = None) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        q, k, v = self.split_heads(x, places)
        bias = self.compute_bias(q, places)
        y = F.scaled_dot_product_attention(q, k, v, bias, dropout_p=self.dropout if self.training else 0.0)
        mixed: Tensor = self.out(self.norm(y.transpose(1, 2).flatten(2)))
        return mixed

    def weights(self, x: Tensor, places: Places | None = None) -> Tensor:
        """(B, T, D) → (B, H, T, T): compute the attention weights, which the fused kernel of `forward` does not return.

        Rows are queries and sum to 1. They are float32 or wider, and without dropout.
        """
        q, k, _ = self.split_heads(x, places)
        logits: Tensor = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)  # scaled first: maps are large, queries small
        bias = self.compute_bias(q, places)
        if bias is not None:
            logits = logits + bias
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)


class RowAttention(SelfAttention):
    """Self-attention along the rows of a grid of patches: every row is a separate sequence."""

    def forward(self, x: Tensor, places: Places | None = None) -> Tensor:
        """(B, rows, columns, D) → the same."""
        y: Tensor = super().forward(x.flatten(0, 1), places).unflatten(0, x.shape[:2])
        return y

    def weights(self, x: Tensor, places: Places | None = None) -> Tensor:
        """(B, rows, columns, D) → (B · rows, H, columns, columns)."""
        return super().weights(x.flatten(0, 1), places)


def build_attention(a: VitArchitecture, grid: Grid) -> SelfAttention:
    """Build the attention of an encoder block for a grid of patches."""
    kind = RowAttention if a.block == "axial" else SelfAttention
    has_own_bias = a.position == "relative-bias" and a.position_at == "every-layer"
    return kind(
        a.width,
        a.num_heads,
        a.qkv_bias,
        a.attention_dropout,
        RelativePositions(grid, a.head_width, a.prefix) if a.position == "relative" else None,
        key_bias=a.key_bias,
        out_bias=a.out_bias,
        q_norm=build_norm_if(a.qk_norm, a, a.head_width),
        k_norm=build_norm_if(a.qk_norm, a, a.head_width),
        norm=build_norm_if(a.attention_norm, a),
        relative_bias=build_relative_bias(a, grid) if has_own_bias else None,
    )
