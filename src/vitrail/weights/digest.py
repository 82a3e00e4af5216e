"""A hash that identifies a model."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from vitrail.model.architecture import VitArchitecture
from vitrail.model.base import ImageModel

LATER_OPTIONS = ("position_resize",)
"""Options of the architecture that earlier versions did not have. At their defaults, which are what those versions did,
they are left out of the hash, so that unfinished runs go on."""


def compute_weights_digest(model: ImageModel) -> str:
    """Return a hash of the architecture, the preprocessing (but for `crop_rounding`) and the bytes of every tensor."""
    digest = hashlib.blake2b(digest_size=16)
    for config in (model.architecture, model.preprocessing):
        # Left out, so that unfinished runs go on whose weights were loaded before this option existed.
        facts = config.model_dump_json(exclude={"crop_rounding", *_find_default_options(config)})
        digest.update(f"{type(config).__name__} {facts}\0".encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(view_bytes(tensor))
    return digest.hexdigest()


def _find_default_options(config: object) -> set[str]:
    fields = VitArchitecture.model_fields if isinstance(config, VitArchitecture) else {}
    return {name for name in LATER_OPTIONS if name in fields and getattr(config, name) == fields[name].default}


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, row by row, without a copy if it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
