"""Read the raw results of trainings, for benchmarks/results_page.py."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
KINDS = ("train", "evaluation")

Record = dict[str, Any]
Point = tuple[float, float]


@dataclass(frozen=True)
class Run:
    """One training: facts about it, and its records of training and evaluation."""

    about: Record
    training: list[Record]
    evaluations: list[Record]

    @property
    def top1(self) -> float:
        """Accuracy of the last weights in per cent, never of the best ones."""
        return percent(self.evaluations[-1])

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of the training loop, with compilation and evaluations."""
        return float(self.training[-1]["clock"]["seconds"])

    @property
    def epochs(self) -> float:
        return float(self.training[-1]["epoch"])

    @property
    def step(self) -> int:
        return int(self.training[-1]["step"])

    @property
    def speed(self) -> float:
        """Median images per second, without the first record, which includes compilation."""
        return float(statistics.median(record["clock"]["images_per_second"] for record in self.training[1:]))

    def at(self, step: int) -> float:
        return next(percent(record) for record in self.evaluations if record["step"] == step)

    def over_epochs(self) -> list[Point]:
        return [(each["step"] * self.epochs / self.step, percent(each)) for each in self.evaluations]

    def over_steps(self, name: str = "accuracy") -> list[Point]:
        return [(each["step"], percent(each) if name == "accuracy" else each[name]) for each in self.evaluations]


@dataclass(frozen=True)
class Raw:
    """The folder of raw results."""

    folder: Path = RESULTS

    @cached_property
    def runs(self) -> dict[str, Run]:
        """All runs on the pages, by name."""
        files = (
            "small_h200",
            "pane_h200",
            "cifar10_on_device_h200",
            "cifar10_scratch_probes_h200",
            "cifar10_seeds_h200",
            "tiny_imagenet_decay_h200",
        )
        return {name: run for file in files for name, run in self.read_named(f"{file}.jsonl").items()}

    def read_named(self, file: str) -> dict[str, Run]:
        records = [json.loads(line) for line in (self.folder / file).read_text().splitlines()]
        abouts = [record for record in records if record["kind"] == "about"]
        duplicates = [name for name, count in Counter(about["name"] for about in abouts).items() if count > 1]
        if duplicates:
            raise ValueError(f"{file}: two runs have the same name: {', '.join(duplicates)}")
        return {
            about["name"]: Run(about, *(select_records(records, about["name"], kind) for kind in KINDS))
            for about in abouts
        }

    def read(self, file: str) -> Record:
        content: Record = json.loads((self.folder / file).read_text())
        return content


def select_records(records: list[Record], name: str, kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind and record["name"] == name]


def percent(record: Record) -> float:
    return 100 * float(record["accuracy"])
