"""The norms of a Vision Transformer: LayerNorm or RMSNorm, over the last dimension."""

from __future__ import annotations

from torch import Tensor, nn

from vitrail.model.architecture import VitArchitecture


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, computed in the number format of its weight, as autocast does for LayerNorm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def build_norm(a: VitArchitecture, width: int | None = None) -> nn.LayerNorm | RMSNorm:
    """Build a norm over the last dimension, whose size is `width`; D, the width of a token, if None."""
    size = a.width if width is None else width
    return nn.LayerNorm(size, eps=a.norm_eps) if a.norm == "layer" else RMSNorm(size, eps=a.norm_eps)


def build_norm_if(wanted: bool, a: VitArchitecture, width: int | None = None) -> nn.Module:
    """Build a norm if it is wanted, else the identity."""
    return build_norm(a, width) if wanted else nn.Identity()
