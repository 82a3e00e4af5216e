"""Embedders for a CPU (images → y), one for each precision: fp32, bf16, int8.

fp32 and bf16 pack the dense layers (packed.py); int8 has an encoder of its own (int8.py), and quantised layers for
blocks that this does not know (int8_layers.py). Plain blocks compute only the tokens that are read in the last of them
(last_block.py).
"""

from __future__ import annotations

import copy
import functools
import os

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError, NotApplicableError, did_you_mean
from vitrail.fast.cpu.int8 import create_int8_embedder, find_obstacle
from vitrail.fast.cpu.int8_layers import create_int8_layers_embedder
from vitrail.fast.cpu.packed import pack_layers
from vitrail.fast.last_block import shorten_last_block
from vitrail.model.base import ImageModel
from vitrail.model.vit import VisionTransformer
from vitrail.system import processor

CPU_PRECISIONS = ("fp32", "bf16", "int8")


class PackedEmbedder(nn.Module):
    """Images → y by a packed copy of a model. It cannot be trained, saved, moved or converted."""

    def __init__(self, model: ImageModel, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.model: ImageModel = copy.deepcopy(model, {id(model.head): nn.Identity()}).to(dtype).eval()
        shorten_last_block(self.model)
        pack_layers(self.model)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) float32, normalised → (B, D) float32."""
        return self.model.embed(images.to(self.dtype)).float()


def create_cpu_embedder(model: ImageModel, precision: str) -> nn.Module:
    """Make the fastest embedder of a precision for this CPU. `model` is not changed.

    Args:
        model: A float32 model on the CPU.
        precision: One of `CPU_PRECISIONS`.

    Returns:
        A module: normalised float32 images (B, C, H, W) → y (B, D), float32.

    Raises:
        ConfigError: The precision is unknown.
        NotApplicableError: The model, or this machine, does not support the precision.
    """
    if precision not in CPU_PRECISIONS:
        hint = did_you_mean(precision, CPU_PRECISIONS)
        raise ConfigError(f"no precision {precision!r} on a CPU: use one of {', '.join(CPU_PRECISIONS)}{hint}")
    weight = next(model.parameters())
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise NotApplicableError(
            f"a CPU embedder needs a float32 model on the CPU, not {weight.dtype} on {weight.device}: "
            "give model.float().cpu()"
        )
    if precision == "int8":
        has_other_parts = isinstance(model, VisionTransformer) and find_obstacle(model)
        return create_int8_layers_embedder(model) if has_other_parts else create_int8_embedder(model)
    if precision == "bf16":
        _check_bf16()
        return PackedEmbedder(model, torch.bfloat16)
    return PackedEmbedder(model, torch.float32)


@functools.cache
def _probe_bf16() -> processor.ProbeResult:
    return processor.probe_bf16(cap=os.environ.get(processor.ISA_VARIABLE))


def _check_bf16() -> None:
    """Try a bf16 product in a child process: on some machines it kills the process."""
    probe = _probe_bf16()
    if not probe.works:
        raise NotApplicableError(f"bf16 products do not work on this machine ({probe.detail}): use --precision fp32")
