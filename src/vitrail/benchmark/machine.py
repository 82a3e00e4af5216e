"""The machine that a benchmark was on."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import vitrail
from vitrail.benchmark.peers import versions
from vitrail.system import processor


def describe_machine(device: torch.device, peers: Sequence[str]) -> dict[str, Any]:
    """What the numbers hold for: device, versions, commit. No names of hosts or people, no paths."""
    told: dict[str, Any] = {"device": processor_name(), "kind": device.type, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        told |= {"device": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return {
        **told,
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {
            "vitrail": vitrail.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **versions(["triton", *peers]),
        },
        "commit": commit(),
    }


def processor_name() -> str:
    """As the system tells it."""
    try:
        lines = processor.CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def commit() -> str | None:
    """Of the checkout that vitrail runs from, with `-dirty` where it was changed; None where it is installed."""
    root = Path(vitrail.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "--no-optional-locks", "-C", str(root)]
    command += ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return told or None
