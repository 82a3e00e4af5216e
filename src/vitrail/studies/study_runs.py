"""The runs of studies, an arm with a seed each: one after the other, or several at a time on one device."""

from __future__ import annotations

import math
import os
import pickle
import queue
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.errors import ConfigError, Stopped, VitrailError
from vitrail.studies.results import Row
from vitrail.studies.scales import Scale
from vitrail.studies.study import Arm, Study
from vitrail.studies.study_data import StudyData
from vitrail.studies.workbench import Workbench
from vitrail.system.events import OnEvent, ignore_event

POLL_SECONDS = 1.0


@dataclass(frozen=True)
class StudyRun:
    """One arm of a study with one seed."""

    study: Study
    arm: Arm
    seed: int

    def __str__(self) -> str:
        return f"{self.study.name}: {self.arm.name}, seed {self.seed}"


@dataclass(frozen=True)
class StudyContext:
    """What all runs have in common; it is sent to every process."""

    scale: Scale
    data: StudyData
    trainings: Path
    """The folder of all trainings."""
    device: str


@dataclass(frozen=True)
class RunOutcome:
    """The row of a run, or why it has none."""

    run: StudyRun
    row: Row | None
    failure: str = ""


def measure_runs(context: StudyContext, runs: Sequence[StudyRun], jobs: int, on_event: OnEvent) -> Iterator[RunOutcome]:
    """Measure every run and yield its outcome as soon as it is there. A run that fails does not end the others.

    Args:
        context: The scale, the data and the device.
        runs: What is to be measured. With several jobs the first seed of every arm comes before the second, which then
            finds its kernels compiled, and long runs come before short ones.
        jobs: How many are measured at a time; a single one in this process.
        on_event: Called with the training steps, if there is one job.
    """
    if jobs > 1 and len(runs) > 1:
        yield from _measure_in_processes(context, runs, min(jobs, len(runs)))
        return
    kept: dict[Any, Any] = {}
    for run in runs:
        yield _measure_run(context, run, kept, on_event)


def _measure_run(context: StudyContext, run: StudyRun, kept: dict[Any, Any], on_event: OnEvent) -> RunOutcome:
    """Measure one run; `kept` holds prepared images from one run to the next."""
    workbench = Workbench(
        context.scale, run.seed, context.data, context.trainings, context.device, on_event=on_event, batches=kept
    )
    began = time.perf_counter()
    try:
        measured = run.study.measure(workbench, run.arm)
        _check_measured(run.study, measured)
    except Stopped:
        raise
    except VitrailError as error:
        return RunOutcome(run, None, str(error))
    except Exception as error:  # a mistake in one measurement must not cost the others
        traceback.print_exc()
        return RunOutcome(run, None, f"{type(error).__name__}: {error}")
    wrong = [name for name, value in measured.items() if not math.isfinite(value)]
    if wrong:
        return RunOutcome(run, None, f"{wrong[0]} is no number")
    row = {
        "study": run.study.name,
        "scale": context.scale.name,
        "arm": run.arm.name,
        "settings": dict(run.arm.settings),
        "facts": dict(run.arm.facts),
        "seed": run.seed,
        "measured": {name: float(value) for name, value in measured.items()},
        "cost": {
            "seconds": round(workbench.seconds, 3),
            "flops": workbench.flops,
            "seconds_in_all": round(time.perf_counter() - began, 3),
        },
    }
    return RunOutcome(run, row)


def _check_measured(study: Study, measured: object) -> None:
    """Raise a ConfigError if a measurement does not return what its study shows."""
    if not isinstance(measured, dict) or study.metric not in measured:
        raise ConfigError(f"the measurement of {study.name} must return {study.metric!r} in a dictionary")


# Several processes


def _measure_in_processes(context: StudyContext, runs: Sequence[StudyRun], jobs: int) -> Iterator[RunOutcome]:
    """Measure runs in processes.

    A process ends after a run that failed, because its device may be unusable then; a new one takes its place.
    """
    import torch.multiprocessing as processes

    spawn = processes.get_context("spawn")  # a forked process cannot use CUDA
    waiting = sorted(range(len(runs)), key=lambda index: (runs[index].seed, -runs[index].arm.weight))
    done = spawn.Queue()
    workers: dict[int, _Worker] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                worker = _Worker(spawn, context, runs, done)
                workers[worker.pid] = worker
                worker.send(waiting.pop(0))
            try:
                pid, row, failure = done.get(timeout=POLL_SECONDS)
            except queue.Empty:
                for pid in [pid for pid, worker in workers.items() if not worker.is_alive()]:
                    worker = workers.pop(pid)
                    yield RunOutcome(runs[worker.index], None, f"its process ended (exit code {worker.exitcode})")
                continue
            if pid not in workers:  # its end was seen before its last message
                continue
            worker = workers[pid]
            yield RunOutcome(runs[worker.index], row, failure)
            if waiting and not failure:
                worker.send(waiting.pop(0))
            else:
                workers.pop(pid).finish()
    finally:
        for worker in workers.values():
            worker.terminate()  # a training saves a checkpoint first


class _Worker:
    """A process that measures runs one after the other."""

    def __init__(self, spawn: Any, context: StudyContext, runs: Sequence[StudyRun], done: Any) -> None:
        self._orders = spawn.Queue()
        self._process = spawn.Process(target=_work, args=(context, list(runs), self._orders, done), daemon=True)
        try:
            self._process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"this study cannot be sent to other processes ({error}): define its functions in a module of its own, "
                "neither in a notebook nor in a function, or give jobs=1"
            ) from None
        self.index = -1

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def exitcode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def is_alive(self) -> bool:
        return bool(self._process.is_alive())

    def send(self, index: int) -> None:
        """Send it the number of the next run."""
        self.index = index
        self._orders.put(index)

    def finish(self) -> None:
        """Tell it that there is nothing more to do, and wait for its end."""
        self._orders.put(None)
        self._process.join()

    def terminate(self) -> None:
        """End it now, and wait for its end."""
        self._process.terminate()
        self._process.join()


def _work(context: StudyContext, runs: Sequence[StudyRun], orders: Any, done: Any) -> None:
    """Measure the runs that are ordered, until there are no more or one fails."""
    import torch

    torch.set_num_threads(1)  # many processes share the cores
    kept: dict[Any, Any] = {}
    while (index := _wait_for_order(orders)) is not None:
        try:
            outcome = _measure_run(context, runs[index], kept, ignore_event)
        except (Stopped, KeyboardInterrupt):
            return
        done.put((os.getpid(), outcome.row, outcome.failure))
        if outcome.failure:
            return


def _wait_for_order(orders: Any) -> int | None:
    """Return the number of the next run; None if there is none, or the person has pressed Ctrl-C."""
    try:
        order: int | None = orders.get()
    except KeyboardInterrupt:
        return None
    return order
