"""Packed dense layers for a CPU: weights are stored in the order in which oneDNN reads them, and a GELU is computed
while the output of its product is still in the cache.

A torch.nn.Linear stores its weight as it was saved, and every product reorders it. Packed layers add up the same
products in another order: a packed model is as far from the exact result as the plain one (about 1e-6 in float32), but
not equal to it bit for bit. It is for inference: it cannot be trained, saved, moved or converted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitrail.model.mlp import MlpBlock
from vitrail.model.timm_model import TimmModel

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest allowed difference between a packed layer and the plain one, as a share of the largest output, by dtype."""


class PackedLinear(nn.Module):
    """x · weightᵀ + bias, then optionally a GELU of the form "tanh" or "none" (torch's names)."""

    def __init__(self, layer: nn.Linear, gelu: str | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features, self.gelu = layer.in_features, layer.out_features, gelu
        operators: Any = torch.ops.mkldnn
        self._multiply = operators._linear_pointwise
        self._weight: Tensor = operators._reorder_linear_weight(layer.weight.detach())
        self._activation: tuple[Any, ...] = ("none", [], "") if gelu is None else ("gelu", [], gelu)
        self._bias = None if layer.bias is None else layer.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) → (…, out_features)."""
        y: Tensor = self._multiply(x, self._weight, self._bias, *self._activation)
        return y

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}" + (f", GELU {self.gelu}" if self.gelu else "")


@torch.inference_mode()
def pack_layers(model: nn.Module) -> int:
    """Replace the dense layers of a model by packed ones, in place, and return how many were replaced.

    Only float32 and bf16 layers on a CPU are replaced, and only where the packed layer gives the same result.
    """
    if isinstance(model, TimmModel):  # some of timm's networks read the weights of their layers themselves
        return 0
    count = 0
    for block in [module for module in model.modules() if isinstance(module, MlpBlock)]:
        if isinstance(block.gelu, nn.GELU) and (packed := _pack_layer(block.fc1, block.gelu.approximate)) is not None:
            block.fc1, block.gelu = packed, nn.Identity()  # type: ignore[assignment]
            count += 1
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and (packed := _pack_layer(child)) is not None:
                setattr(parent, name, packed)
                count += 1
    return count


def _pack_layer(layer: nn.Linear, gelu: str | None = None) -> PackedLinear | None:
    """Return the packed layer; None if this layer, or this torch, does not support it."""
    weight = layer.weight
    if weight.dtype not in CLOSE or weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    trial = torch.linspace(-1, 1, 3 * layer.in_features, dtype=weight.dtype).view(3, -1)
    plain = layer(trial) if gelu is None else nn.functional.gelu(layer(trial), approximate=gelu)
    try:
        packed = PackedLinear(layer, gelu)
        difference = (packed(trial) - plain).abs().max()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # the operators are not torch's public ones
        return None
    return packed if difference <= CLOSE[weight.dtype] * plain.abs().max() else None
