"""Run studies: what has been measured already is kept, the rest is measured, and each study gets its verdict.

runs/studies/SCALE/
    trainings/           every training, which several studies may share
    NAME/results.jsonl   the raw results of a study, one run a line
    NAME/figure.png, .svg
    NAME/page.md         claim, table, figure and verdict
"""

from __future__ import annotations

import datetime
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from vitrail.data.open import Data
from vitrail.errors import ConfigError, TrainingError
from vitrail.studies.catalogue import find_study
from vitrail.studies.page import (
    FIGURE,
    PAGE,
    TINY_NOTE,
    draw_figure,
    format_interval,
    format_number,
    make_table,
    write_page,
)
from vitrail.studies.results import RESULTS_FILE, Row, StudyResults, collect_results, read_rows
from vitrail.studies.scales import TINY, Scale, find_scale
from vitrail.studies.study import Study
from vitrail.studies.study_data import choose_data
from vitrail.studies.study_runs import StudyContext, StudyRun, measure_runs
from vitrail.studies.verdict import Check, Verdict
from vitrail.system.checkout import read_commit
from vitrail.system.device import choose_device, device_name
from vitrail.system.events import OnEvent, open_listener
from vitrail.system.files import write_whole
from vitrail.system.locks import lock_file
from vitrail.system.results import Result, Rows, format_count

DEFAULT_FOLDER = Path("runs/studies")
TRAININGS, LOCK_FILE = "trainings", ".lock"


@dataclass(frozen=True, repr=False)
class StudyResult(Result):
    """The outcome of a study: its verdict, the checks behind it, and where its files are."""

    name: str
    claim: str
    scale: str
    seeds: int
    verdict: Verdict
    checks: tuple[Check, ...]
    folder: Path
    results: StudyResults = field(compare=False)
    """All measurements."""

    def summary(self) -> Rows:
        """Return the claim, the verdict and each check."""
        where = f"{self.scale} scale, {format_count(self.seeds, 'seed')}"
        rows = [("claim", self.claim), ("verdict", f"{self.verdict} ({where})")]
        rows += [(check.outcome, describe_check(check)) for check in self.checks]
        if self.scale == TINY.name:
            rows.append(("note", TINY_NOTE))
        return [*rows, ("folder", str(self.folder))]

    def tables(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """Return the table of all arms."""
        return {self.results.study.title: make_table(self.results)}

    def figures(self) -> Sequence[Path]:
        """Return the figure."""
        return (self.folder / FIGURE,)

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict, the checks and the raw results."""
        checks = [
            {"statement": each.statement, "outcome": each.outcome, **each.difference.to_dict()} for each in self.checks
        ]
        return {
            **{name: getattr(self, name) for name in ("name", "claim", "scale", "seeds", "verdict")},
            **{"folder": str(self.folder), "checks": checks, "rows": list(self.results.rows)},
        }


def describe_check(check: Check) -> str:
    """Return a check as a sentence with its number."""
    difference = check.difference
    if not math.isfinite(difference.value):
        return f"{check.statement}: cannot be measured with these runs"
    value = format_number(difference.value, 2, "+")
    return f"{check.statement}: {value} (95% interval {format_interval(difference, 2, '+')})"


def study(
    study: str | Study,
    *,
    scale: str | Scale = "tiny",
    seeds: int | None = None,
    data: Data | None = None,
    transfer: Data | Sequence[Data] = (),
    masks: str | Path | None = None,
    folder: str | Path = DEFAULT_FOLDER,
    jobs: int = 1,
    device: str = "auto",
    on_event: OnEvent | None = None,
) -> StudyResult:
    """Test a claim of the paper: train its arms, compare them, and decide by a rule that was written before.

        result = vitrail.study("positions")
        result.verdict, result.checks

    Args:
        study: The name of a study (`vitrail study --list` shows them), or one of your own.
        scale: `tiny` runs on any machine, on handwritten digits; `small` on one GPU, on images that you give.
        seeds: How often every arm is trained; the scale's own number if None.
        data: The images to pre-train on.
        transfer: The data sets to transfer to, one or several: few-shot accuracy is the mean over them, and
            fine-tuning uses the first.
        masks: A folder of trimaps for the first of them, for the study `attention-focus`.
        folder: Where trainings and results are kept. What is there already is not measured again.
        jobs: How many trainings run at a time, in processes that share the device.
        device: cpu, cuda, mps, or auto: a GPU if there is one.
        on_event: Called with what happens; None shows a bar on a terminal or in a notebook.

    Events:
        measured: study, arm, seed, unit, value, failure, done, total, seconds_left: a run is done.
        message, step: see vitrail/system/events.py.

    Returns:
        The verdict with its checks, and all measurements.

    Raises:
        ConfigError: There is no such study or scale, or data that it needs was not given.
        DataError: The data cannot be used.
        TrainingError: Some runs failed; the same call tries them again.
    """
    return run_studies(
        [study],
        scale=scale,
        seeds=seeds,
        data=data,
        transfer=transfer,
        masks=masks,
        folder=folder,
        jobs=jobs,
        device=device,
        on_event=on_event,
    )[0]


def run_studies(
    studies: Sequence[str | Study],
    *,
    scale: str | Scale = "tiny",
    seeds: int | None = None,
    data: Data | None = None,
    transfer: Data | Sequence[Data] = (),
    masks: str | Path | None = None,
    folder: str | Path = DEFAULT_FOLDER,
    jobs: int = 1,
    device: str = "auto",
    on_event: OnEvent | None = None,
) -> list[StudyResult]:
    """Run several studies with one list of runs; arguments, events and errors are those of `study`."""
    chosen = [find_study(each) if isinstance(each, str) else each for each in studies]
    size = find_scale(scale) if isinstance(scale, str) else scale
    if not chosen:
        raise ConfigError("name a study: `vitrail study --list` shows them")
    if len({each.name for each in chosen}) < len(chosen):
        raise ConfigError("a study was named twice: name each of them once")
    if jobs < 1 or (seeds is not None and seeds < 1):
        raise ConfigError(f"jobs = {jobs}, seeds = {seeds}: give 1 or more")
    root, count = Path(folder) / size.name, size.seeds if seeds is None else seeds
    failures: list[tuple[StudyRun, str]] = []
    with open_listener(on_event) as listener, ExitStack() as stack:
        places = {each.name: stack.enter_context(_StudyFolder(each, size, root / each.name, count)) for each in chosen}
        missing = [run for place in places.values() for run in place.list_missing()]
        if missing or data is not None or transfer or masks is not None:
            needs = {need for each in chosen for need in each.needs}
            choice = choose_data(size, needs, data, _list_sets(transfer), masks)
            for place in places.values():
                place.set_data(choice.describe(place.study.needs))
        if missing:
            context = StudyContext(size, choice.load(needs, listener), root / TRAININGS, device)
            failures = _measure(context, places, missing, jobs, listener)
        results = [place.finish() for place in places.values() if not place.list_missing()]
    if failures:
        run, reason = failures[0]
        raise TrainingError(
            f"{len(failures)} of {len(missing)} runs failed, the first ({run}) because: {reason}; the same command "
            f"tries them again and keeps the others, which are in {root}"
        )
    return results


def _list_sets(transfer: Data | Sequence[Data]) -> Sequence[Data]:
    """Return the data sets to transfer to as a list, also if one was given alone. A list of pairs is one data set."""
    if not isinstance(transfer, list | tuple):
        return [transfer]  # type: ignore[list-item]
    is_pairs = bool(transfer) and isinstance(transfer[0], tuple)
    return [transfer] if is_pairs else list(transfer)


class _StudyFolder:
    """The results of one study on disk. In a `with` block no other command writes there."""

    def __init__(self, study: Study, scale: Scale, folder: Path, seeds: int) -> None:
        self.study, self.scale, self.folder = study, scale, folder
        self.arms, self.seeds = list(study.list_arms(scale)), range(seeds)
        if len({arm.name for arm in self.arms}) < len(self.arms):
            raise ConfigError(f"two arms of {study.name} have the same name: give each one of its own")
        self.path = folder / RESULTS_FILE
        self.scale_digest = scale.compute_digest()
        self.rows: list[Row] = []
        self._data: dict[str, str] = {}

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = lock_file(self.folder / LOCK_FILE)
        except BlockingIOError:
            raise ConfigError(
                f"another command is measuring {self.study.name} in {self.folder}: wait for it, or give another "
                "--folder"
            ) from None
        self.rows = read_rows(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def list_missing(self) -> list[StudyRun]:
        """Return the runs that have no row yet."""
        runs = (StudyRun(self.study, arm, seed) for seed in self.seeds for arm in self.arms)
        return [run for run in runs if self._find_row(run) is None]

    def _find_row(self, run: StudyRun) -> Row | None:
        """Return the newest row of a run; it counts only if arm and scale are those of today."""
        arm = run.arm
        now = json.loads(json.dumps([arm.name, dict(arm.settings), dict(arm.facts), run.seed, self.scale_digest]))
        keys = ("arm", "settings", "facts", "seed", "scale_digest")
        return next((row for row in reversed(self.rows) if [row[key] for key in keys] == now), None)

    def set_data(self, data: dict[str, str]) -> None:
        """Set what new rows say of their images.

        Raises:
            ConfigError: There are rows that were measured on other images.
        """
        self._data = data
        for row in self.rows:
            if list(row["data"].items()) != list(data.items()):
                raise ConfigError(
                    f"{self.path} has runs on other images: give the same ones in the same order, or another --folder"
                )

    def add(self, row: Row) -> None:
        """Add a row to the file, which is whole at any moment."""
        self.rows.append(json.loads(json.dumps({**row, "data": self._data, "scale_digest": self.scale_digest})))
        write_whole(self.path, "".join(json.dumps(each) + "\n" for each in self.rows).encode())

    def finish(self) -> StudyResult:
        """Write figure and page, and return the result."""
        found = [self._find_row(StudyRun(self.study, arm, seed)) for arm in self.arms for seed in self.seeds]
        rows = [row for row in found if row is not None]
        results = collect_results(self.study, rows, [arm.name for arm in self.arms])
        draw_figure(results, self.folder / FIGURE)
        write_page(results, self.folder / PAGE, FIGURE)
        return StudyResult(
            name=self.study.name,
            claim=self.study.claim,
            scale=self.scale.name,
            seeds=results.seeds,
            verdict=results.decide(),
            checks=tuple(results.make_checks()),
            folder=self.folder,
            results=results,
        )


def _measure(
    context: StudyContext, places: Mapping[str, _StudyFolder], missing: Sequence[StudyRun], jobs: int, on_event: OnEvent
) -> list[tuple[StudyRun, str]]:
    """Measure the missing runs and write their rows. Return what failed: which run, and why."""
    device = device_name(choose_device(context.device))
    about = {
        "machine": {"device": device, "jobs": min(jobs, len(missing)), **_list_versions()},
        "commit": read_commit(),
    }
    time_left = _TimeLeft(missing)
    failures = []
    for outcome in measure_runs(context, missing, jobs, on_event):
        run, row = outcome.run, outcome.row
        if row is None:
            failures.append((run, outcome.failure))
        else:
            when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            places[run.study.name].add({**row, **about, "date": when})
        on_event(
            "measured",
            {
                "study": run.study.name,
                "arm": run.arm.name,
                "seed": run.seed,
                "unit": run.study.unit,
                "value": None if row is None else row["measured"][run.study.metric],
                "failure": outcome.failure,
                **time_left.count(run),
            },
        )
    return failures


def _list_versions() -> dict[str, str]:
    import torch

    from vitrail import __version__

    return {"torch": torch.__version__, "vitrail": __version__}


class _TimeLeft:
    """Estimates how long the remaining runs take, from those that are done and the weights of their arms."""

    def __init__(self, runs: Sequence[StudyRun], clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._count = sum(run.arm.weight for run in runs), len(runs)
        self._done, self._number, self._clock = 0.0, 0, clock
        self._began = clock()

    def count(self, run: StudyRun) -> dict[str, float]:
        """Count a run as done, and return how many are, of how many, and the seconds that are left."""
        self._done, self._number = self._done + run.arm.weight, self._number + 1
        left = (self._clock() - self._began) * (self._total / self._done - 1)
        return {"done": self._number, "total": self._count, "seconds_left": max(left, 0.0)}
