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
from vitrail.data.resident import KeptBatches, ResidentLoader
from vitrail.errors import DataError, Diverged, Stopped, TrainingError
from vitrail.metrics import Sums, add, means
from vitrail.model.cost import FORWARD_AND_BACKWARD, cost
from vitrail.objectives.base import Objective, Outcome
from vitrail.train.averaging import Average
from vitrail.train.checkpoint import Checkpoints
from vitrail.train.config import RunConfig
from vitrail.train.display import Display
from vitrail.train.distributed import Ranks, whole_tensor, without_exchange
from vitrail.train.optim import set_learning_rate
from vitrail.train.recorded import RecordedLearning
from vitrail.train.records import Records
from vitrail.train.schedule import learning_rate
from vitrail.train.state import named_tensors
from vitrail.train.stopping import Request, stop_requests
from vitrail.train.trackers import Tracker, values_of


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
    owes_evaluation: bool = False
    """One was due when the run was asked to stop."""
    window_total: dict[str, list[float]] = field(default_factory=dict)
    """Sums since the last record, over all ranks."""
    gradient_norm: float = math.nan
    """Of the last step."""
    seconds: float = 0.0
    """Spent so far, over all starts."""


@dataclass
class Pending:
    """A step whose work is under way: whether its gradient is finite is not known here yet."""

    number: int
    norm: Tensor
    """The gradient's, on the CPU, once it is `written`."""
    written: torch.cuda.Event | None
    sums: Sums


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
    loader: Callable[[int], TrainingLoader | ResidentLoader]
    """Batches of training from a position on."""
    training: TrainingLoader | ResidentLoader
    evaluation: EvaluationLoader | KeptBatches | None
    checkpoints: Checkpoints
    records: Records
    trackers: list[Tracker]
    display: Display
    data: str
    """What tells one data set from another."""
    weights: str
    """The same of the weights that it began from; empty for fresh ones, and on all ranks but the first."""
    deferred: bool = False
    """Whether the device itself leaves out a step without a finite gradient, and is not waited for; see `settle`."""
    recorded: RecordedLearning | None = None
    """In place of `learn`, where a step is a CUDA graph."""
    progress: Progress = field(default_factory=Progress)
    pending: Pending | None = None
    window: Sums = field(default_factory=dict)
    """Sums since the last record, on this rank."""
    step_seconds: list[float] = field(default_factory=list)
    """Of the steps since the last record, in this start."""
    asked: Request = field(default_factory=Request)
    """Whether a signal came to this rank."""
    stopping: bool = False
    """Whether one came to any."""


def train(run: Run) -> None:
    """From where the run stands to its end. A signal ends it earlier, with a checkpoint, by raising Stopped."""
    options, progress = run.config.run, run.progress
    began = time.perf_counter() - progress.seconds
    with stop_requests() as run.asked:
        if progress.owes_evaluation:
            evaluate(run)
        while progress.step < run.steps and not run.stopping:
            step(run)
            progress.seconds = time.perf_counter() - began
            run.display.update(progress.step)
            last = progress.step == run.steps
            if last or due(progress.step, options.log_every):
                record(run)
            improved = (last or due(progress.step, options.evaluate_every)) and evaluate(run)
            if last or run.stopping or improved or due(progress.step, options.checkpoint_every):
                save(run)
    run.checkpoints.finish()
    if run.stopping and (progress.step < run.steps or progress.owes_evaluation):
        raise Stopped(f"stopped after step {progress.step} of {run.steps}: the same command goes on from there")


def step(run: Run) -> None:
    """One step: gradients of a batch, part by part; the guard; the optimiser; the average."""
    began, config, progress = time.perf_counter(), run.config, run.progress
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
            add(sums, learn(run, part, key) if run.recorded is None else run.recorded(part, key))
    # Here, before waiting for an accelerator: a connection that broke is noticed in talking, not in waiting.
    run.stopping = run.ranks.any(bool(run.asked))
    settle(run)
    run.scaler.unscale_(run.optimizer)
    norm = clip(run.optimizer, config.optimizer.clip_norm)
    if run.deferred:
        run.optimizer.found_inf = 1 - norm.isfinite().float()  # type: ignore[attr-defined]
        run.optimizer.step()
    elif norm.isfinite():
        run.scaler.step(run.optimizer)
    run.pending = pending(progress.step, norm, sums)
    run.scaler.update()
    run.optimizer.zero_grad()
    progress.step += 1
    progress.position = run.training.position
    if not run.deferred:
        settle(run)
    run.step_seconds.append(time.perf_counter() - began)


def pending(number: int, norm: Tensor, sums: Sums) -> Pending:
    """With the norm on its way to the CPU."""
    if not norm.is_cuda:
        return Pending(number, norm, None, sums)
    here = norm.to("cpu", non_blocking=True)
    written = torch.cuda.Event()
    written.record()
    return Pending(number, here, written, sums)


def settle(run: Run) -> None:
    """What follows from a step's gradient, once it is known whether that is finite: the average, sums and counts.

    A device that is `deferred` is asked when it already has the gradients of the next step to work out, so that it
    never waits for us; weights have not changed in between.
    """
    step, progress, run.pending = run.pending, run.progress, None
    if step is None:
        return
    if step.written is not None:
        step.written.synchronize()
    progress.gradient_norm = step.norm.item()
    finite = math.isfinite(progress.gradient_norm)
    if finite:
        if run.average is not None:
            run.average.update(step.number)
        add(run.window, step.sums)
    guard(run, finite, step.number + 1)


def catch_up(run: Run) -> None:
    """Settle the last step, and count the waiting as part of it."""
    began = time.perf_counter()
    settle(run)
    if run.step_seconds:
        run.step_seconds[-1] += time.perf_counter() - began


def learn(run: Run, batch: Batch, key: int) -> Sums:
    """Add a batch's gradients to those that are there."""
    with autocast(run):
        outcome: Outcome = run.module(batch, key)
    run.scaler.scale(outcome.loss / run.config.optimizer.accumulate).backward()
    return outcome.sums


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


def clip(optimizer: torch.optim.Optimizer, most: float | None) -> Tensor:
    """The length of all gradients together, which are scaled down where it is more than `most`."""
    groups = optimizer.param_groups
    learning = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm([p.grad for p in learning if p.grad is not None])
    total = whole_tensor(total)
    if most is not None:
        torch.nn.utils.clip_grads_with_norm_(learning, most, total)
    return total


def guard(run: Run, finite: bool, done: int) -> None:
    """After `done` steps: count steps without a finite gradient; too many in a row end the run."""
    progress, most = run.progress, run.config.run.most_skipped
    progress.skipped += not finite
    progress.skipped_in_a_row = 0 if finite else progress.skipped_in_a_row + 1
    if progress.skipped_in_a_row >= most:
        run.checkpoints.finish()
        kept = run.checkpoints.steps()
        last = f"the checkpoint of step {max(kept)} is from before" if kept else "there is no checkpoint yet"
        raise Diverged(
            f"no finite gradient in the {most} steps up to step {done}: {last}; run.precision=fp32 may help, "
            "or in another run.folder a lower optimizer.learning_rate or a longer schedule.warmup_steps"
        )


def autocast(run: Run) -> AbstractContextManager[Any]:
    """Products in the precision that was asked for."""
    if run.precision == torch.float32:
        return nullcontext()
    return torch.autocast(run.ranks.device.type, run.precision)


def record(run: Run) -> None:
    """Write down the steps since the last record."""
    catch_up(run)
    progress = run.progress
    measured = means(run.ranks.total(run.window))
    speed = len(run.step_seconds) * run.training.batch_size / sum(run.step_seconds)
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
    run.step_seconds.clear()
    tell(run, entry)
    check_broken(run)


def check_broken(run: Run) -> None:
    """A loader counts the broken images that its rank met; here those of all ranks are counted, each once."""
    found = run.ranks.united(set(run.training.broken))
    if len(found) > run.training.most_broken:
        raise DataError(
            f"{len(found)} images cannot be used, more than the {run.training.most_broken} allowed: "
            "`vitrail data check` names them"
        )


def evaluate(run: Run) -> bool:
    """Measure on the part set aside, with the average where there is one. Whether it is the best so far.

    Who is asked to stop does not begin or go on with what may take long: it is owed, and made up for at the next
    start.
    """
    if run.evaluation is None:
        return False
    catch_up(run)
    started, progress = time.perf_counter(), run.progress
    measured = measure(run, run.evaluation)
    progress.owes_evaluation = measured is None
    if measured is None:
        return False
    value = measured["accuracy"] if run.objective.better == "accuracy" else -measured["loss"]
    improved = math.isfinite(value) and (progress.best is None or value > progress.best[1])
    if improved:
        progress.best = (progress.step, value)
    clock = {"seconds": time.perf_counter() - started}
    part = run.config.data.validate_on
    tell(run, {"kind": "evaluation", "step": progress.step, "part": part, **measured, "clock": clock})
    return improved


@torch.no_grad()
def measure(run: Run, loader: EvaluationLoader | KeptBatches) -> dict[str, float] | None:
    """The means over every sample of a loader, exact on any number of ranks; None where it was asked to stop."""
    sums: Sums = {}
    run.objective.eval()
    with run.average.in_place() if run.average is not None else nullcontext():
        for batch in loader:
            run.stopping = run.ranks.any(bool(run.asked))
            if run.stopping:
                break
            with autocast(run):
                outcome = run.objective(batch.to(run.ranks.device), key=mixed(run.config.run.seed))
            add(sums, outcome.sums)
    run.objective.train()
    return None if run.stopping else means(run.ranks.total(sums))


def tell(run: Run, entry: dict[str, Any]) -> None:
    """Into the records, to the trackers, on the screen: the first rank does."""
    if not run.ranks.first:
        return
    try:
        run.records.append(entry)
    except OSError as error:
        raise TrainingError(
            f"{run.records.path} cannot be written: {error.strerror or error}; mend that, on a full disk by making "
            "room, and start the same command again"
        ) from None
    for tracker in run.trackers:
        tracker.log(entry["step"], values_of(entry))
    run.display.show(entry)


def save(run: Run) -> None:
    """A checkpoint of all that the run goes on from."""
    catch_up(run)
    progress = run.progress
    # Sums since the last record are each rank's own; they are kept as a total, which the first rank takes up again.
    progress.window_total = {name: pair.tolist() for name, pair in run.ranks.total(run.window).items()}
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
    for name, pair in run.progress.window_total.items():
        total = torch.tensor(pair, dtype=torch.float64, device=run.ranks.device)
        run.window[name] = total if run.ranks.first else torch.zeros_like(total)
    if run.ranks.first:
        run.records.keep_until(run.progress.step, run.progress.owes_evaluation)
    return path


def due(step: int, every: int | None) -> bool:
    """Whether it is time for something that happens every so many steps, if at all."""
    return every is not None and step % every == 0


def full_state(run: Run) -> dict[str, Tensor]:
    """The objective's weights, the average's where there is one, whole and on the CPU. Every rank must ask."""
    source = run.average.tensors if run.average is not None else run.objective.state_dict()
    return {name: whole_tensor(tensor.detach()).cpu() for name, tensor in source.items()}
