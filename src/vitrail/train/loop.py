"""The training loop: the only one. What is learned is the objective's affair, where and how the run's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.data.loader import Batch, EvaluationLoader, TrainingLoader
from vitrail.data.order import mixed
from vitrail.errors import Stopped, TrainingError
from vitrail.metrics import Sums, add, means
from vitrail.model.cost import cost
from vitrail.objectives.base import Objective
from vitrail.train.averaging import Average
from vitrail.train.checkpoint import Checkpoints
from vitrail.train.config import RunConfig
from vitrail.train.display import Display
from vitrail.train.distributed import Ranks, whole_tensor, without_exchange
from vitrail.train.optim import set_learning_rate
from vitrail.train.records import Records
from vitrail.train.schedule import learning_rate
from vitrail.train.state import named_tensors
from vitrail.train.stopping import stop_requests
from vitrail.train.trackers import Tracker, values_of

FORWARD_AND_BACKWARD = 3
"""A training step costs so many forward passes: the backward pass is two products for each one of the forward's."""


@dataclass
class Progress:
    """Where a run stands, apart from tensors. All of it is in a checkpoint, so that going on is as if never stopped."""

    step: int = 0
    """Steps done."""
    position: int = 0
    """Samples used."""
    skipped: int = 0
    """Steps without a finite gradient, which changed nothing."""
    skipped_in_a_row: int = 0
    best: tuple[int, float] | None = None
    """The step of the best evaluation, and its value."""
    window: dict[str, list[float]] = field(default_factory=dict)
    """Sums since the last record."""
    gradient_norm: float = math.nan
    """Of the last step."""
    seconds: float = 0.0
    """Spent so far, over all starts."""


@dataclass
class Run:
    """Everything that a run is made of, ready to train."""

    config: RunConfig
    steps: int
    ranks: Ranks
    objective: Objective
    module: nn.Module
    """The objective, or what spreads it over ranks: what a training step calls."""
    optimizer: torch.optim.Optimizer
    average: Average | None
    scaler: torch.amp.GradScaler
    precision: torch.dtype
    loader: Callable[[int], TrainingLoader]
    """Batches of training from a position on."""
    training: TrainingLoader
    evaluation: EvaluationLoader | None
    checkpoints: Checkpoints
    records: Records
    trackers: list[Tracker]
    display: Display
    progress: Progress = field(default_factory=Progress)
    window: Sums = field(default_factory=dict)


def train(run: Run) -> None:
    """From where the run stands to its end. A signal ends it earlier, with a checkpoint, by raising Stopped."""
    options, progress = run.config.run, run.progress
    with stop_requests() as asked, run.display as display:
        start = previous = time.perf_counter() - progress.seconds
        while progress.step < run.steps:
            step(run)
            progress.seconds = time.perf_counter() - start
            display.update(progress.step)
            last = progress.step == run.steps
            if last or progress.step % options.log_every == 0:
                previous = record(run, previous)
            pause = time.perf_counter()
            improved = (last or due(progress.step, options.evaluate_every)) and evaluate(run)
            stopping = run.ranks.any(bool(asked))
            if last or stopping or improved or progress.step % options.checkpoint_every == 0:
                save(run)
            previous += time.perf_counter() - pause
            if stopping and not last:
                run.checkpoints.finish()
                raise Stopped(f"stopped after step {progress.step} of {run.steps}: the same command goes on from there")
        run.checkpoints.finish()


def step(run: Run) -> None:
    """One step: gradients of a batch, part by part; the guard; the optimiser; the average."""
    config, progress = run.config, run.progress
    schedule = config.schedule
    rate = learning_rate(
        progress.step,
        base=config.optimizer.learning_rate,
        steps=run.steps,
        warmup_steps=schedule.warmup_steps,
        decay=schedule.decay,
    )
    set_learning_rate(run.optimizer, rate)
    sums: Sums = {}
    for part, key, exchange in parts(run, next(run.training).to(run.ranks.device)):
        with without_exchange(run.module, skip=not exchange):
            with autocast(run):
                outcome = run.module(part, key)
            run.scaler.scale(outcome.loss / config.optimizer.accumulate).backward()
        add(sums, outcome.sums)
    run.scaler.unscale_(run.optimizer)
    norm = clip(run.objective, config.optimizer.clip_norm)
    finite = math.isfinite(norm)
    if finite:
        run.scaler.step(run.optimizer)
        if run.average is not None:
            run.average.update(progress.step)
        add(run.window, sums)
    run.scaler.update()
    run.optimizer.zero_grad()
    progress.step += 1
    progress.position, progress.gradient_norm = run.training.position, norm
    guard(run, finite)


def parts(run: Run, batch: Batch) -> Iterator[tuple[Batch, int, bool]]:
    """The parts that a batch is computed in, each with the key of its randomness, and whether it is the last.

    Randomness is a function of the seed and the step, not of what came before, so that it need not be kept. Dropout
    draws from torch's generator, on each rank its own; all else from the key, the same on all ranks.
    """
    seed, count = run.config.run.seed, run.config.optimizer.accumulate
    size = len(batch.labels) // count
    for number in range(count):
        key = mixed(seed, run.progress.step, number)
        torch.manual_seed(mixed(key, run.ranks.rank) >> 1)
        yield cut(batch, number * size, (number + 1) * size), key, number == count - 1


def cut(batch: Batch, start: int, stop: int) -> Batch:
    """Some of its samples."""
    if (start, stop) == (0, len(batch.labels)):
        return batch
    names = ("images", "labels", "indices", "mask")
    return replace(batch, **{name: getattr(batch, name)[start:stop] for name in names})


def clip(objective: nn.Module, most: float | None) -> float:
    """The length of all gradients together, which are scaled down where it is more than `most`."""
    learning = [parameter for parameter in objective.parameters() if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm([p.grad for p in learning if p.grad is not None])
    total = whole_tensor(total)
    if most is not None:
        torch.nn.utils.clip_grads_with_norm_(learning, most, total)
    return total.item()


def guard(run: Run, finite: bool) -> None:
    """Count steps without a finite gradient; too many in a row end the run."""
    progress, most = run.progress, run.config.run.most_skipped
    progress.skipped += not finite
    progress.skipped_in_a_row = 0 if finite else progress.skipped_in_a_row + 1
    if progress.skipped_in_a_row >= most:
        run.checkpoints.finish()
        kept = run.checkpoints.steps()
        last = f"the checkpoint of step {max(kept)} is from before" if kept else "there is no checkpoint yet"
        raise TrainingError(
            f"no finite gradient in the {most} steps up to step {progress.step}: {last}; a lower "
            "optimizer.learning_rate, a longer schedule.warmup_steps or run.precision=fp32 may help"
        )


def autocast(run: Run) -> AbstractContextManager[Any]:
    """Products in the precision that was asked for."""
    if run.precision == torch.float32:
        return nullcontext()
    return torch.autocast(run.ranks.device.type, run.precision)


def record(run: Run, previous: float) -> float:
    """Write down the steps since the last record, which was at the time `previous`. Gives the time now."""
    now = time.perf_counter()
    progress, batch_size = run.progress, run.training.batch_size
    measured = means(run.ranks.total(run.window))
    steps = progress.step % run.config.run.log_every or run.config.run.log_every
    speed = steps * batch_size / (now - previous)
    flops = FORWARD_AND_BACKWARD * cost(run.objective.model.architecture).flops
    entry = {
        "kind": "train",
        "step": progress.step,
        "epoch": run.training.epoch,
        **measured,
        "learning_rate": max(group["lr"] / group["scale"] for group in run.optimizer.param_groups),
        "gradient_norm": progress.gradient_norm,
        "skipped": progress.skipped,
        "clock": {"seconds": progress.seconds, "images_per_second": speed, "flops_per_second": speed * flops},
    }
    run.window.clear()
    tell(run, entry)
    return now


def evaluate(run: Run) -> bool:
    """Measure on the part set aside, with the average where there is one. Whether it is the best so far."""
    if run.evaluation is None:
        return False
    started, progress = time.perf_counter(), run.progress
    measured = measure(run, run.evaluation)
    better = run.objective.better
    value = measured[better] if better == "accuracy" else -measured[better]
    improved = progress.best is None or value > progress.best[1]
    if improved:
        progress.best = (progress.step, value)
    clock = {"seconds": time.perf_counter() - started}
    part = run.config.data.validate_on
    tell(run, {"kind": "evaluation", "step": progress.step, "part": part, **measured, "clock": clock})
    return improved


@torch.no_grad()
def measure(run: Run, loader: EvaluationLoader) -> dict[str, float]:
    """The means over every sample of a loader, exact on any number of ranks."""
    sums: Sums = {}
    run.objective.eval()
    with run.average.in_place() if run.average is not None else nullcontext():
        for batch in loader:
            with autocast(run):
                outcome = run.objective(batch.to(run.ranks.device), key=mixed(run.config.run.seed))
            add(sums, outcome.sums)
    run.objective.train()
    return means(run.ranks.total(sums))


def tell(run: Run, entry: dict[str, Any]) -> None:
    """Into the records, to the trackers, on the screen: the first rank does."""
    if not run.ranks.first:
        return
    try:
        run.records.append(entry)
    except OSError as error:
        raise TrainingError(f"{run.records.path} cannot be written: {error.strerror or error}") from None
    for tracker in run.trackers:
        tracker.log(entry["step"], values_of(entry))
    run.display.show(entry)


def save(run: Run) -> None:
    """A checkpoint of all that the run goes on from."""
    progress = run.progress
    # Sums since the last record are each rank's own; they are kept as a total, which the first rank takes up again.
    progress.window = {name: pair.tolist() for name, pair in run.ranks.total(run.window).items()}
    if run.ranks.first:
        run.records.bring_to_disk()
    kept = {**vars(progress), "scaler": run.scaler.state_dict()}
    tensors = named_tensors(run.objective, run.optimizer, run.average)
    run.checkpoints.save(progress.step, tensors, kept, best=progress.best[0] if progress.best else None)


def resume(run: Run) -> Path | None:
    """Go on from the newest whole checkpoint, if there is one."""
    run.checkpoints.start()
    path = run.checkpoints.newest()
    if path is None:
        if run.ranks.first:
            run.records.keep_until(0)
        return None
    kept = run.checkpoints.load(path, named_tensors(run.objective, run.optimizer, run.average))
    if kept["scaler"]:
        run.scaler.load_state_dict(kept["scaler"])
    names = vars(run.progress).keys()
    run.progress = Progress(**{name: kept[name] for name in names})
    if run.progress.best is not None:
        run.progress.best = (run.progress.best[0], run.progress.best[1])
    run.training = run.loader(run.progress.position)
    for name, pair in run.progress.window.items():
        total = torch.tensor(pair, dtype=torch.float64, device=run.ranks.device)
        run.window[name] = total if run.ranks.first else torch.zeros_like(total)
    if run.ranks.first:
        run.records.keep_until(run.progress.step)
    return path


def due(step: int, every: int | None) -> bool:
    """Whether it is time for something that happens every so many steps, if at all."""
    return every is not None and step % every == 0


def full_state(run: Run) -> dict[str, Tensor]:
    """The objective's weights, the average's where there is one, whole and on the CPU. Every rank must ask."""
    source = run.average.tensors if run.average is not None else run.objective.state_dict()
    return {name: whole_tensor(tensor.detach()).cpu() for name, tensor in source.items()}
