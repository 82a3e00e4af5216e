"""From encoded tokens to the representation y, and from y to classes.

Shapes: B images, T tokens = prefix + N, D width, H heads, d = D/H, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.encoder import MlpBlock


class ClassPool(nn.Module):
    """y = the class token: equation 4."""

    def forward(self, z: Tensor) -> Tensor:
        """(B, T, D) → (B, D)."""
        return z[:, 0]


class AveragePool(nn.Module):
    """y = the mean of the patches; tokens before them are left out."""

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, z: Tensor) -> Tensor:
        """(B, T, D) → (B, D)."""
        return z[:, self.prefix :].mean(dim=1)


class ClassAveragePool(nn.Module):
    """y = the class token beside the mean of the patches."""

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, z: Tensor) -> Tensor:
        """(B, T, D) → (B, 2D)."""
        return torch.cat([z[:, 0], z[:, self.prefix :].mean(dim=1)], dim=1)


class DistilledPool(nn.Module):
    """y = the class token beside the distillation token, which is the first register."""

    def forward(self, z: Tensor) -> Tensor:
        """(B, T, D) → (B, 2D)."""
        return z[:, :2].flatten(1)


class AttentionPool(nn.Module):
    """y = what a learned query gathers from the patches by attention, refined by an MLP ("Scaling ViT")."""

    def __init__(self, width: int, num_heads: int, mlp_dim: int, norm: nn.Module, gelu: str, prefix: int) -> None:
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
        """(B, T, D) → (B, H, N): the attention of the query over the patches, which the kernel keeps to itself.

        Sums to 1; at least float32.
        """
        q = self.q(self.query).unflatten(1, (self.num_heads, -1))[0]  # H, d
        k = self.kv(z[:, self.prefix :]).unflatten(2, (2, self.num_heads, -1))[:, :, 0]  # B, N, H, d
        logits: Tensor = torch.einsum("hd,bnhd->bhn", q, k) * q.shape[-1] ** -0.5
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)


class MlpHead(nn.Module):
    """The pre-training head: one hidden layer with tanh, then a linear one."""

    def __init__(self, width: int, representation_size: int, num_classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, representation_size)
        self.linear = nn.Linear(representation_size, num_classes) if num_classes else nn.Identity()

    def forward(self, y: Tensor) -> Tensor:
        """(B, D) → (B, K), or (B, representation size) without classes."""
        logits: Tensor = self.linear(self.hidden(y).tanh())
        return logits


class DistilledHead(nn.Module):
    """A linear head for the class token and one for the distillation token; the logits are their mean (DeiT)."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, num_classes)
        self.distilled = nn.Linear(width, num_classes)

    def forward(self, y: Tensor) -> Tensor:
        """(B, 2D) → (B, K)."""
        first, second = y.chunk(2, dim=1)
        logits: Tensor = (self.linear(first) + self.distilled(second)) / 2
        return logits


def build_head(width: int, representation_size: int | None, num_classes: int) -> nn.Module:
    """tanh-MLP for pre-training, one linear layer for fine-tuning, nothing for no classes."""
    if representation_size is not None:
        return MlpHead(width, representation_size, num_classes)
    return nn.Linear(width, num_classes) if num_classes else nn.Identity()
