"""The data path: images a second that the loader delivers, and a training step that it feeds beside one whose batch
lies on the device already.

The step is the training loop's own, with the loader that training has. Every turn starts a loader of its own, so that
no process reads ahead while the others have their turn; it is timed once the batches are used up that its workers had
ready in stock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from vitrail.benchmark.case import OURS, PRECISIONS, Case, Key, Missing
from vitrail.benchmark.measure import PRODUCT, TURN_SECONDS, Facts, Tell, check_memory, reason, release, row
from vitrail.benchmark.peers import parameters_of
from vitrail.benchmark.report import FED, RESIDENT, Measured, product_record
from vitrail.data.loader import Batch, TrainingLoader
from vitrail.data.parallel import resolve_worker_count
from vitrail.data.sources.source import Source
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.fast.timing import PeakMemory, ReferenceProduct, Stopwatch, take_turns
from vitrail.model.cost import FORWARD_AND_BACKWARD, compute_cost
from vitrail.system.ranks import Ranks
from vitrail.training.build import build_run, open_training_data
from vitrail.training.config import DataConfig, ModelConfig, RunConfig, RunSection, ScheduleConfig
from vitrail.training.loop import step

SUPPLY_SECONDS = 2.0
"""What a turn of the data path lasts at least: its batches come in bursts."""
STOCK = 2
"""Batches that torch lets each worker have ready."""
STEPS = 1_000_000
"""Of a run that is never finished."""
WARM_UPS = 3
LOOKED_AT = 64
"""Images that the size of a file is the mean of."""

Failed = Callable[[Key, Exception], None]


@dataclass(frozen=True)
class Supply:
    """Where images come from, and how many processes read them."""

    data: str
    source: Source
    workers: int

    @classmethod
    def opened(cls, data: str, workers: int | None, cases: Sequence[Case]) -> Supply:
        """The training part of data that `vitrail train` would take; as many workers as cores if None."""
        source = open_training_data(DataConfig(source=data, validate_on="none")).training
        most = max(case.batch for case in cases)
        if most > len(source):
            raise ConfigError(f"--batch {most} is more than the {len(source)} images of {data}: give a smaller one")
        return cls(data, source, resolve_worker_count(None) if workers is None else workers)

    def loader(self, case: Case, position: int) -> TrainingLoader:
        """As training has it, with the paper's crop and flip."""
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

    def described(self) -> str:
        """How many images, and how large."""
        sizes = []
        for index in range(0, len(self.source), -(-len(self.source) // LOOKED_AT)):
            with suppress(DataError):
                content = self.source.read_checked(index).content
                sizes.append(content.nbytes if isinstance(content, Tensor) else len(content))
        mean = f", {sum(sizes) / len(sizes) / 1000:,.0f} kB each on average" if sizes else ""
        return f"data: {len(self.source):,} images{mean}; {self.workers} workers"


def measure_supply(
    case: Case,
    supply: Supply,
    *,
    compiles: bool | None,
    rounds: int,
    tell: Tell = lambda line: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """The loader alone, or the training step with it and without."""
    tell(f"{case}: building")
    found, watch = Measured(), Stopwatch(case.device, clock)

    def failed(key: Key, error: Exception) -> None:
        told = reason(error).replace(supply.data, "DATA")  # it is kept, and where the images are is nobody's business
        found.missing.append(Missing(str(case), *key, told))
        tell(str(found.missing[-1]))

    try:
        if case.what == "loader":
            _measure_loader(case, supply, found, watch, rounds, failed)
        else:
            _measure_end_to_end(case, supply, found, watch, rounds, failed, compiles)
    except (VitrailError, RuntimeError) as error:  # the latter where there is no memory
        failed((OURS, ""), error)
    if compiles is not False:
        torch.compiler.reset()
    release(case.device)
    return found


def _measure_loader(case: Case, supply: Supply, found: Measured, watch: Stopwatch, rounds: int, failed: Failed) -> None:
    position = 0

    def turn() -> list[float]:
        nonlocal position
        loader = supply.loader(case, position)
        seconds = supplied(watch, lambda: next(loader).to(case.device), supply.workers)
        position = loader.position
        return seconds

    key, facts = (OURS, _crew(supply.workers)), Facts(0, "uint8", None, None)
    for seconds in take_turns({key: turn}, rounds, failed).values():
        found.rows.append(row(case, key, facts, seconds, 0, None))


def _measure_end_to_end(
    case: Case, supply: Supply, found: Measured, watch: Stopwatch, rounds: int, failed: Failed, compiles: bool | None
) -> None:
    check_memory(case)
    product = ReferenceProduct(case.device, PRECISIONS[case.precision])
    memory = PeakMemory(case.device)
    run = build_run(run_config(case, supply, compiles), Ranks(0, 1, case.device))
    resident = cast(TrainingLoader, SameBatch(next(run.loader(0)).to(case.device)))
    position = 0

    def fed() -> list[float]:
        nonlocal position
        run.training = run.loader(position)
        try:
            seconds = supplied(watch, lambda: step(run), supply.workers)
            position = run.training.position
        finally:
            run.training = resident  # the workers end with their loader
        return seconds

    def without() -> list[float]:
        step(run)
        return [bursts(watch, lambda: step(run), 1)]

    run.training = resident
    for _ in range(WARM_UPS):  # the first compiles
        step(run)
    memory.restart()
    calls = watch.count_calls(product, TURN_SECONDS)
    turns = {
        PRODUCT: lambda: [watch.time_calls(product, calls)],
        (OURS, f"{FED}, {_crew(supply.workers)}"): fed,
        (OURS, RESIDENT): without,
    }
    seconds = take_turns(turns, rounds, failed)
    found.products.append(product_record(case, product.flops, seconds.pop(PRODUCT)))
    best, model = found.products[-1]["flops_per_second"], run.objective.model
    flops = compute_cost(model.architecture).flops * case.batch * FORWARD_AND_BACKWARD
    facts = Facts(parameters_of(model), case.precision, memory.peak(), None)
    found.rows.extend(row(case, key, facts, times, flops, best) for key, times in seconds.items())


def run_config(case: Case, supply: Supply, compiles: bool | None) -> RunConfig:
    """A plain training of the case's model on the data, as `vitrail train` would have it. Nothing is written."""
    return RunConfig(
        model=ModelConfig(name=case.name, image_size=case.architecture.image_size),
        data=DataConfig(source=supply.data, validate_on="none", batch_size=case.batch, workers=supply.workers),
        schedule=ScheduleConfig(steps=STEPS),
        run=RunSection(device=str(case.device), precision=case.precision, compile=compiles),
    )


class SameBatch:
    """In the place of a loader: one batch, again and again."""

    position = 0

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __next__(self) -> Batch:
        return self._batch


def supplied(watch: Stopwatch, step: Callable[[], object], workers: int) -> list[float]:
    """Seconds of a step that takes a batch from a new loader: started, and without what was in stock."""
    for _ in range(STOCK * workers + 1):
        step()
    return [bursts(watch, step, max(workers, 1))]


def bursts(watch: Stopwatch, step: Callable[[], object], burst: int) -> float:
    """Seconds of one step among many. Workers are often done all at once, so their batches are counted in rounds."""
    start, count = watch.now(), 0
    while not count or watch.now() - start < SUPPLY_SECONDS:
        for _ in range(burst):
            step()
        count += burst
    return (watch.now() - start) / count


def _crew(workers: int) -> str:
    return f"{workers} worker{'s' if workers != 1 else ''}"
