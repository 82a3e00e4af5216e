"""Devices: which one to use, what people call it, and how tensors get there."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.errors import ConfigError


def choose_device(device: str) -> torch.device:
    """Return the named device; for "auto" a GPU if there is one, else the CPU.

    Raises:
        ConfigError: torch does not know the device, this machine has none, or it is "meta", which has no memory.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = parse_device(device)
    if chosen.type == "meta":
        raise ConfigError("run.device = 'meta' has no memory to train in: give cpu, cuda or auto")
    return chosen


def parse_device(device: torch.device | str) -> torch.device:
    """Return the named device, or raise a ConfigError if this machine does not have it."""
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device = {device!r}: give cpu, cuda, cuda:1, mps or meta") from None
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device = {device!r}: torch sees no such device here; `vitrail doctor` tells which it sees")
    return parsed


def device_name(device: torch.device) -> str:
    """Return the device's name for people: the model of the GPU, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def send_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to a device without waiting for the device's current work."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
