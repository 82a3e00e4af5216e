"""Dense layers on a CPU, packed: kernels lie in the order that oneDNN's product reads them in, and the GELU behind a
product is computed while its output is still in the cache.

A torch.nn.Linear hands its kernel over as it was saved, and each product reorders it anew. The products are the same,
added up in another order: a packed model is as far from the exact result as the plain one (about 1e-6 in float32), not
equal to it bit for bit. It can be used and no more: not trained, saved, moved or converted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitrail.model.encoder import MlpBlock
from vitrail.model.timm_model import TimmModel

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""How far, of the largest output, a packed layer may be from the plain one, or the plain one stays; by type."""


class PackedLinear(nn.Module):
    """x · kernelᵀ + bias, then a GELU if one is given: "tanh" or "none", as torch names its forms."""

    def __init__(self, layer: nn.Linear, gelu: str | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features, self.gelu = layer.in_features, layer.out_features, gelu
        operators: Any = torch.ops.mkldnn
        self._multiply = operators._linear_pointwise
        self._kernel: Tensor = operators._reorder_linear_weight(layer.weight.detach())
        self._behind: tuple[Any, ...] = ("none", [], "") if gelu is None else ("gelu", [], gelu)
        self._bias = None if layer.bias is None else layer.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) → (…, out_features)."""
        y: Tensor = self._multiply(x, self._kernel, self._bias, *self._behind)
        return y

    def extra_repr(self) -> str:
        """The sizes, where the model is printed."""
        return f"{self.in_features} → {self.out_features}" + (f", GELU {self.gelu}" if self.gelu else "")


@torch.inference_mode()
def pack(model: nn.Module) -> int:
    """Pack the dense layers of a model in place, those that can be: float32 and bf16 on a CPU. How many were."""
    if isinstance(model, TimmModel):  # some of timm's read the weights of their layers themselves
        return 0
    count = 0
    for block in [module for module in model.modules() if isinstance(module, MlpBlock)]:
        if isinstance(block.gelu, nn.GELU) and (found := _packed(block.fc1, block.gelu.approximate)) is not None:
            block.fc1, block.gelu = found, nn.Identity()  # type: ignore[assignment]
            count += 1
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and (found := _packed(child)) is not None:
                setattr(parent, name, found)
                count += 1
    return count


def _packed(layer: nn.Linear, gelu: str | None = None) -> PackedLinear | None:
    """None where this layer, or this torch, does not lend itself to it."""
    weight = layer.weight
    if weight.dtype not in CLOSE or weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    trial = torch.linspace(-1, 1, 3 * layer.in_features, dtype=weight.dtype).view(3, -1)
    plain = layer(trial) if gelu is None else nn.functional.gelu(layer(trial), approximate=gelu)
    try:
        found = PackedLinear(layer, gelu)
        difference = (found(trial) - plain).abs().max()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # the operators are not torch's public ones
        return None
    return found if difference <= CLOSE[weight.dtype] * plain.abs().max() else None
