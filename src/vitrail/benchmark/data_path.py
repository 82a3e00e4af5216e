"""Measure the data path: the images per second of the loader, and whether it keeps up with training.

A training step whose batches come from the loader is compared with one whose batch is already on the device. Step and
loader are those of training. Every turn starts a new loader, so that no process reads ahead during the other turns; it
is timed after the batches that its workers had in stock are used up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from vitrail.benchmark.case import OURS, Case, count_parameters
from vitrail.benchmark.measure import CandidateFacts, CaseTimer, MeasureOptions, check_memory, release_memory
from vitrail.benchmark.report import FED, RESIDENT, Measurements
from vitrail.data.loader import Batch, TrainingLoader
from vitrail.data.open import Data, list_splits, name_data, open_data
from vitrail.data.parallel import resolve_worker_count
from vitrail.data.sources.source import Source
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.fast.timing import PeakMemory, Stopwatch
from vitrail.model.cost import FORWARD_AND_BACKWARD, compute_cost
from vitrail.system.ranks import Ranks
from vitrail.training.build import build_run, build_training_loader, prepare_run
from vitrail.training.config import DataConfig, ModelConfig, RunConfig, RunSection, ScheduleConfig
from vitrail.training.run import RunState
from vitrail.training.step import train_step

SUPPLY_SECONDS = 2.0
"""Shortest turn of the data path: its batches come in bursts."""
STOCK = 2
"""Batches that torch lets each worker prepare ahead."""
STEPS = 1_000_000
"""Length of the run, which is never finished."""
WARM_UPS = 3
SIZED_IMAGES = 64
"""Images whose mean size is reported."""


@dataclass(frozen=True)
class DataSupply:
    """A source of images, and the number of processes that read it."""

    data: str
    """Its name."""
    source: Source
    workers: int

    @classmethod
    def open(cls, data: Data, workers: int | None, cases: Sequence[Case]) -> DataSupply:
        """Open the split "train", or everything if there are no splits; `workers`: one for each core if None."""
        source, name = open_data(data, "train" if list_splits(data) else None), name_data(data)
        most = max(case.batch for case in cases)
        if most > len(source):
            raise ConfigError(f"--batch {most} is more than the {len(source)} images of {name}: give a smaller one")
        return cls(name, source, resolve_worker_count(None) if workers is None else workers)

    def start_loader(self, case: Case, position: int) -> TrainingLoader:
        """Start a loader as training does, with the paper's crop and flip, at a position in images."""
        a = case.architecture
        return TrainingLoader(
            self.source,
            case.batch,
            a.image_size,
            channels=a.in_channels,
            position=position,
            workers=self.workers,
            pin_memory=case.device.type == "cuda",
        )

    def describe(self) -> str:
        """Return a line with the number of images, their mean size, and the number of workers."""
        sizes = []
        for index in range(0, len(self.source), -(-len(self.source) // SIZED_IMAGES)):
            with suppress(DataError):
                content = self.source.read_checked(index).content
                sizes.append(content.nbytes if isinstance(content, Tensor) else len(content))
        mean = f", {sum(sizes) / len(sizes) / 1000:,.0f} kB each on average" if sizes else ""
        return f"data: {len(self.source):,} images{mean}; {self.workers} workers"


def measure_data_path(
    case: Case, supply: DataSupply, options: MeasureOptions, compiles: bool | None = None
) -> Measurements:
    """Measure the loader alone ("loader"), or the training step with and without it ("end-to-end").

    `compiles`: whether the trained model is compiled; None: as `vitrail train` decides.
    """
    timer = CaseTimer(case, options, supply.data)
    try:
        if case.what == "loader":
            _measure_loader(timer, supply)
        else:
            _measure_end_to_end(timer, supply, compiles)
    except (VitrailError, RuntimeError) as error:  # RuntimeError: out of memory
        timer.record_failure((OURS, ""), error)
    if compiles is not False:
        torch.compiler.reset()
    release_memory(case.device)
    return timer.results


def _measure_loader(timer: CaseTimer, supply: DataSupply) -> None:
    case, position = timer.case, 0

    def turn() -> list[float]:
        nonlocal position
        loader = supply.start_loader(case, position)
        seconds = time_from_loader(timer.watch, lambda: next(loader).to(case.device), supply.workers)
        position = loader.position
        return seconds

    key = (OURS, _name_workers(supply.workers))
    timer.time_turns({key: turn}, lambda key: CandidateFacts(0, "uint8", None, None), 0)


def _measure_end_to_end(timer: CaseTimer, supply: DataSupply, compiles: bool | None) -> None:
    case, position = timer.case, 0
    check_memory(case)
    memory = PeakMemory(case.device)
    config, state = make_run_config(case, supply, compiles), RunState()
    setup = prepare_run(config, Ranks(0, 1, case.device), source=supply.source)
    run = build_run(setup, state.progress)
    same_batch = cast(TrainingLoader, RepeatedBatch(next(run.training_loader).to(case.device)))
    run = replace(run, training_loader=same_batch)

    def run_with_loader() -> list[float]:
        nonlocal position
        fed_run = replace(run, training_loader=build_training_loader(setup, position))
        seconds = time_from_loader(timer.watch, lambda: train_step(fed_run, state), supply.workers)
        position = fed_run.training_loader.position
        return seconds  # the workers end with their loader

    def run_without_loader() -> list[float]:
        train_step(run, state)
        return [time_bursts(timer.watch, lambda: train_step(run, state), 1)]

    for _ in range(WARM_UPS):  # the first compiles
        train_step(run, state)
    memory.restart()
    turns = {
        (OURS, f"{FED}, {_name_workers(supply.workers)}"): run_with_loader,
        (OURS, RESIDENT): run_without_loader,
    }
    model = run.learner.objective.model
    flops = compute_cost(model.architecture).flops * case.batch * FORWARD_AND_BACKWARD
    timer.time_turns(
        turns, lambda key: CandidateFacts(count_parameters(model), case.precision, memory.peak(), None), flops
    )


def make_run_config(case: Case, supply: DataSupply, compiles: bool | None) -> RunConfig:
    """Return the configuration of a plain training of the case's model, as for `vitrail train`. It writes nothing."""
    return RunConfig(
        model=ModelConfig(name=case.name, image_size=case.architecture.image_size),
        data=DataConfig(source=supply.data, validate_on="none", batch_size=case.batch, workers=supply.workers),
        schedule=ScheduleConfig(steps=STEPS),
        run=RunSection(device=str(case.device), precision=case.precision, compile=compiles),
    )


class RepeatedBatch:
    """Stands in for a loader: returns the same batch again and again."""

    position = 0

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __next__(self) -> Batch:
        return self._batch


def time_from_loader(watch: Stopwatch, step: Callable[[], object], workers: int) -> list[float]:
    """Return the seconds of a step that takes its batch from a new loader, after the stock is used up."""
    for _ in range(STOCK * workers + 1):
        step()
    return [time_bursts(watch, step, max(workers, 1))]


def time_bursts(watch: Stopwatch, step: Callable[[], object], burst: int) -> float:
    """Return the mean seconds of a step, over whole bursts: workers often finish their batches at the same time."""
    start, count = watch.now(), 0
    while not count or watch.now() - start < SUPPLY_SECONDS:
        for _ in range(burst):
            step()
        count += burst
    return (watch.now() - start) / count


def _name_workers(workers: int) -> str:
    return f"{workers} worker{'s' if workers != 1 else ''}"
