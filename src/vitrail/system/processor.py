"""Prevent bf16 matrix products from crashing on CPUs that announce AMX but cannot use it.

On some virtual machines the processor announces AMX, but the system does not let programs use it, and oneDNN's first
bf16 product ends in an illegal instruction. `prevent_amx_crash` tests this in a child process and, if needed, limits
oneDNN to the next lower instruction set. It must run before the first product, because oneDNN reads the limit once.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
SAFE_ISA = "AVX512_CORE_BF16"
CPUINFO = Path("/proc/cpuinfo")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROBE_SECONDS = 120

PROBE = """
import torch
import torch.nn.functional as F
x = torch.ones(2, 64, 64, dtype=torch.bfloat16)
assert (x @ x).float().sum() == 2 * 64 ** 3
assert F.linear(x, x[0], x[0, 0]).float().sum() > 0
assert F.scaled_dot_product_attention(x[None], x[None], x[None]).float().sum() > 0
assert F.conv2d(x[None], x[:1, None, :2, :2].expand(4, 2, 2, 2)).float().sum() > 0
"""
"""A small program with every kind of bf16 product that a model makes."""


@dataclass(frozen=True)
class ProbeResult:
    """How a child process that multiplies bf16 matrices ended."""

    works: bool
    detail: str
    """What went wrong, in a few words; empty if it works."""
    final: bool = True
    """False if the probe itself could not run, so the result must not be cached."""


def announces_amx() -> bool:
    """Return whether the system lists AMX among the processor's features."""
    try:
        return "amx_tile" in CPUINFO.read_text()
    except OSError:
        return False


def probe_bf16(cap: str | None) -> ProbeResult:
    """Multiply bf16 matrices in a child process, with oneDNN limited to the instruction set `cap` (None: no limit)."""
    return run_probe(PROBE, cap)[0]


def run_probe(program: str, cap: str | None) -> tuple[ProbeResult, str]:
    """Run a Python program in a child process, with oneDNN limited to `cap`; return how it ended and what it printed.

    What it printed before a crash is returned too, if it was flushed.
    """
    environment = {name: value for name, value in os.environ.items() if name != ISA_VARIABLE}
    if cap is not None:
        environment[ISA_VARIABLE] = cap
    try:
        child = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return ProbeResult(works=False, detail=f"the probe did not run: {error}", final=False), ""
    printed = child.stdout.decode(errors="replace")
    if child.returncode == 0:
        return ProbeResult(works=True, detail=""), printed
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        return ProbeResult(works=False, detail=f"the process was killed by {name}"), printed
    last = child.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return ProbeResult(False, " ".join(last) or f"exit code {child.returncode}", final=False), printed


def prevent_amx_crash() -> None:
    """Limit oneDNN if bf16 products would crash this process. Probes at most once per boot, then reads a cache."""
    if ISA_VARIABLE in os.environ or not announces_amx():
        return
    works = _read_verdict()
    if works is None:
        result = probe_bf16(cap=None)
        works = result.works
        if result.final:
            _write_verdict(works)
    if not works:
        os.environ[ISA_VARIABLE] = SAFE_ISA


def cache_folder() -> Path:
    """Return vitrail's cache folder; deleting it loses nothing that cannot be found again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitrail"


def _verdict_key() -> str:
    """Identify this machine, boot and interpreter: a verdict must not outlive any of them."""
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    return " ".join([platform.node(), platform.release(), boot, sys.executable])


def _read_verdict() -> bool | None:
    try:
        verdict = json.loads((cache_folder() / "bf16.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    works = verdict.get("works") if isinstance(verdict, dict) and verdict.get("key") == _verdict_key() else None
    return works if isinstance(works, bool) else None


def _write_verdict(works: bool) -> None:
    """Cache the verdict atomically. If the folder cannot be written, every process probes again."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, suffix=".tmp", delete=False) as file:
            json.dump({"key": _verdict_key(), "works": works}, file)
        Path(file.name).replace(folder / "bf16.json")
    except (OSError, RuntimeError):
        return
