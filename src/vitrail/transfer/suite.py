"""Run a suite: transfer a model to each of its data sets, and compare the results with the paper's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitrail.errors import ConfigError, did_you_mean
from vitrail.system.events import OnEvent, ignore_event, open_listener
from vitrail.system.results import Result, Rows
from vitrail.training.resolve import Settings
from vitrail.transfer import paper_suite, vtab_suite, vtab_tasks
from vitrail.transfer.suite_data import SuiteData, find_suite_data
from vitrail.transfer.suite_plan import RUNS, SuitePlan, TransferTarget, make_config, make_plan
from vitrail.transfer.suite_table import SuiteTable, format_mean, format_results, write_results
from vitrail.transfer.transfer import TransferResult, transfer_to

SuiteName = Literal["paper", "vtab"]


@dataclass(frozen=True)
class Suite:
    """What tells the suites apart."""

    title: str
    sets: Mapping[str, Any]
    make_target: Callable[[SuitePlan, str, SuiteData], TransferTarget]
    make_tables: Callable[[str, dict[str, TransferResult]], list[SuiteTable]]
    list_notes: Callable[[dict[str, TransferResult], SuiteData], list[str]]
    describe_results: Callable[[SuitePlan, dict[str, TransferResult], SuiteData], dict[str, Any]]


SUITES = {
    "paper": Suite(
        "The paper's transfer suite",
        paper_suite.SETS,
        paper_suite.make_target,
        paper_suite.make_tables,
        paper_suite.list_notes,
        paper_suite.describe_results,
    ),
    "vtab": Suite(
        "VTAB",
        vtab_tasks.TASKS,
        vtab_suite.make_target,
        vtab_suite.make_tables,
        vtab_suite.list_notes,
        vtab_suite.describe_results,
    ),
}


@dataclass(frozen=True, repr=False)
class SuiteResult(Result):
    """The results of a suite, by data set, beside those of the paper."""

    suite: str
    model: str
    folder: Path
    """Holds suite.json, suite.md and a folder for each data set."""
    sets: dict[str, TransferResult]
    """For each data set that has data: mean, deviation, runs, learning rate, notes."""
    notes: tuple[str, ...]
    """What differs from the paper, and which data sets are missing."""
    results: tuple[SuiteTable, ...] = field(repr=False)
    """The tables of suite.md."""
    content: dict[str, Any] = field(repr=False)
    """The content of suite.json."""

    def lines(self) -> list[str]:
        """Return the tables and the notes below them as lines of Markdown."""
        return format_results(self.results, self.notes)

    def summary(self) -> Rows:
        titles = SUITES[self.suite].sets
        accuracies = [(titles[name].title, f"{format_mean(each.accuracies)} %") for name, each in self.sets.items()]
        return [("suite", self.suite), ("model", self.model), ("folder", str(self.folder)), *accuracies]

    def tables(self) -> Mapping[str, Sequence[Sequence[str]]]:
        titles = (SUITES[self.suite].title, "Means")
        tables = {title: (table.columns, *table.rows) for title, table in zip(titles, self.results, strict=False)}
        return {**tables, "Notes": [("note",), *((note,) for note in self.notes)]}

    def to_dict(self) -> dict[str, Any]:
        """Return what suite.json holds."""
        return self.content


def run_suite(
    name: SuiteName,
    model: str | Path,
    data: str | Path,
    *,
    folder: str | Path | None = None,
    runs: int = RUNS,
    rates: Sequence[float] | None = None,
    settings: Settings | None = None,
    on_event: OnEvent | None = None,
) -> SuiteResult:
    """Fine-tune a model on each data set of a suite as the paper does, and score it on the test images.

    suite.json and suite.md in the folder grow with every data set. If it is stopped and called again, it goes on:
    finished trainings are not repeated.

    Events, besides those of training and the progress of the task "testing":

        message       text: about an entry of the folder that is no data set
        transfer      set, rates, runs, steps: a data set begins, with these learning rates to try
        trial         set, rate, folder, part, and accuracy and loss or failure: a learning rate was tried
        chosen        set, rate, trials: the learning rate of the runs; with 0 trials it is the only one
        scored        set, seed, rate, folder, hits, count, unreadable, accuracy: a run was scored on the test images
        transferred   set, rate, runs, mean, deviation: a data set is done

    Args:
        name: "paper", the data sets of the paper's table 2, or "vtab", the 19 tasks of VTAB.
        model: MODEL to transfer from, by its name, which the runs keep.
        data: a folder or a TOML file, as vitrail/transfer/suite_data.py describes.
        folder: of the suite; runs/suite-NAME-MODEL if None.
        runs: trainings on all images of each data set, with the seeds 0, 1, …
        rates: learning rates to try instead of the paper's.
        settings: of every run: `key=value` texts, or a dictionary such as {"schedule.steps": 100}.
        on_event: called with what happens; by default a terminal or notebook shows a bar.

    Raises:
        ConfigError: an argument is wrong.
        DataError: a data set is missing or unusable.
        TrainingError: a run failed.
    """
    if name not in SUITES:
        raise ConfigError(f"suite = {name!r}{did_you_mean(name, SUITES) or ':'} there are {' and '.join(SUITES)}")
    suite = SUITES[name]
    plan = make_plan(name, model, folder, runs, settings or (), rates)
    places = find_suite_data(str(data), suite.sets, {**paper_suite.SETS, **vtab_tasks.TASKS})
    with open_listener(on_event if os.environ.get("RANK", "0") == "0" else ignore_event) as listener:
        for remark in places.remarks:
            listener("message", {"text": remark})
        targets = [suite.make_target(plan, each, places) for each in places.sets]
        for target in targets:
            make_config(plan, target)  # raises errors before anything is trained
        results: dict[str, TransferResult] = {}
        for target in targets:
            results[target.name] = transfer_to(plan, target, listener)
            result = _collect_results(name, plan, results, places)
            write_results(plan.folder, f"{suite.title}: {plan.model}", result.lines(), result.content)
    return result


def _collect_results(name: str, plan: SuitePlan, results: dict[str, TransferResult], places: SuiteData) -> SuiteResult:
    suite, results = SUITES[name], dict(results)
    notes = tuple(suite.list_notes(results, places))
    tables = tuple(suite.make_tables(plan.model, results))
    content = suite.describe_results(plan, results, places)
    return SuiteResult(name, plan.model, plan.folder, results, notes, tables, content)
