"""The training loop: the only one. What is learned is the objective's affair, where and how the run's."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.data.loader import Batch, EvaluationLoader
from vitrail.data.order import derive_seed
from vitrail.data.resident import CachedBatches
from vitrail.errors import DataError, Stopped, TrainingError
from vitrail.model.cost import FORWARD_AND_BACKWARD, compute_cost
from vitrail.objectives.base import Outcome
from vitrail.objectives.metrics import Sums, add, means
from vitrail.training.distributed import whole_tensor, without_exchange
from vitrail.training.optim import set_learning_rate
from vitrail.training.run import Progress, Run
from vitrail.training.schedule import learning_rate
from vitrail.training.state import name_tensors
from vitrail.training.stopping import stop_requests
from vitrail.training.trackers import values_of
from vitrail.training.update import catch_up, update


def train(run: Run) -> None:
    """From where the run stands to its end. A signal ends it earlier, with a checkpoint, by raising Stopped."""
    options, progress = run.config.run, run.progress
    began = time.perf_counter() - progress.seconds
    with stop_requests() as run.asked:
        if progress.owes_evaluation:
            evaluate(run)
        while progress.step < run.steps and not run.stopping:
            step(run)
            last = progress.step == run.steps
            recording = last or due(progress.step, options.log_every)
            if recording:
                catch_up(run)
            progress.seconds = time.perf_counter() - began
            run.display.update(progress.step)
            if recording:
                record(run)
            improved = (last or due(progress.step, options.evaluate_every)) and evaluate(run)
            if last or run.stopping or improved or due(progress.step, options.checkpoint_every):
                save(run)
    run.checkpoints.finish()
    if run.stopping and (progress.step < run.steps or progress.owes_evaluation):
        raise Stopped(f"stopped after step {progress.step} of {run.steps}: the same command goes on from there")


def step(run: Run) -> None:
    """One step: the gradients of a batch, part by part, and what follows from them."""
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
    sums, norm = learn_all(run, next(run.training).to(run.ranks.device))
    # Here, before waiting for an accelerator: a connection that broke is noticed in talking, not in waiting.
    run.stopping = run.ranks.any(bool(run.asked))
    update(run, sums, norm)
    progress.position = run.training.position
    run.step_seconds.append(time.perf_counter() - began)


def learn_all(run: Run, batch: Batch) -> tuple[Sums, Tensor | None]:
    """The gradients of a batch, part by part. Where a step is recorded, which has one part, all of it, and how long its
    gradient was."""
    sums: Sums = {}
    for part, key, exchange in parts(run, batch):
        if run.recorded is not None:
            return run.recorded(part, key, run.progress.step)
        with without_exchange(run.module, skip=not exchange):
            add(sums, learn(run, part, key))
    return sums, None


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
        key = derive_seed(seed, run.progress.step, number)
        torch.manual_seed(derive_seed(key, run.ranks.rank) >> 1)
        yield cut(batch, number * size, (number + 1) * size), key, number == count - 1


def cut(batch: Batch, start: int, stop: int) -> Batch:
    """Some of its samples."""
    if (start, stop) == (0, len(batch.labels)):
        return batch
    names = ("images", "labels", "indices", "mask")
    return replace(batch, **{name: getattr(batch, name)[start:stop] for name in names})


def autocast(run: Run) -> AbstractContextManager[Any]:
    """Products in the precision that was asked for."""
    if run.precision == torch.float32:
        return nullcontext()
    return torch.autocast(run.ranks.device.type, run.precision)


def record(run: Run) -> None:
    """Write down the steps since the last record."""
    progress = run.progress
    measured = means(run.ranks.sum_over_ranks(run.window))
    speed = len(run.step_seconds) * run.training.batch_size / sum(run.step_seconds)
    flops = FORWARD_AND_BACKWARD * compute_cost(run.objective.model.architecture).flops
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
    found = run.ranks.union(set(run.training.broken))
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
def measure(run: Run, loader: EvaluationLoader | CachedBatches) -> dict[str, float] | None:
    """The means over every sample of a loader, exact on any number of ranks; None where it was asked to stop."""
    sums: Sums = {}
    run.objective.eval()
    with run.average.in_place() if run.average is not None else nullcontext():
        for batch in loader:
            run.stopping = run.ranks.any(bool(run.asked))
            if run.stopping:
                break
            with autocast(run):
                outcome = run.objective(batch.to(run.ranks.device), key=derive_seed(run.config.run.seed))
            add(sums, outcome.sums)
    run.objective.train()
    return None if run.stopping else means(run.ranks.sum_over_ranks(sums))


def tell(run: Run, entry: dict[str, Any]) -> None:
    """Into the records, to the trackers, on the screen: the first rank does."""
    if not run.ranks.is_first:
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
    progress.window_total = {name: pair.tolist() for name, pair in run.ranks.sum_over_ranks(run.window).items()}
    if run.ranks.is_first:
        run.records.bring_to_disk()
    kept = {**vars(progress), "scaler": run.scaler.state_dict()}
    tensors = name_tensors(run.objective, run.optimizer, run.average)
    run.checkpoints.save(progress.step, tensors, kept, best=progress.best[0] if progress.best else None)


def resume(run: Run) -> Path | None:
    """Go on from the newest whole checkpoint, if there is one."""
    run.checkpoints.start()
    path = run.checkpoints.newest()
    if path is None:
        if run.ranks.is_first:
            run.records.keep_until(0)
        return None
    kept = run.checkpoints.load(path, name_tensors(run.objective, run.optimizer, run.average))
    if kept["scaler"]:
        run.scaler.load_state_dict(kept["scaler"])
    names = vars(run.progress).keys()
    run.progress = Progress(**{name: kept[name] for name in names})
    if run.progress.best is not None:
        run.progress.best = (run.progress.best[0], run.progress.best[1])
    run.training = run.loader(run.progress.position)
    for name, pair in run.progress.window_total.items():
        total = torch.tensor(pair, dtype=torch.float64, device=run.ranks.device)
        run.window[name] = total if run.ranks.is_first else torch.zeros_like(total)
    if run.ranks.is_first:
        run.records.keep_until(run.progress.step, run.progress.owes_evaluation)
    return path


def due(step: int, every: int | None) -> bool:
    """Whether it is time for something that happens every so many steps, if at all."""
    return every is not None and step % every == 0


def full_state(run: Run) -> dict[str, Tensor]:
    """The objective's weights, the average's where there is one, whole and on the CPU. Every rank must ask."""
    source = run.average.tensors if run.average is not None else run.objective.state_dict()
    return {name: whole_tensor(tensor.detach()).cpu() for name, tensor in source.items()}
