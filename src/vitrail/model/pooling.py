"""Pooling: from the encoded tokens to the representation y of an image (equation 4).

To add a pooling: write a class here and its case in `build_pool`; add its name to `VitArchitecture.pool`, to `READS` in
`inspection/measure/attention.py` (what its attention reads), and to what the files in `weights/formats/` refuse. If
it has parameters, `initialise.py` and `cost.py` need them too.
Shapes: B images, T tokens = prefix + N patches, D width, H heads, d = D/H.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.architecture import VitArchitecture
from vitrail.model.mlp import MlpBlock
from vitrail.model.norms import build_norm


def build_pool(a: VitArchitecture) -> nn.Module:
    """Build the module (B, T, D) → (B, D) that `architecture.pool` names."""
    match a.pool:
        case "class":
            return ClassPool()
        case "average":
            return AveragePool(a.prefix)
        case "class+average":
            return ClassAveragePool(a.prefix)
        case "distilled":
            return DistilledPool()
        case "attention":
            heads, mlp_dim = a.pool_heads or a.num_heads, a.pool_mlp_dim or a.mlp_dim
            return AttentionPool(a.width, heads, mlp_dim, build_norm(a), a.gelu, 0 if a.pool_prefix else a.prefix)


class ClassPool(nn.Module):
    """y is the class token: equation 4."""

    def forward(self, z: Tensor) -> Tensor:
        """(B, T, D) → (B, D)."""
        return z[:, 0]


class AveragePool(nn.Module):
    """y is the mean of the patches; the tokens before them are not read."""

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, z: Tensor) -> Tensor:
        """(B, T, D) → (B, D)."""
        return z[:, self.prefix :].mean(dim=1)


class ClassAveragePool(nn.Module):
    """y is the class token and the mean of the patches, concatenated."""

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, z: Tensor) -> Tensor:
        """(B, T, D) → (B, 2D)."""
        return torch.cat([z[:, 0], z[:, self.prefix :].mean(dim=1)], dim=1)


class DistilledPool(nn.Module):
    """y is the class token and the distillation token (the first register), concatenated."""

    def forward(self, z: Tensor) -> Tensor:
        """(B, T, D) → (B, 2D)."""
        return z[:, :2].flatten(1)


class AttentionPool(nn.Module):
    """y is the attention of a learned query over the patches, followed by an MLP ("Scaling ViT")."""

    def __init__(self, width: int, num_heads: int, mlp_dim: int, norm: nn.Module, gelu: str, prefix: int) -> None:
        """Build it; the first `prefix` tokens are not read."""
        super().__init__()
        self.num_heads = num_heads
        self.prefix = prefix
        self.query = nn.Parameter(torch.empty(1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.norm = norm
        self.mlp = MlpBlock(width, mlp_dim, gelu)

    def forward(self, z: Tensor) -> Tensor:
        """(B, T, D) → (B, D)."""
        q = self.q(self.query).unflatten(1, (self.num_heads, -1)).transpose(0, 1)  # H, 1, d
        k, v = self.kv(z[:, self.prefix :]).unflatten(2, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q.expand(z.shape[0], -1, -1, -1), k, v)  # B, H, 1, d
        y = self.out(y.flatten(1))
        refined: Tensor = y + self.mlp(self.norm(y))
        return refined

    def weights(self, z: Tensor) -> Tensor:
        """(B, T, D) → (B, H, N): compute the attention weights of the query, which the fused kernel does not return.

        They sum to 1 over the tokens that are read, the patches or all T, and are float32 or wider.
        """
        q = self.q(self.query).unflatten(1, (self.num_heads, -1))[0]  # H, d
        k = self.kv(z[:, self.prefix :]).unflatten(2, (2, self.num_heads, -1))[:, :, 0]  # B, N, H, d
        logits: Tensor = torch.einsum("hd,bnhd->bhn", q, k) * q.shape[-1] ** -0.5
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)
