"""What tells one model from another."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from vitrail.model.base import ImageModel


def compute_weights_digest(model: ImageModel) -> str:
    """Of its architecture, its preprocessing and the bytes of every tensor."""
    told = hashlib.blake2b(digest_size=16)
    for config in (model.architecture, model.preprocessing):
        told.update(f"{type(config).__name__} {config.model_dump_json()}\0".encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        told.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        told.update(view_bytes(tensor))
    return told.hexdigest()


def view_bytes(tensor: Tensor) -> memoryview:
    """As they lie in memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
