"""What a benchmark found: a row for each way, what could not be measured, and the machine that it was on."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vitrail.benchmark.case import OURS, Case, Missing
from vitrail.errors import ConfigError
from vitrail.system.files import write_whole

FED, RESIDENT = "from the loader", "already on the device"
"""How the ways of a training step's images begin."""
KEEPS_UP = 0.9
"""Of the images a second without a loader, what a data path must let through."""


@dataclass(frozen=True)
class Row:
    """One way of one library, measured."""

    name: str
    what: str
    size: str
    batch: int
    precision: str
    """The way's own."""
    library: str
    way: str
    parameters: int
    """0 where there is no model."""
    seconds: list[list[float]]
    """Of a step, in every round: one number, or for latency one for each call."""
    median_seconds: float
    p99_seconds: float | None
    """For latency alone."""
    images_per_second: float
    flops_per_second: float | None
    share_of_product: float | None
    """Of the operations a second that a large matrix product came to in the same rounds."""
    memory_bytes: int | None
    """The most that this way had on the GPU at a time, the images aside; unknown on a CPU."""
    distance: float | None
    """‖logits − reference‖ / ‖reference‖ from our plain model in float32; None for peers with weights of their own."""

    @property
    def case(self) -> tuple[str, str, str, int]:
        """What it may be compared within; there is one plain precision in a run."""
        return self.name, self.what, self.size, self.batch

    def __str__(self) -> str:
        return f"{self.library} {self.way}"


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
        """For each case our best way beside the best of the peers', or how the data path keeps up."""
        return [line for rows in by_case(self.rows) for line in compared(rows, self.asked["precision"])]

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

    def write(self, path: Path) -> None:
        """As JSON; `read` makes the same of it again."""
        write_whole(path, json.dumps(self.as_dict(), indent=1, ensure_ascii=False, allow_nan=False).encode())

    @classmethod
    def read(cls, path: Path) -> Report:
        """One that was written."""
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            rows = [Row(**row) for row in told["rows"]]
            missing = [Missing(**each) for each in told["not_measured"]]
            rest = (told["products"], told["notes"], told["grown"])
            return cls(told["machine"], told["asked"], rows, missing, *rest)
        except OSError as error:
            raise ConfigError(f"--from {path}: it cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"--from {path}: give a JSON that this version's `vitrail bench --out` wrote") from None


def by_case(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of the same case together, in the order of their coming."""
    cases: dict[tuple[str, str, str, int], list[Row]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    return list(cases.values())


def product_record(case: Case, flops: int, seconds: Sequence[list[float]]) -> dict[str, Any]:
    """The product that stands for what the device can do, beside a case."""
    speed = flops / statistics.median(second for turn in seconds for second in turn)
    return {"case": str(case), "flops": flops, "seconds": list(seconds), "flops_per_second": speed}


def compared(rows: Sequence[Row], plain: str) -> list[str]:
    """What follows from the rows of a case, in sentences; `plain`: the precision of plain ways.

    Libraries are compared at that precision, and again with those that have another, where any has.
    """
    first = rows[0]
    case = f"{first.name} {first.what}, {first.size} px, batch {first.batch}"
    if first.what == "end-to-end":
        return [f"{case}, {plain}: {line}" for line in _kept_up(rows)]
    lines = [_best([row for row in rows if row.precision == plain], f"{case}, {plain}: ")]
    if any(row.precision != plain for row in rows):
        lines.append(_best(rows, f"{case}, any precision: ", precisely=True))
    return [line for line in lines if line is not None]


def _best(rows: Sequence[Row], begins: str, precisely: bool = False) -> str | None:
    ours = [row for row in rows if row.library == OURS]
    theirs = [row for row in rows if row.library != OURS]
    if not ours or not theirs:
        return None
    mine, other = (min(some, key=lambda row: row.median_seconds) for some in (ours, theirs))
    told, beside = (f"{row}{_precisely(row)}" if precisely else str(row) for row in (mine, other))
    ratio = other.median_seconds / mine.median_seconds
    return f"{begins}{told} is {ratio:.2f}× as fast as the best peer, {beside}"


def _precisely(row: Row) -> str:
    """As in (fp8, distance 2.1e-02)."""
    return f" ({row.precision})" if row.distance is None else f" ({row.precision}, distance {row.distance:.1e})"


def _kept_up(rows: Sequence[Row]) -> list[str]:
    speeds = {way: row.images_per_second for row in rows for way in (FED, RESIDENT) if row.way.startswith(way)}
    if len(speeds) < 2:
        return []
    share = speeds[FED] / speeds[RESIDENT]
    keeps = "keeps up" if share >= KEEPS_UP else "does not keep up"
    return [f"the data path {keeps}: {share:.0%} of the images/s with a batch that is already on the device"]
