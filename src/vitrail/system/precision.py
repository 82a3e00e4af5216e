"""The names of precisions, and the number format behind each."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.system import processor

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INFERENCE_PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "int8", "auto")
"""The words for every model that predicts: fp32 is exact, fp16 and fp8 are for NVIDIA's GPUs, int8 for CPUs, and auto
is the fastest that is close enough on this machine; on Apple's GPU that is fp32."""


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """Return the number format of matrix products for one of `PRECISIONS`, or for "auto" the one that suits the device.

    Raises:
        ConfigError: `name` is fp16 and the device is not an NVIDIA GPU, or bf16 on a Mac older than macOS 14.
    """
    if name == "auto":
        name = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if name == "fp16" and device.type != "cuda":
        raise ConfigError("precision fp16 needs an NVIDIA GPU: give bf16 or fp32")
    if name == "bf16" and device.type == "mps" and not torch.backends.mps.is_macos_or_newer(14, 0):
        raise ConfigError("precision bf16 on Apple's GPU needs macOS 14 or newer: give fp32")
    if name == "bf16" and device.type == "cpu":
        processor.prevent_amx_crash()
    return PRECISIONS[name]


def widen(values: Tensor) -> Tensor:
    """Return values as float32, in which losses are computed; float64 stays."""
    return values if values.dtype == torch.float64 else values.float()
