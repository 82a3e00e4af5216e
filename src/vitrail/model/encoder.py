"""The Transformer encoder: equations 2 (attention) and 3 (MLP) in every block, and the norm of equation 4 at the end.

Shapes: B images, T tokens, D width, H heads, d = D/H.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vitrail.model.architecture import VitArchitecture
from vitrail.model.positions import Grid, RelativePositions


class QuickGELU(nn.Module):
    """x · sigmoid(1.702 x), the approximation of GELU that OpenAI's CLIP was trained with."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def build_gelu(form: str) -> nn.Module:
    """Build the GELU `tanh` (the released code), `exact` (timm, torchvision) or `quick` (CLIP)."""
    return QuickGELU() if form == "quick" else nn.GELU(approximate="tanh" if form == "tanh" else "none")


def build_norm(a: VitArchitecture) -> nn.LayerNorm | nn.RMSNorm:
    """Build a norm over the last dimension, which is the width D."""
    return nn.LayerNorm(a.width, eps=a.norm_eps) if a.norm == "layer" else nn.RMSNorm(a.width, eps=a.norm_eps)


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

    def split_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D) → queries, keys and values, each (B, H, T, d)."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        q, k, v = self.split_heads(x)
        bias = None if self.relative is None else self.relative(q)
        y = F.scaled_dot_product_attention(q, k, v, bias, dropout_p=self.dropout if self.training else 0.0)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed

    def weights(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, H, T, T): compute the attention weights, which the fused kernel of `forward` does not return.

        Rows are queries and sum to 1. They are float32 or wider, and without dropout.
        """
        q, k, _ = self.split_heads(x)
        logits: Tensor = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)  # scaled first: maps are large, queries small
        if self.relative is not None:
            logits = logits + self.relative(q)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)


class RowAttention(SelfAttention):
    """Self-attention along the rows of a grid of patches: every row is a separate sequence."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, rows, columns, D) → the same."""
        y: Tensor = super().forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return y

    def weights(self, x: Tensor) -> Tensor:
        """(B, rows, columns, D) → (B · rows, H, columns, columns)."""
        return super().weights(x.flatten(0, 1))


class MlpBlock(nn.Module):
    """The MLP of equation 3: D → mlp_dim → D with a GELU between, and dropout after each layer."""

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
    """While training, drop a residual branch for randomly chosen images and scale it up for the others."""

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
        return f"rate={self.rate:.3g}"


class EncoderBlock(nn.Module):
    """z' = MSA(LN(z)) + z (equation 2), then z = MLP(LN(z')) + z' (equation 3)."""

    def __init__(self, a: VitArchitecture, index: int, grid: Grid) -> None:
        """Build block `index` of an encoder for a grid of patches; stochastic depth grows linearly with the index."""
        super().__init__()
        relative = RelativePositions(grid, a.width // a.num_heads, a.prefix) if a.position == "relative" else None
        attention = RowAttention if a.block == "axial" else SelfAttention
        self.norm1 = build_norm(a)
        self.attention = attention(a.width, a.num_heads, a.qkv_bias, a.attention_dropout, relative)
        self.dropout = nn.Dropout(a.dropout)
        self.scale1 = nn.Identity() if a.layer_scale is None else LayerScale(a.width, a.layer_scale)
        self.norm2 = build_norm(a)
        self.mlp = MlpBlock(a.width, a.mlp_dim, a.gelu, a.dropout)
        self.scale2 = nn.Identity() if a.layer_scale is None else LayerScale(a.width, a.layer_scale)
        self.drop = StochasticDepth(a.stochastic_depth * index / max(a.depth - 1, 1))

    def forward(self, z: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D); with a `RowAttention`, (B, rows, columns, D) → the same."""
        z = z + self.drop(self.scale1(self.dropout(self.attention(self.norm1(z)))))  # equation 2
        z = z + self.drop(self.scale2(self.mlp(self.norm2(z))))  # equation 3
        return z


class AxialEncoderBlock(nn.Module):
    """Two encoder blocks on a grid of patches: attention along rows and an MLP, then along columns and an MLP."""

    def __init__(self, rows: EncoderBlock, columns: EncoderBlock) -> None:
        super().__init__()
        self.rows = rows
        self.columns = columns

    def forward(self, z: Tensor) -> Tensor:
        """(B, rows, columns, D) → the same."""
        z = self.rows(z).transpose(1, 2)
        z = self.columns(z).transpose(1, 2)  # transposed, columns are rows
        return z


class Encoder(nn.Module):
    """The blocks one after the other, then the norm of equation 4."""

    def __init__(self, blocks: Sequence[EncoderBlock | AxialEncoderBlock], norm: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.gradient_checkpointing = False

    def forward(self, z: Tensor, positions: Sequence[Tensor] = ()) -> Tensor:
        """(B, T, D) → (B, T, D).

        Args:
            z: the embedded tokens.
            positions: one table for each block, added before it; the first was already added to the input.
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


def build_encoder(a: VitArchitecture, grid: Grid) -> Encoder:
    """Build `depth` blocks, plain or axial, and the last norm (left out if it acts after pooling)."""

    def build_block(index: int) -> EncoderBlock | AxialEncoderBlock:
        block = EncoderBlock(a, index, grid)
        return AxialEncoderBlock(block, EncoderBlock(a, index, grid)) if a.block == "axial" else block

    return Encoder([build_block(i) for i in range(a.depth)], nn.Identity() if a.norm_after_pool else build_norm(a))
