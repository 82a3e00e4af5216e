"""Devices: which one to use, what people call it, and how tensors get there.

Apple's GPU, `mps`, differs from the others in two ways. It has no float64: what needs that is computed on the CPU
(`float64_device`, `to_float64`). And a copy to it must be waited for, or it may read memory that is already used for
something else (pytorch issue 189690).
"""

from __future__ import annotations

import logging
import re
import warnings
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import ConfigError

log = logging.getLogger("vitrail")

NO_APPLE_MEMORY = "MPS backend out of memory"
"""Words of the RuntimeError that means that Apple's GPU has too little memory."""
_FALLS_BACK = re.compile(r"operator '([^']+)' is not currently supported on the MPS backend and will fall back")
_IS_MISSING = re.compile(r"operator '([^']+)' is not currently implemented for the MPS device")


def choose_device(device: str) -> torch.device:
    """Return the named device; for "auto" an NVIDIA GPU if there is one, else Apple's, else the CPU.

    Raises:
        ConfigError: torch does not know the device, this machine has none, or it is "meta", which has no memory.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    chosen = parse_device(device)
    if chosen.type == "meta":
        raise ConfigError("run.device = 'meta' has no memory to train in: give cpu, cuda, mps or auto")
    return chosen


def parse_device(device: torch.device | str) -> torch.device:
    """Return the named device, or raise a ConfigError if this machine does not have it."""
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device = {device!r}: give cpu, cuda, cuda:1, mps or meta") from None
    is_missing = {"cuda": not torch.cuda.is_available(), "mps": not torch.backends.mps.is_available()}
    if is_missing.get(parsed.type):
        raise ConfigError(f"device = {device!r}: torch sees no such device here; `vitrail doctor` tells which it sees")
    if parsed.type == "mps":
        _announce_fallbacks()
    return parsed


def device_name(device: torch.device) -> str:
    """Return the device's name for people: the model of the GPU, or "CPU"."""
    if device.type == "mps":
        return f"{_read_apple_name()} GPU"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _read_apple_name() -> str:
    """Return the name of Apple's chip, such as "Apple M2"; "Apple" where torch does not tell."""
    try:
        return str(torch.backends.mps.get_name()) or "Apple"
    except (AttributeError, RuntimeError):  # an earlier torch
        return "Apple"


def send_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to a device without waiting for the device's current work."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def can_copy_asynchronously(device: torch.device | str) -> bool:
    """Return whether a copy to a device may go on while the CPU does something else: to NVIDIA's GPUs alone."""
    return torch.device(device).type == "cuda"


def float64_device(device: torch.device | str) -> torch.device:
    """Return where float64 is computed for a device: on itself, or on the CPU for Apple's GPU, which has none."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "mps" else device


def to_float64(values: Tensor) -> Tensor:
    """Convert to float64, on the device that `float64_device` names."""
    return values.to(float64_device(values.device)).double()


def free_memory(device: torch.device) -> int | None:
    """Return the free memory of a GPU in bytes; None for the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return max(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory(), 0)
    return None


def explain_missing_operation(error: BaseException) -> str | None:
    """Return a sentence if Apple's GPU lacks an operation and torch may not compute it on the CPU; else None."""
    found = _IS_MISSING.search(str(error)) if isinstance(error, NotImplementedError) else None
    if found is None:
        return None
    return (
        f"Apple's GPU has no {found.group(1)}: import vitrail before torch, or set PYTORCH_ENABLE_MPS_FALLBACK=1 "
        "before Python starts, and the CPU computes it; or give device cpu (run.device=cpu for a training)"
    )


def _announce_fallbacks() -> None:
    """Replace torch's warning that an operation of Apple's GPU is computed on the CPU by a sentence in the log."""
    show = warnings.showwarning
    if getattr(show, "announces_fallbacks", False):
        return

    def show_or_log(message: Warning | str, *details: Any, **options: Any) -> None:
        found = _FALLS_BACK.search(str(message))
        if found is None:
            show(message, *details, **options)
        else:
            log.warning("Apple's GPU has no %s: the CPU computes it, which is slower", found.group(1))

    show_or_log.announces_fallbacks = True  # type: ignore[attr-defined]
    warnings.showwarning = show_or_log
