"""A look at the machine: versions, devices, extras, bf16 on the CPU."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import vitrail
from vitrail.system import processor


@dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    subject: str
    name: str
    state: str


def examine() -> list[Finding]:
    """Everything the doctor looks at. Runs bf16 products in child processes only, so it cannot die of them."""
    return [*_versions(), *_devices(), *_bf16(), *_extras()]


def _versions() -> Iterator[Finding]:
    yield Finding("version", "vitrail", vitrail.__version__)
    yield Finding("version", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for requirement, extra in _requirements():
        if extra is None:
            yield Finding("version", requirement, _version(requirement) or "missing")


def _devices() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding(
        "device", "cpu", f"{cores} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        capability = f"{properties.major}.{properties.minor}"
        yield Finding("device", f"cuda:{index}", f"{properties.name}, {memory:.0f} GiB, capability {capability}")
    if torch.backends.mps.is_available():
        yield Finding("device", "mps", "available")
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        yield Finding("device", "accelerator", "none that torch can use")


def _bf16() -> Iterator[Finding]:
    announced = "announced" if processor.amx_announced() else "not announced"
    yield Finding("bf16 on the cpu", "AMX", announced)
    chosen = os.environ.get(processor.VARIABLE)
    plain = processor.probe_bf16(cap=None)
    if plain.works:
        yield Finding("bf16 on the cpu", "products", "work")
    else:
        yield Finding("bf16 on the cpu", "products", f"do not work by themselves: {plain.detail}")
        capped = processor.probe_bf16(cap=processor.CAP)
        state = "work" if capped.works else f"do not work either: {capped.detail}; use float32"
        yield Finding("bf16 on the cpu", f"products with {processor.VARIABLE}={processor.CAP}", state)
        if capped.works:
            yield Finding("bf16 on the cpu", "what vitrail does", "sets that cap by itself before the first product")
    if chosen is not None and chosen != processor.CAP:
        yield Finding("bf16 on the cpu", processor.VARIABLE, f"{chosen}, set by you and left alone")


def _extras() -> Iterator[Finding]:
    extras: dict[str, list[str]] = {}
    for requirement, extra in _requirements():
        if extra is not None:
            extras.setdefault(extra, []).append(requirement)
    for extra, requirements in sorted(extras.items()):
        missing = [requirement for requirement in requirements if _version(requirement) is None]
        state = ", ".join(f"{requirement} {_version(requirement)}" for requirement in requirements)
        if missing:
            state = f'missing {", ".join(missing)}: pip install "vitrail[{extra}]", or ".[{extra}]" in a clone'
        yield Finding("extra", extra, state)


def _requirements() -> list[tuple[str, str | None]]:
    """(package, extra or None) from the installed metadata; nothing when run from a bare source tree."""
    try:
        lines = importlib.metadata.requires("vitrail") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", line)
        if name is not None:
            found.append((name.group(), extra.group(1) if extra else None))
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
