"""The report of a benchmark: a row for each candidate, what was not measured, and the machine; written as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vitrail.benchmark.case import NotMeasured
from vitrail.benchmark.speed_table import COLUMNS, format_cells
from vitrail.errors import ConfigError
from vitrail.system.files import describe_reason, read_regular_file, write_whole
from vitrail.system.results import Result, Rows

FED, RESIDENT = "from the loader", "already on the device"
"""How the names of the two training steps of the data path begin."""
FAST_NAMES = ("fast", "fused")
"""How the names of the candidates of `vitrail.fast` begin."""
MOST_BYTES = 100_000_000
"""Largest report that is read."""
KEEPS_UP = 0.9
"""A data path keeps up if training with it reaches this share of the images per second without it."""


@dataclass(frozen=True)
class SpeedRow:
    """The measurement of one candidate."""

    name: str
    what: str
    size: str
    batch: int
    precision: str
    """The candidate's own precision."""
    library: str
    way: str
    """Name of the candidate."""
    parameters: int
    """0 if there is no model."""
    seconds: list[list[float]]
    """Of a step, in every round: one number, or for latency one for each call."""
    median_seconds: float
    p99_seconds: float | None
    """For latency only."""
    images_per_second: float
    flops_per_second: float | None
    share_of_product: float | None
    """Share of the operations per second that a large matrix product reached in the same rounds."""
    memory_bytes: int | None
    """Peak of this candidate's memory on the GPU, without the images; unknown on a CPU."""
    distance: float | None
    """‖logits − reference‖ / ‖reference‖ from our plain model in float32; None if the weights differ."""

    @property
    def case(self) -> tuple[str, str, str, int]:
        """Rows with the same value can be compared; a report has one plain precision."""
        return self.name, self.what, self.size, self.batch

    def __str__(self) -> str:
        return f"{self.library} {self.way}"


@dataclass(frozen=True)
class Measurements:
    """The results of one case, or of several."""

    rows: list[SpeedRow] = field(default_factory=list)
    missing: list[NotMeasured] = field(default_factory=list)
    products: list[dict[str, Any]] = field(default_factory=list)
    """For each case the large matrix product that was measured with it."""

    def add(self, other: Measurements) -> None:
        """Add the results of another case."""
        self.rows.extend(other.rows)
        self.missing.extend(each for each in other.missing if each not in self.missing)
        self.products.extend(other.products)


@dataclass(frozen=True, repr=False)
class BenchmarkReport(Result):
    """The result of a whole benchmark."""

    machine: dict[str, Any]
    asked: dict[str, Any]
    """The cases and options of the benchmark."""
    rows: list[SpeedRow]
    missing: list[NotMeasured]
    products: list[dict[str, Any]]
    notes: list[str]
    grown: str | None = None
    """What grew from case to case (resolution, batch or model), in a report of benchmarks/against_peers.py."""
    comparisons: list[str] = field(default_factory=list)
    """Conclusions from the rows, in sentences."""
    measured: list[str] | None = None
    """The cases so far, while others of `asked` are still to be measured; None if it is finished."""

    @property
    def title(self) -> str:
        """The device, the precision of the plain candidates, and torch's version."""
        return f"{self.machine['device']}, {self.asked['precision']}, torch {self.machine['versions']['torch']}"

    def summary(self) -> Rows:
        fastest = [min(group, key=lambda row: row.median_seconds) for group in group_by_case(self.rows)]
        speeds = [(describe_case(row), f"{row.images_per_second:,.3g} images/s, {row}") for row in fastest]
        missing = [("not measured", str(each)) for each in self.missing]
        if self.measured is not None:
            missing.append(("stopped", self.explain_stop()))
        return [("machine", self.title), *speeds, *missing, *(("note", note) for note in self.notes)]

    def explain_stop(self) -> str:
        """Return in a sentence how far an unfinished benchmark came."""
        return (
            f"after {len(self.measured or [])} of {len(self.asked['cases'])} cases; the same command measures the rest"
        )

    def tables(self) -> Mapping[str, Sequence[Sequence[str]]]:
        tables: dict[str, Sequence[Sequence[str]]] = {"Speed": [COLUMNS, *map(format_cells, self.rows)]}
        if self.comparisons:
            tables["Comparisons"] = [("comparison",), *((line,) for line in self.comparisons)]
        return tables

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "machine": self.machine,
            "asked": self.asked,
            "grown": self.grown,
            "rows": [asdict(row) for row in self.rows],
            "products": self.products,
            "comparisons": self.comparisons,
            "not_measured": [each._asdict() for each in self.missing],
            "notes": self.notes,
            "measured": self.measured,
        }

    def write(self, path: Path) -> None:
        """Write the report as JSON, for `read`."""
        write_whole(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False).encode())

    @classmethod
    def read(cls, path: str | Path) -> BenchmarkReport:
        """Read a report that `write` wrote.

        Raises:
            ConfigError: There is no such file, or it is no report.
        """
        try:
            content = json.loads(read_regular_file(Path(path), MOST_BYTES))
            rows = [SpeedRow(**row) for row in content["rows"]]
            missing = [NotMeasured(**each) for each in content["not_measured"]]
            rest = (content["products"], content["notes"], content["grown"], content["comparisons"])
            measured = content.get("measured")  # not in older reports, which are finished
            return cls(content["machine"], content["asked"], rows, missing, *rest, measured)
        except OSError as error:
            raise ConfigError(f"--from {path}: it cannot be read: {describe_reason(error)}") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"--from {path}: give a JSON file that `vitrail bench --out` wrote") from None


def group_by_case(rows: Iterable[SpeedRow]) -> list[list[SpeedRow]]:
    """Return the rows of each case together, in the order in which the cases come."""
    cases: dict[tuple[str, str, str, int], list[SpeedRow]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    return list(cases.values())


def describe_case(row: SpeedRow) -> str:
    return f"{row.name} {row.what}, {row.size} px, batch {row.batch}"


def compare_rows(rows: Iterable[SpeedRow], precision: str) -> list[str]:
    """Return conclusions about each case, in sentences; `precision`: that of the plain candidates.

    They compare the best candidate of `vitrail.fast` with the best plain one, and say whether the data path keeps up.
    """
    lines = []
    for group in group_by_case(rows):
        compare = compare_data_path if group[0].what == "end-to-end" else _compare_with_plain
        lines += [f"{describe_case(group[0])}, {precision}: {line}" for line in compare(group)]
    return lines


def _compare_with_plain(rows: Sequence[SpeedRow]) -> list[str]:
    fast = [row for row in rows if row.way.startswith(FAST_NAMES)]
    plain = [row for row in rows if not row.way.startswith(FAST_NAMES)]
    if not fast or not plain:
        return []
    best, other = (min(group, key=lambda row: row.median_seconds) for group in (fast, plain))
    ratio = other.median_seconds / best.median_seconds
    return [f"{best.way} ({describe_precision(best)}) is {ratio:.2f}× as fast as {other.way}, the fastest plain way"]


def describe_precision(row: SpeedRow) -> str:
    """Return the precision and distance of a row, as in "fp8, distance 2.1e-02"."""
    return row.precision if row.distance is None else f"{row.precision}, distance {row.distance:.1e}"


def compare_data_path(rows: Sequence[SpeedRow]) -> list[str]:
    """Return whether the data path keeps up with training; nothing if one of the two steps is missing."""
    speeds = {name: row.images_per_second for row in rows for name in (FED, RESIDENT) if row.way.startswith(name)}
    if len(speeds) < 2:
        return []
    share = speeds[FED] / speeds[RESIDENT]
    verdict = "keeps up" if share >= KEEPS_UP else "does not keep up"
    return [f"the data path {verdict}: {share:.0%} of the images/s with a batch that is already on the device"]
