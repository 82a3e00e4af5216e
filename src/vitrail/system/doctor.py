"""Examine this machine: versions, devices, extras, and bf16 on the CPU."""

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
from vitrail.system.device import device_name


@dataclass(frozen=True)
class MachineFinding:
    """One line of the report of `vitrail doctor`; the fields are the keys of its JSON."""

    subject: str
    """What it is about: "version", "device", "bf16 on the cpu" or "extra"."""
    name: str
    """What was looked at: a package, a device, an extra of vitrail's."""
    state: str
    """What was found, as text: a version, a description, "missing …" with the command that installs it."""


def examine_machine() -> list[MachineFinding]:
    """Examine this machine: versions, devices, whether bf16 products run on its CPU, and vitrail's extras.

    It takes a few seconds: bf16 products run in child processes, so that a crash there cannot end this one.

    Returns:
        The findings, in the order in which `vitrail doctor` prints them.
    """
    return [*_check_versions(), *_check_devices(), *_check_bf16(), *_check_extras()]


def _check_versions() -> Iterator[MachineFinding]:
    yield MachineFinding("version", "vitrail", vitrail.__version__)
    yield MachineFinding(
        "version", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    for requirement, extra in _read_requirements():
        if extra is None:
            yield MachineFinding("version", requirement, _find_version(requirement) or "missing")


def _check_devices() -> Iterator[MachineFinding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield MachineFinding(
        "device", "cpu", f"{cores} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        capability = f"{properties.major}.{properties.minor}"
        yield MachineFinding("device", f"cuda:{index}", f"{properties.name}, {memory:.0f} GiB, capability {capability}")
    if torch.backends.mps.is_available():
        memory = torch.mps.recommended_max_memory() / 2**30
        yield MachineFinding("device", "mps", f"{device_name(torch.device('mps'))}, up to {memory:.0f} GiB, no float64")
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        yield MachineFinding("device", "accelerator", "none that torch can use")


def _check_bf16() -> Iterator[MachineFinding]:
    announced = "announced" if processor.announces_amx() else "not announced"
    yield MachineFinding("bf16 on the cpu", "AMX", announced)
    user_cap = os.environ.get(processor.ISA_VARIABLE)
    plain = processor.probe_bf16(cap=None)
    if plain.works:
        yield MachineFinding("bf16 on the cpu", "products", "work")
    else:
        yield MachineFinding("bf16 on the cpu", "products", f"do not work by themselves: {plain.detail}")
        capped = processor.probe_bf16(cap=processor.SAFE_ISA)
        state = "work" if capped.works else f"do not work either: {capped.detail}; use float32"
        yield MachineFinding("bf16 on the cpu", f"products with {processor.ISA_VARIABLE}={processor.SAFE_ISA}", state)
        if capped.works:
            yield MachineFinding(
                "bf16 on the cpu", "what vitrail does", "sets that cap by itself before the first product"
            )
    if user_cap is not None and user_cap != processor.SAFE_ISA:
        yield MachineFinding("bf16 on the cpu", processor.ISA_VARIABLE, f"{user_cap}, set by you and left alone")


def _check_extras() -> Iterator[MachineFinding]:
    extras: dict[str, list[str]] = {}
    for requirement, extra in _read_requirements():
        if extra is not None:
            extras.setdefault(extra, []).append(requirement)
    for extra, requirements in sorted(extras.items()):
        missing = [requirement for requirement in requirements if _find_version(requirement) is None]
        state = ", ".join(f"{requirement} {_find_version(requirement)}" for requirement in requirements)
        if missing:
            state = f'missing {", ".join(missing)}: pip install "vitrail[{extra}]", or ".[{extra}]" in a clone'
        yield MachineFinding("extra", extra, state)


def _read_requirements() -> list[tuple[str, str | None]]:
    """Return (package, extra or None) pairs from the installed metadata; none if vitrail is not installed."""
    try:
        lines = importlib.metadata.requires("vitrail") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    requirements = []
    for line in lines:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", line)
        if name is not None:
            requirements.append((name.group(), extra.group(1) if extra else None))
    return requirements


def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
