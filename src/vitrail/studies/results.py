"""The raw results of a study: one line of JSON for each run, and what is computed from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vitrail.errors import DataError
from vitrail.studies.study import Study
from vitrail.studies.verdict import Check, Deviation, Verdict, decide, estimate_seed_mean, pool_deviation
from vitrail.system.intervals import Estimate

RESULTS_FILE = "results.jsonl"
Row = dict[str, Any]
"""A run: study, scale, arm, facts, seed, measured, cost, machine."""


@dataclass(frozen=True)
class StudyResults:
    """The measurements of a study at one scale."""

    study: Study
    rows: Sequence[Row]

    @property
    def scale(self) -> str:
        return str(self.rows[0]["scale"]) if self.rows else ""

    @cached_property
    def arms(self) -> list[str]:
        """The names of the arms, in the order of the study."""
        return list(dict.fromkeys(row["arm"] for row in self.rows))

    @property
    def seeds(self) -> int:
        """The number of seeds that every arm has."""
        return min((len(self.list_values(arm)) for arm in self.arms), default=0)

    def list_values(self, arm: str, metric: str | None = None) -> list[float]:
        """Return what the runs of an arm measured, one number for each seed."""
        name = metric or self.study.metric
        rows = sorted((row for row in self.rows if row["arm"] == arm), key=lambda row: int(row["seed"]))
        return [float(row["measured"][name]) for row in rows]

    def get_fact(self, arm: str, name: str) -> Any:
        """Return a fact about an arm, such as the number of its layers."""
        return next(row["facts"][name] for row in self.rows if row["arm"] == arm)

    def pool_deviation(self, metric: str | None = None) -> Deviation:
        """Return the deviation over seeds, from all arms together."""
        return pool_deviation([self.list_values(arm, metric) for arm in self.arms])

    def estimate(self, arm: str, metric: str | None = None) -> Estimate:
        """Return the mean of an arm over seeds with its 95% interval."""
        deviation = self.pool_deviation(metric) if self.study.is_equally_noisy else None
        return estimate_seed_mean(self.list_values(arm, metric), deviation)

    def compute_mean(self, arm: str, metric: str | None = None) -> float:
        """Return the mean of an arm over seeds."""
        return self.estimate(arm, metric).value

    def make_checks(self) -> list[Check]:
        """Return the checks of the study's rule."""
        return list(self.study.list_checks(self))

    def decide(self) -> Verdict:
        """Return the verdict of the study's rule."""
        return decide(self.make_checks())

    def add_seconds(self) -> float:
        """Return the seconds of all trainings together; several may have run at a time."""
        return sum(float(row["cost"]["seconds"]) for row in self.rows)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file; a last line that a killed run left unfinished is dropped.

    Raises:
        DataError: another line is no JSON.
    """
    if not path.exists():
        return []
    rows = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise DataError(f"line {number} of {path} is no JSON: remove it, and its run is done again") from None
    return rows


def keep_complete_seeds(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of those seeds that every arm has, so that all arms have equally many runs."""
    arms = {row["arm"] for row in rows}
    seeds = {row["seed"] for row in rows}
    complete = {seed for seed in seeds if {row["arm"] for row in rows if row["seed"] == seed} == arms}
    return [row for row in rows if row["seed"] in complete]


def collect_results(study: Study, rows: Sequence[Row], arms: Sequence[str] | None = None) -> StudyResults:
    """Return the results of a study from rows of several; each run counts once, the newest of it.

    Args:
        study: The study.
        rows: Rows of any studies.
        arms: The order of the arms; that of the rows if None.
    """
    newest = {(row["arm"], row["seed"]): row for row in rows if row["study"] == study.name}
    places = {name: place for place, name in enumerate(arms or ())}
    ordered = sorted(newest.values(), key=lambda row: (places.get(row["arm"], len(places)), row["seed"]))
    return StudyResults(study, ordered)
