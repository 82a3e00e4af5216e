"""A hash that identifies a model."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from vitrail.model.base import ImageModel


def compute_weights_digest(model: ImageModel) -> str:
    """Return a hash of the architecture, the preprocessing (but for `crop_rounding`) and the bytes of every tensor."""
    digest = hashlib.blake2b(digest_size=16)
    for config in (model.architecture, model.preprocessing):
        # Left out, so that unfinished runs go on whose weights were loaded before this option existed.
        facts = config.model_dump_json(exclude={"crop_rounding"})
        digest.update(f"{type(config).__name__} {facts}\0".encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(view_bytes(tensor))
    return digest.hexdigest()


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, row by row, without a copy if it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
