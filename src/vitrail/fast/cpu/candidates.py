"""A model's embedding on a CPU, in each of the precisions there are.

fp32 packs its dense layers; bf16 does the same in half the bytes, where the processor can; int8 has an encoder of its
own (int8.py). All leave out of the last block what nobody reads (last_block.py).
"""

from __future__ import annotations

import copy
import functools
import os

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError, NotApplicableError, did_you_mean
from vitrail.fast.cpu.int8 import int8_embedder
from vitrail.fast.cpu.packed import pack
from vitrail.fast.last_block import shorten
from vitrail.model.base import ImageModel
from vitrail.system import processor

CPU_PRECISIONS = ("fp32", "bf16", "int8")


class PackedEmbedder(nn.Module):
    """Images → y by a copy of a model, packed. It can be used and no more: not trained, saved, moved or converted."""

    def __init__(self, model: ImageModel, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.model: ImageModel = copy.deepcopy(model, {id(model.head): nn.Identity()}).to(dtype).eval()
        shorten(self.model)
        pack(self.model)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) float32, normalised → (B, D) float32."""
        return self.model.embed(images.to(self.dtype)).float()


def cpu_embedder(model: ImageModel, precision: str) -> nn.Module:
    """Images (B, C, H, W), normalised float32 → y (B, D) float32, as fast as this machine can; `model` stays as it is.

    A NotApplicableError says why where a model, or this machine, has no such precision.
    """
    if precision not in CPU_PRECISIONS:
        hint = did_you_mean(precision, CPU_PRECISIONS)
        raise ConfigError(f"no precision {precision!r} on a CPU: use one of {', '.join(CPU_PRECISIONS)}{hint}")
    weight = next(model.parameters())
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise NotApplicableError(
            f"embedders for a CPU are made of a float32 model that is there, not of {weight.dtype} on {weight.device}: "
            "give model.float().cpu()"
        )
    if precision == "int8":
        return int8_embedder(model)
    if precision == "bf16":
        _refuse_deadly_bf16()
        return PackedEmbedder(model, torch.bfloat16)
    return PackedEmbedder(model, torch.float32)


@functools.cache
def _bf16_products() -> processor.ProbeResult:
    return processor.probe_bf16(cap=os.environ.get(processor.VARIABLE))


def _refuse_deadly_bf16() -> None:
    """A child process tries first: on some machines the first bf16 product is the last."""
    found = _bf16_products()
    if not found.works:
        raise NotApplicableError(f"bf16 products do not work on this machine ({found.detail}): use --precision fp32")
