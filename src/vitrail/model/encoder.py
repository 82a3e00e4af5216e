"""The Transformer encoder: equations 2 and 3 in every block, and the norm of equation 4 at the end.

Shapes: B images, T tokens, D width, H heads, d = D/H.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vitrail.model.positions import RelativePositions


class QuickGELU(nn.Module):
    """x · sigmoid(1.702 x), the approximation that OpenAI's CLIP was trained with."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return x * torch.sigmoid(1.702 * x)


def build_gelu(form: str) -> nn.Module:
    """`tanh` as in the released code, `exact` as in timm and torchvision, `quick` as in CLIP."""
    return QuickGELU() if form == "quick" else nn.GELU(approximate="tanh" if form == "tanh" else "none")


def build_norm(kind: str, width: int, eps: float) -> nn.LayerNorm | nn.RMSNorm:
    """The norm over the last dimension."""
    return nn.LayerNorm(width, eps=eps) if kind == "layer" else nn.RMSNorm(width, eps=eps)


class SelfAttention(nn.Module):
    """Multi-head self-attention (MSA), computed by the fused kernel that fits the device."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        relative: RelativePositions | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.out = nn.Linear(width, width)
        self.relative = relative

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D) → queries, keys, values, each (B, H, T, d)."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        q, k, v = self.heads(x)
        bias = None if self.relative is None else self.relative(q)
        y = F.scaled_dot_product_attention(q, k, v, bias, dropout_p=self.dropout if self.training else 0.0)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed

    def weights(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, H, T, T): the attention that `forward` applies and its kernel keeps to itself.

        Rows are queries and sum to 1; at least float32; without dropout.
        """
        q, k, _ = self.heads(x)
        logits: Tensor = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)  # scaled first: maps are large, queries small
        if self.relative is not None:
            logits = logits + self.relative(q)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)


class RowAttention(SelfAttention):
    """Self-attention along the rows of a grid: every row is a sequence of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, rows, columns, D) → the same."""
        y: Tensor = super().forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return y

    def weights(self, x: Tensor) -> Tensor:
        """(B, rows, columns, D) → (B · rows, H, columns, columns)."""
        return super().weights(x.flatten(0, 1))


class MlpBlock(nn.Module):
    """D → mlp_dim → D with a GELU between, dropout after each."""

    def __init__(self, width: int, mlp_dim: int, gelu: str = "tanh", dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, mlp_dim)
        self.gelu = build_gelu(gelu)
        self.fc2 = nn.Linear(mlp_dim, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) → (…, D)."""
        x = self.dropout(self.gelu(self.fc1(x)))
        x = self.dropout(self.fc2(x))
        return x


class LayerScale(nn.Module):
    """A learned factor for each channel of a residual branch (CaiT, DeiT III, DINOv2)."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.factor = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) → (…, D)."""
        return x * self.factor


class StochasticDepth(nn.Module):
    """While training, drops a residual branch for whole images at random and scales up the rest."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """(B, …) → (B, …)."""
        if not self.training or self.rate == 0.0:
            return x
        keep = 1.0 - self.rate
        mask = x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(keep)
        return x * mask / keep

    def extra_repr(self) -> str:
        """The rate, where the model is printed."""
        return f"rate={self.rate:.3g}"


class EncoderBlock(nn.Module):
    """z' = MSA(LN(z)) + z, then z = MLP(LN(z')) + z': equations 2 and 3."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        mlp_dim: int,
        *,
        gelu: str = "tanh",
        norm: str = "layer",
        norm_eps: float = 1e-6,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        layer_scale: float | None = None,
        relative: RelativePositions | None = None,
        attention: type[SelfAttention] = SelfAttention,
    ) -> None:
        super().__init__()
        self.norm1 = build_norm(norm, width, norm_eps)
        self.attention = attention(width, num_heads, qkv_bias, attention_dropout, relative)
        self.dropout = nn.Dropout(dropout)
        self.scale1 = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)
        self.norm2 = build_norm(norm, width, norm_eps)
        self.mlp = MlpBlock(width, mlp_dim, gelu, dropout)
        self.scale2 = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)
        self.drop = StochasticDepth(stochastic_depth)

    def forward(self, z: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D), or a grid with a `RowAttention`."""
        z = z + self.drop(self.scale1(self.dropout(self.attention(self.norm1(z)))))
        z = z + self.drop(self.scale2(self.mlp(self.norm2(z))))
        return z


class AxialEncoderBlock(nn.Module):
    """Self-attention along rows + MLP, then along columns + MLP: two encoder blocks on a grid of patches."""

    def __init__(self, rows: EncoderBlock, columns: EncoderBlock) -> None:
        """Both attend by `RowAttention`; the second sees the grid turned."""
        super().__init__()
        self.rows = rows
        self.columns = columns

    def forward(self, z: Tensor) -> Tensor:
        """(B, rows, columns, D) → the same."""
        z = self.rows(z).transpose(1, 2)
        z = self.columns(z).transpose(1, 2)
        return z


class Encoder(nn.Module):
    """The blocks one after the other, then the last norm."""

    def __init__(self, blocks: Sequence[EncoderBlock | AxialEncoderBlock], norm: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.gradient_checkpointing = False

    def forward(self, z: Tensor, positions: Sequence[Tensor] = ()) -> Tensor:
        """(B, T, D) → (B, T, D).

        `positions`, where given: a table for each block, added before it. The first block's was added to the input.
        """
        for index, block in enumerate(self.blocks):
            if positions and index > 0:
                z = z + positions[index]
            if self.gradient_checkpointing and self.training:
                z = checkpoint(block, z, use_reentrant=False)
            else:
                z = block(z)
        z = self.norm(z)
        return z
