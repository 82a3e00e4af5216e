"""The Transformer encoder: equations 2 (attention) and 3 (MLP) in every block, and the norm of equation 4 at the end.

Shapes: B images, T tokens, D width, H heads, d = D/H.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.model.architecture import VitArchitecture
from vitrail.model.attention import Places, build_attention
from vitrail.model.mlp import build_mlp
from vitrail.model.norms import build_norm, build_norm_if
from vitrail.model.positions import Grid


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
        self.norm1 = build_norm(a)
        self.attention = build_attention(a, grid)
        self.dropout = nn.Dropout(a.dropout)
        self.scale1 = nn.Identity() if a.layer_scale is None else LayerScale(a.width, a.layer_scale)
        self.norm2 = build_norm(a)
        self.mlp = build_mlp(a)
        self.scale2 = nn.Identity() if a.layer_scale is None else LayerScale(a.width, a.layer_scale)
        self.drop = StochasticDepth(a.stochastic_depth * index / max(a.depth - 1, 1))

    def forward(self, z: Tensor, places: Places | None = None) -> Tensor:
        """(B, T, D) → (B, T, D); with a `RowAttention`, (B, rows, columns, D) → the same."""
        z = z + self.drop(self.scale1(self.dropout(self.attention(self.norm1(z), places))))  # equation 2
        z = z + self.drop(self.scale2(self.mlp(self.norm2(z))))  # equation 3
        return z


class PostNormBlock(EncoderBlock):
    """z' = LN(MSA(z)) + z, then z = LN(MLP(z')) + z': the norms stand behind the layers."""

    def forward(self, z: Tensor, places: Places | None = None) -> Tensor:
        """(B, T, D) → (B, T, D); with a `RowAttention`, (B, rows, columns, D) → the same."""
        z = z + self.drop(self.scale1(self.norm1(self.dropout(self.attention(z, places)))))
        z = z + self.drop(self.scale2(self.norm2(self.mlp(z))))
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

    def forward(self, z: Tensor, positions: Sequence[Tensor] = (), places: Sequence[Places] = ()) -> Tensor:
        """(B, T, D) → (B, T, D).

        Args:
            z: the embedded tokens.
            positions: one table for each block, added before it; the first was already added to the input.
            places: where the tokens are, for the attention of each block, if it needs to know.
        """
        for index, block in enumerate(self.blocks):
            if positions and index > 0:
                z = z + positions[index]
            arguments = (z, *places[index : index + 1])
            if self.gradient_checkpointing and self.training:
                z = checkpoint(block, *arguments, use_reentrant=False)
            else:
                z = block(*arguments)
        z = self.norm(z)
        return z


def build_encoder(a: VitArchitecture, grid: Grid) -> Encoder:
    """Build `depth` blocks, plain or axial, and the last norm (left out if it acts after pooling, or nowhere)."""
    kind = PostNormBlock if a.norm_at == "after" else EncoderBlock

    def build_block(index: int) -> EncoderBlock | AxialEncoderBlock:
        block = kind(a, index, grid)
        return AxialEncoderBlock(block, kind(a, index, grid)) if a.block == "axial" else block

    return Encoder([build_block(i) for i in range(a.depth)], build_norm_if(a.final_norm and not a.norm_after_pool, a))
