"""A hash that identifies a model."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from vitrail.model.architecture import VitArchitecture
from vitrail.model.base import ImageModel

LATER_OPTIONS = (
    *("rotary", "mlp", "norm_at", "final_norm", "patch_norm", "qk_norm", "attention_norm", "mlp_norm"),
    *("key_bias", "out_bias", "mlp_bias", "pool_heads", "pool_mlp_dim", "pool_prefix", "position_resize"),
)
"""Options of the architecture that earlier versions did not have. At their defaults, which are what those versions did,
they are left out of the hash, so that unfinished runs go on."""


def compute_weights_digest(model: ImageModel) -> str:
    """Return a hash of the architecture, the preprocessing (but for `crop_rounding`) and the bytes of every tensor."""
    digest = hashlib.blake2b(digest_size=16)
    # Left out, so that unfinished runs go on whose weights were loaded before these options existed.
    for config, later in ((model.architecture, _find_later_options(model)), (model.preprocessing, {"crop_rounding"})):
        facts = config.model_dump_json(exclude=later)
        digest.update(f"{type(config).__name__} {facts}\0".encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(view_bytes(tensor))
    return digest.hexdigest()


def _find_later_options(model: ImageModel) -> set[str]:
    """Return the later options that change nothing in this model: those at their defaults, and, if images have the
    model's own size, how positions are resized."""
    a = model.architecture
    if not isinstance(a, VitArchitecture):
        return set()
    unchanged = {name for name in LATER_OPTIONS if getattr(a, name) == VitArchitecture.model_fields[name].default}
    return unchanged | ({"position_resize"} if model.preprocessing.image_size == a.image_size else set())


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, row by row, without a copy if it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
