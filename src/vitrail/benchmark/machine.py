"""Describe the machine that a benchmark runs on."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

import vitrail
from vitrail.system import processor
from vitrail.system.checkout import read_commit as read_commit


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the device, versions and commit of a measurement, with no names of hosts or people and no paths."""
    machine: dict[str, Any] = {"device": read_processor_name(), "kind": device.type, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {"device": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return {
        **machine,
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {
            "vitrail": vitrail.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **read_versions(["triton"]),
        },
        "commit": read_commit(),
    }


def read_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    versions = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def read_processor_name() -> str:
    """Return the processor's name, as the system gives it."""
    try:
        lines = processor.CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
