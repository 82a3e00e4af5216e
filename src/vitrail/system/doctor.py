"""Examine this machine: versions, devices, extras, and bf16 on the CPU."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import vitrail
from vitrail.system import processor

LIST_DEVICES = """
import json
import torch
mps = []
if torch.backends.mps.is_available():
    from vitrail.system.device import device_name
    mps.append([device_name(torch.device("mps")), torch.mps.recommended_max_memory()])
gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
print(json.dumps({
    "threads": torch.get_num_threads(),
    "capability": torch.backends.cpu.get_cpu_capability(),
    "gpus": [[each.name, each.total_memory, each.major, each.minor] for each in gpus],
    "mps": mps,
}), flush=True)
"""
"""A small program that prints what torch finds on this machine. Importing torch takes most of the time of `vitrail
doctor`, so only the child process does it that also tries bf16 products."""


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

    Torch runs in child processes only, so that neither a broken torch nor a crash in bf16 products can end this one.

    Returns:
        The findings, in the order in which `vitrail doctor` prints them.
    """
    with ThreadPoolExecutor() as pool:
        plain = pool.submit(processor.run_probe, LIST_DEVICES + processor.PROBE, None)
        # Only where AMX is announced do products crash, and need another try. It is begun at once, to save time.
        capped = pool.submit(processor.probe_bf16, processor.SAFE_ISA) if processor.announces_amx() else None
        versions, extras = list(_check_versions()), list(_check_extras())
        probe, printed = plain.result()
        return [*versions, *_check_devices(printed, probe), *_check_bf16(probe, capped), *extras]


def _check_versions() -> Iterator[MachineFinding]:
    yield MachineFinding("version", "vitrail", vitrail.__version__)
    yield MachineFinding(
        "version", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    for requirement, extra in _read_requirements():
        if extra is None:
            yield MachineFinding("version", requirement, _find_version(requirement) or "missing")


def _check_devices(printed: str, probe: processor.ProbeResult) -> Iterator[MachineFinding]:
    """Yield the devices, from what LIST_DEVICES printed."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = _parse_devices(printed)
    if found is None:
        yield MachineFinding("device", "cpu", f"{cores} cores")
        yield MachineFinding("device", "accelerator", f"unknown, because torch does not work: {probe.detail}")
        return
    yield MachineFinding("device", "cpu", f"{cores} cores, {found['threads']} threads, {found['capability']}")
    for index, (name, memory, major, minor) in enumerate(found["gpus"]):
        state = f"{name}, {memory / 2**30:.0f} GiB, capability {major}.{minor}"
        yield MachineFinding("device", f"cuda:{index}", state)
    for name, memory in found["mps"]:
        yield MachineFinding("device", "mps", f"{name}, up to {memory / 2**30:.0f} GiB, no float64")
    if not found["gpus"] and not found["mps"]:
        yield MachineFinding("device", "accelerator", "none that torch can use")


def _parse_devices(printed: str) -> dict[str, Any] | None:
    """Return what LIST_DEVICES printed, between lines that other packages may print; None if it did not come so far."""
    for line in printed.splitlines():
        if line.startswith('{"threads"'):
            found: dict[str, Any] = json.loads(line)
            return found
    return None


def _check_bf16(plain: processor.ProbeResult, capped: Future[processor.ProbeResult] | None) -> Iterator[MachineFinding]:
    """Yield whether bf16 products work; `capped`: the probe with the safe instruction set, if there is one."""
    announced = "announced" if processor.announces_amx() else "not announced"
    yield MachineFinding("bf16 on the cpu", "AMX", announced)
    user_cap = os.environ.get(processor.ISA_VARIABLE)
    if plain.works:
        yield MachineFinding("bf16 on the cpu", "products", "work")
    else:
        yield MachineFinding("bf16 on the cpu", "products", f"do not work by themselves: {plain.detail}")
        second = capped.result() if capped is not None else processor.probe_bf16(processor.SAFE_ISA)
        state = "work" if second.works else f"do not work either: {second.detail}; use float32"
        yield MachineFinding("bf16 on the cpu", f"products with {processor.ISA_VARIABLE}={processor.SAFE_ISA}", state)
        if second.works:
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
