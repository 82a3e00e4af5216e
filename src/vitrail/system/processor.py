"""Keeping bf16 matrix products from killing the process on CPUs whose AMX is announced but not usable.

On some virtual machines the processor says it has AMX, the system lets no program use it, and oneDNN's first bf16
product then ends in an illegal instruction. `guard` finds out in a child process and caps oneDNN one instruction
set lower before the first product. It must run before that: oneDNN reads the cap once.
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

VARIABLE = "ONEDNN_MAX_CPU_ISA"
CAP = "AVX512_CORE_BF16"
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
"""Every kind of bf16 product that a model makes, small."""


@dataclass(frozen=True)
class ProbeResult:
    """How a child process that multiplies bf16 matrices ended."""

    works: bool
    detail: str
    """What happened, in a few words, where it does not work."""
    final: bool = True
    """False where the probe itself could not be run, so that the answer is not worth keeping."""


def amx_announced() -> bool:
    """Whether the system lists AMX among the processor's features."""
    try:
        return "amx_tile" in CPUINFO.read_text()
    except OSError:
        return False


def probe_bf16(cap: str | None) -> ProbeResult:
    """Multiply bf16 matrices in a child process, with oneDNN capped at `cap` or not at all."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if cap is not None:
        environment[VARIABLE] = cap
    try:
        child = subprocess.run(
            [sys.executable, "-c", PROBE],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return ProbeResult(works=False, detail=f"the probe did not run: {error}", final=False)
    if child.returncode == 0:
        return ProbeResult(works=True, detail="")
    if child.returncode < 0:
        return ProbeResult(works=False, detail=f"the process was killed by {signal.Signals(-child.returncode).name}")
    last = child.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return ProbeResult(works=False, detail=" ".join(last) or f"exit code {child.returncode}", final=False)


def guard() -> None:
    """Cap oneDNN where bf16 products would otherwise kill this process. Cheap: one probe for each boot, if any."""
    if VARIABLE in os.environ or not amx_announced():
        return
    works = _remembered()
    if works is None:
        result = probe_bf16(cap=None)
        works = result.works
        if result.final:
            _remember(works)
    if not works:
        os.environ[VARIABLE] = CAP


def cache_folder() -> Path:
    """Where vitrail keeps what it can find out again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitrail"


def _key() -> str:
    """This boot of this machine and this interpreter: a verdict must not outlive any of them."""
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    return " ".join([platform.node(), platform.release(), boot, sys.executable])


def _remembered() -> bool | None:
    try:
        found = json.loads((cache_folder() / "bf16.json").read_text())
    except (OSError, ValueError):
        return None
    works = found.get("works") if isinstance(found, dict) and found.get("key") == _key() else None
    return works if isinstance(works, bool) else None


def _remember(works: bool) -> None:
    """Written beside and renamed, so that a reader never sees half a file; a read-only home costs a probe each time."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
            json.dump({"key": _key(), "works": works}, file)
        Path(file.name).replace(folder / "bf16.json")
    except (OSError, RuntimeError):
        return
