"""What a benchmark found: a row for each way, what could not be measured, and the machine that it was on."""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import vitrail
from vitrail import processor
from vitrail.workflows.bench_peers import versions
from vitrail.workflows.bench_ways import OURS, Case, Missing


@dataclass(frozen=True)
class Row:
    """One way of one library, measured."""

    name: str
    what: str
    size: str
    batch: int
    precision: str
    library: str
    way: str
    parameters: int
    seconds: list[list[float]]
    """Of a step, in every round: one number, or for latency one for each call."""
    median_seconds: float
    p99_seconds: float | None
    """For latency alone."""
    images_per_second: float
    flops_per_second: float
    share_of_product: float
    """Of the operations a second that a large matrix product came to in the same rounds."""
    memory_bytes: int | None
    """The most that this way had on the GPU at a time, the images aside; unknown on a CPU."""
    distance: float | None
    """‖logits − reference‖ / ‖reference‖ from our plain model in float32; None for peers, whose weights are others."""

    @property
    def case(self) -> tuple[str, str, str, int, str]:
        """What it may be compared within."""
        return self.name, self.what, self.size, self.batch, self.precision


@dataclass(frozen=True)
class Measured:
    """All ways of one case, or of several."""

    rows: list[Row] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    products: list[dict[str, Any]] = field(default_factory=list)
    """For each case the large matrix product that was measured beside it."""

    def add(self, other: Measured) -> None:
        """Of another case."""
        self.rows.extend(other.rows)
        self.missing.extend(each for each in other.missing if each not in self.missing)
        self.products.extend(other.products)


@dataclass(frozen=True)
class Report:
    """A whole run of `vitrail bench`."""

    machine: dict[str, Any]
    asked: dict[str, Any]
    rows: list[Row]
    missing: list[Missing]
    products: list[dict[str, Any]]
    notes: list[str]
    grown: str | None
    """What grew from case to case: resolution, batch or model."""

    @property
    def comparisons(self) -> list[str]:
        """For each case our best way beside the best of the peers'."""
        return [line for rows in by_case(self.rows) if (line := _compared(rows)) is not None]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "machine": self.machine,
            "asked": self.asked,
            "grown": self.grown,
            "rows": [asdict(row) for row in self.rows],
            "products": self.products,
            "comparisons": self.comparisons,
            "not_measured": [each._asdict() for each in self.missing],
            "notes": self.notes,
        }


def by_case(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of the same case together, in the order of their coming."""
    cases: dict[tuple[str, str, str, int, str], list[Row]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    return list(cases.values())


def product_record(case: Case, flops: int, seconds: Sequence[list[float]]) -> dict[str, Any]:
    """The product that stands for what the device can do, beside a case."""
    speed = flops / statistics.median(second for turn in seconds for second in turn)
    return {"case": str(case), "flops": flops, "seconds": list(seconds), "flops_per_second": speed}


def _compared(rows: Sequence[Row]) -> str | None:
    ours = [row for row in rows if row.library == OURS]
    theirs = [row for row in rows if row.library != OURS]
    if not ours or not theirs:
        return None
    mine, other = (min(some, key=lambda row: row.median_seconds) for some in (ours, theirs))
    ratio = other.median_seconds / mine.median_seconds
    return (
        f"{mine.name} {mine.what}, {mine.size} px, batch {mine.batch}, {mine.precision}: {OURS} {mine.way} is "
        f"{ratio:.2f}× as fast as the best peer, {other.library} {other.way}"
    )


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
