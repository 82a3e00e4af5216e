"""Run the trials of studies, an arm with a seed each: one after the other, or several at a time on one device."""

from __future__ import annotations

import math
import queue
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.errors import Stopped, VitrailError
from vitrail.studies.results import Row
from vitrail.studies.scales import Scale
from vitrail.studies.study import Arm, Study
from vitrail.studies.study_data import StudyData
from vitrail.studies.workbench import Workbench
from vitrail.system.events import OnEvent, ignore_event

POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Trial:
    """One arm of a study with one seed."""

    study: Study
    arm: Arm
    seed: int


@dataclass(frozen=True)
class Bench:
    """What all trials have in common; it is sent to every process."""

    scale: Scale
    data: StudyData
    trainings: Path
    """The folder of all trainings."""
    device: str


@dataclass(frozen=True)
class TrialOutcome:
    """The row of a trial, or why it has none."""

    trial: Trial
    row: Row | None
    failure: str = ""


def run_trials(bench: Bench, trials: Sequence[Trial], jobs: int, on_event: OnEvent) -> Iterator[TrialOutcome]:
    """Run all trials and yield each outcome as soon as it is there. A trial that fails does not end the others.

    Args:
        bench: The scale, the data and the device.
        trials: What is to be run. With several jobs the first seed of every arm comes before the second, which then
            finds its kernels compiled, and long runs come before short ones.
        jobs: How many run at a time; 1 runs them in this process.
        on_event: Called with the training steps of each trial, if there is one job.
    """
    if jobs == 1 or len(trials) < 2:
        kept: dict[Any, Any] = {}
        for trial in trials:
            yield _run_trial(bench, trial, kept, on_event)
        return
    order = sorted(range(len(trials)), key=lambda index: (trials[index].seed, -trials[index].arm.weight))
    yield from _run_in_processes(bench, trials, order, min(jobs, len(trials)))


def _run_trial(bench: Bench, trial: Trial, kept: dict[Any, Any], on_event: OnEvent) -> TrialOutcome:
    """Run one trial; `kept` holds prepared images from one trial to the next."""
    workbench = Workbench(
        bench.scale, trial.seed, bench.data, bench.trainings, bench.device, on_event=on_event, batches=kept
    )
    began = time.perf_counter()
    try:
        measured = trial.study.measure(workbench, trial.arm)
    except Stopped:
        raise
    except VitrailError as error:
        return TrialOutcome(trial, None, str(error))
    wrong = [name for name, value in measured.items() if not math.isfinite(value)]
    if wrong:
        return TrialOutcome(trial, None, f"{wrong[0]} is no number")
    row = {
        "study": trial.study.name,
        "scale": bench.scale.name,
        "arm": trial.arm.name,
        "settings": dict(trial.arm.settings),
        "facts": dict(trial.arm.facts),
        "seed": trial.seed,
        "measured": {name: float(value) for name, value in measured.items()},
        "cost": {
            "seconds": round(workbench.seconds, 3),
            "flops": workbench.flops,
            "seconds_in_all": round(time.perf_counter() - began, 3),
        },
    }
    return TrialOutcome(trial, row)


# Several processes


def _run_in_processes(bench: Bench, trials: Sequence[Trial], order: Sequence[int], jobs: int) -> Iterator[TrialOutcome]:
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")  # a forked process cannot use CUDA
    waiting, done = context.Queue(), context.Queue()
    for index in order:
        waiting.put(index)
    workers = [
        context.Process(target=_work, args=(bench, list(trials), waiting, done), daemon=True) for _ in range(jobs)
    ]
    for worker in workers:
        worker.start()
    left = set(order)
    try:
        while left:
            try:
                index, row, failure = done.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if any(worker.is_alive() for worker in workers):
                    continue
                failure = f"its process ended (exit code {workers[0].exitcode})"
                for index in sorted(left):
                    yield TrialOutcome(trials[index], None, failure)
                return
            left.discard(index)
            yield TrialOutcome(trials[index], row, failure)
    finally:
        for worker in workers:
            if left:
                worker.terminate()  # a training saves a checkpoint first
        for worker in workers:
            worker.join()


def _work(bench: Bench, trials: Sequence[Trial], waiting: Any, done: Any) -> None:
    """Run trials until none is left."""
    import torch

    torch.set_num_threads(1)  # many processes share the cores
    kept: dict[Any, Any] = {}
    while True:
        try:
            index = waiting.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return
        try:
            outcome = _run_trial(bench, trials[index], kept, ignore_event)
        except Stopped:
            return
        except Exception as error:
            traceback.print_exc()
            outcome = TrialOutcome(trials[index], None, f"{type(error).__name__}: {error}")
        done.put((index, outcome.row, outcome.failure))
