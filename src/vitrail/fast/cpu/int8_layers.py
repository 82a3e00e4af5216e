"""Int8 on a CPU for encoders of any kind: the model's own forward pass with quantised dense layers in its blocks.

`int8.py` computes plain blocks faster, because its numbers stay bytes from one product to the next. It does not know
rotary positions, SwiGLU and others; here every dense layer quantises its input, multiplies, and returns float32.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from vitrail.fast.cpu.int8 import check_int8_product, check_int8_weights, quantise_weight
from vitrail.fast.cpu.int8_operations import (
    Int8Operations,
    TorchOperations,
    choose_operations,
    quantise_rows,
)
from vitrail.fast.cpu.packed import pack_layers
from vitrail.model.base import ImageModel
from vitrail.model.vit import VisionTransformer


class Int8Layer(nn.Module):
    """x · weightᵀ + bias with an int8 weight, and with a scale for each token that is found at run time."""

    def __init__(self, layer: nn.Linear, operations: Int8Operations) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._multiply = operations.prepare_product(quantise_weight(layer.weight, layer.bias), torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) → (…, out_features), float32."""
        rows = quantise_rows(x.reshape(-1, self.in_features))
        return self._multiply(rows).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}"


class Int8LayersEmbedder(nn.Module):
    """Images → y by a copy of a model with int8 layers. It cannot be trained, saved, moved or converted."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.model: VisionTransformer = copy.deepcopy(model, {id(model.head): nn.Identity()}).eval()
        for part in list(self.model.encoder.blocks.modules()):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, Int8Layer(child, _choose_operations(child)))
        for outside in (self.model.patch_embed, self.model.pool):
            pack_layers(outside)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W), normalised → (B, D)."""
        return self.model.embed(images)


def create_int8_layers_embedder(model: ImageModel) -> Int8LayersEmbedder:
    """Make an embedder with int8 layers of a float32 Vision Transformer on the CPU.

    Raises:
        NotApplicableError: The model is of another kind, or this processor has no exact int8 products.
    """
    return Int8LayersEmbedder(check_int8_weights(model))


def _choose_operations(layer: nn.Linear) -> Int8Operations:
    operations = choose_operations(layer.in_features, layer.out_features, heads=1)
    if isinstance(operations, TorchOperations):
        check_int8_product()
    return operations
