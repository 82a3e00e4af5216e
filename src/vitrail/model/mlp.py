"""The MLP of equation 3, with a GELU or as SwiGLU.

Shapes: D width, M the hidden layer's width (`mlp_dim`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.architecture import VitArchitecture
from vitrail.model.norms import build_norm_if


class QuickGELU(nn.Module):
    """x · sigmoid(1.702 x), the approximation of GELU that OpenAI's CLIP was trained with."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def build_gelu(form: str) -> nn.Module:
    """Build the GELU `tanh` (the released code), `exact` (timm, torchvision) or `quick` (CLIP)."""
    return QuickGELU() if form == "quick" else nn.GELU(approximate="tanh" if form == "tanh" else "none")


class MlpBlock(nn.Module):
    """The MLP of equation 3: D → M → D with a GELU between, and dropout after each layer."""

    def __init__(
        self,
        width: int,
        mlp_dim: int,
        gelu: str = "tanh",
        dropout: float = 0.0,
        bias: bool = True,
        norm: nn.Module | None = None,
    ) -> None:
        """Build it; `norm` acts on the hidden layer."""
        super().__init__()
        self.fc1 = nn.Linear(width, mlp_dim, bias=bias)
        self.gelu = build_gelu(gelu)
        self.norm = norm or nn.Identity()
        self.fc2 = nn.Linear(mlp_dim, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) → (…, D)."""
        x = self.norm(self.dropout(self.gelu(self.fc1(x))))
        x = self.dropout(self.fc2(x))
        return x


class SwigluBlock(nn.Module):
    """fc2(silu(gate) · value), where fc1 makes gate and value, M each, the gate first (arXiv 2002.05202)."""

    def __init__(
        self, width: int, mlp_dim: int, dropout: float = 0.0, bias: bool = True, norm: nn.Module | None = None
    ) -> None:
        """Build it; `norm` acts on the hidden layer."""
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * mlp_dim, bias=bias)
        self.norm = norm or nn.Identity()
        self.fc2 = nn.Linear(mlp_dim, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) → (…, D)."""
        gate, value = self.fc1(x).chunk(2, dim=-1)
        x = self.norm(self.dropout(F.silu(gate) * value))
        x = self.dropout(self.fc2(x))
        return x


def build_mlp(a: VitArchitecture) -> MlpBlock | SwigluBlock:
    """Build the MLP of an encoder block."""
    norm = build_norm_if(a.mlp_norm, a, a.mlp_dim)
    if a.mlp == "swiglu":
        return SwigluBlock(a.width, a.mlp_dim, a.dropout, a.mlp_bias, norm)
    return MlpBlock(a.width, a.mlp_dim, a.gelu, a.dropout, a.mlp_bias, norm)
