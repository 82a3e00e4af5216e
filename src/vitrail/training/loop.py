"""The training loop. There is only one: pre-training, masked patches and fine-tuning differ in their objective."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from vitrail.data.loader import Batch, EvaluationLoader
from vitrail.data.order import derive_seed
from vitrail.data.resident import CachedBatches
from vitrail.errors import DataError, Stopped, TrainingError
from vitrail.model.cost import FORWARD_AND_BACKWARD
from vitrail.objectives.base import Objective
from vitrail.objectives.metrics import Sums, add_sums, compute_means
from vitrail.system.files import describe_reason
from vitrail.training.checkpoint import save_checkpoint
from vitrail.training.config import RunConfig
from vitrail.training.fewshot import embed_batch, gather_features
from vitrail.training.run import Progress, RunState, TrainingRun, autocast
from vitrail.training.step import train_step, wait_for_pending_step
from vitrail.training.stopping import listen_for_stop
from vitrail.training.trackers import name_values
from vitrail.training.validation import (
    compute_choosing_merit,
    compute_merits,
    get_choosing_kind,
    get_metric,
    has_stopped_improving,
    is_usable,
)

T = TypeVar("T")


def train(run: TrainingRun, state: RunState) -> None:
    """Train from the current step to the last.

    Raises:
        Stopped: A signal asked to stop. A checkpoint of the last finished step has been saved.
    """
    options, progress = run.config.run, state.progress
    began = time.perf_counter() - progress.seconds
    with listen_for_stop() as state.stop_request:
        owes_first = options.evaluate_start and progress.step == 0 and not progress.evaluations
        if owes_first:
            progress.owed = [*run.evaluation_kinds]
        if evaluate(run, state) and owes_first:
            save_checkpoint(run, state)  # the start may turn out to be the best
        while progress.step < run.steps and not progress.has_ended and not state.is_stopping:
            train_step(run, state)
            progress.seconds = time.perf_counter() - began
            is_last = progress.step == run.steps or is_out_of_time(run, progress)
            is_recording = is_last or is_due(progress.step, options.log_every)
            if is_recording:
                wait_for_pending_step(run, state)
            progress.seconds = time.perf_counter() - began
            send_event(run, state, "step", {"step": progress.step, "steps": run.steps})
            if is_recording:
                record_training(run, state)
            progress.owed = list_due_evaluations(run, progress.step, is_last)
            is_best = evaluate(run, state)
            progress.has_ended = is_last = is_last or has_stopped_improving(progress.evaluations, run.config)
            if is_last or state.is_stopping or is_best or is_due(progress.step, options.checkpoint_every):
                wait_for_pending_step(run, state)
                send_event(run, state, "checkpoint", {"step": progress.step})
                save_checkpoint(run, state)
    run.checkpoints.finish()
    # A request in the last step counts too: a suite or a sweep must not go on to its next training.
    if run.ranks.any(bool(state.stop_request)):
        raise Stopped(f"stopped after step {progress.step} of {run.steps}: the same command goes on from there")


def is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def list_due_evaluations(run: TrainingRun, step: int, is_last: bool) -> list[str]:
    """Return the kinds of evaluations to make after a step; all of them after the last one."""
    every = {"evaluation": run.config.run.evaluate_every, "fewshot": run.config.run.fewshot_every}
    return [kind for kind in run.evaluation_kinds if is_last or is_due(step, every[kind])]


def is_out_of_time(run: TrainingRun, progress: Progress) -> bool:
    """Return whether a rank has trained for `run.most_seconds`; False if there is no such limit."""
    most = run.config.run.most_seconds
    return most is not None and run.ranks.any(progress.seconds >= most)


def explain_end(progress: Progress, steps: int, config: RunConfig) -> str | None:
    """Return why a run has ended before its last step, and which weights are kept; None if it has not."""
    if not progress.has_ended or progress.step >= steps:
        return None
    why = "its time was over"
    if has_stopped_improving(progress.evaluations, config):
        why = f"{config.schedule.patience} evaluations in a row found nothing better"
    is_best = config.schedule.result == "best" and progress.best is not None
    kept = f"; the weights of step {progress.best[0]:,} are kept" if is_best and progress.best is not None else ""
    return f"the training ended after {progress.step:,} of {steps:,} steps, for {why}{kept}"


def record_training(run: TrainingRun, state: RunState) -> None:
    """Write a record of the steps since the last one."""
    progress, loader = state.progress, run.training_loader
    speed = len(state.step_seconds) * loader.batch_size / sum(state.step_seconds)
    flops = FORWARD_AND_BACKWARD * run.learner.objective.count_flops()
    record = {
        "kind": "train",
        "step": progress.step,
        "epoch": loader.epoch,
        **compute_means(run.ranks.sum_over_ranks(state.window)),
        "learning_rate": max(group["lr"] / group["scale"] for group in run.learner.optimizer.param_groups),
        "gradient_norm": progress.gradient_norm,
        "skipped": progress.skipped,
        "clock": {"seconds": progress.seconds, "images_per_second": speed, "flops_per_second": speed * flops},
    }
    state.window.clear()
    state.step_seconds.clear()
    write_record(run, state, record)
    check_broken_images(run)


def check_broken_images(run: TrainingRun) -> None:
    """Raise a DataError if all ranks together have met too many broken images; each loader counts only its own."""
    broken, most = run.ranks.union(set(run.training_loader.broken)), run.training_loader.most_broken
    if len(broken) > most:
        raise DataError(
            f"{len(broken)} images cannot be used, more than the {most} allowed: `vitrail data check` names them"
        )


def evaluate(run: TrainingRun, state: RunState) -> bool:
    """Make the evaluations that are owed, and return whether one of them is the best so far.

    They may take long, so a stop request ends them. The next start then makes those that are still owed. If the run
    ends because nothing improves, its last weights are evaluated in all ways.
    """
    progress, is_best = state.progress, False
    while progress.owed and not state.is_stopping:
        wait_for_pending_step(run, state)
        began, kind = time.perf_counter(), progress.owed[0]
        measured = measure_validation(run, state) if kind == "evaluation" else measure_fewshot(run, state)
        if state.is_stopping:
            break
        del progress.owed[0]
        if kind == get_choosing_kind(run.config):
            is_best = compare_with_best(run, progress, measured)
            if has_stopped_improving(progress.evaluations, run.config):
                progress.owed = [other for other in run.evaluation_kinds if other != kind]
        clock = {"seconds": time.perf_counter() - began}
        write_record(run, state, {"kind": kind, "step": progress.step, **measured, "clock": clock})
    return is_best


def compare_with_best(run: TrainingRun, progress: Progress, measured: dict[str, Any]) -> bool:
    """Add an evaluation that chooses to those so far, and return whether it is the best."""
    metric = get_metric(run.config)
    merit = compute_choosing_merit(measured, metric, run.config.data)
    is_best = is_usable(merit) and (progress.best is None or merit > progress.best_merit)
    if is_best:
        progress.best, progress.best_merit = (progress.step, merit[0]), merit
    progress.evaluations.append(compute_merits(measured, metric))
    return is_best


def measure_validation(run: TrainingRun, state: RunState) -> dict[str, Any]:
    """Return the measurements on the part set aside, and on each half of it if it is divided."""
    parts = [measure(run, state, loader) for loader in run.evaluation_loaders]
    if state.is_stopping:
        return {}
    measured: dict[str, Any] = {"part": run.config.data.validate_on, **compute_means(add_parts(parts))}
    if len(parts) > 1:
        measured["halves"] = [{"images": int(part["loss"][1]), **compute_means(part)} for part in parts]
    return measured


def measure_fewshot(run: TrainingRun, state: RunState) -> dict[str, Any]:
    """Return the few-shot accuracy. All ranks compute features, and the first one scores them."""
    assert run.fewshot is not None
    task, features = run.fewshot.task, []
    for loader in run.fewshot.loaders:
        batches = compute_batches(run, state, loader, f"{task.name} features", embed_batch)
        if state.is_stopping:
            return {}
        features.append(gather_features(batches, run.ranks))
    scores = task.score(features) if run.ranks.is_first else None
    return {"part": task.name, **run.ranks.broadcast_from_first(scores)}


def add_parts(parts: Sequence[Sums]) -> Sums:
    """Return the sums over all parts together."""
    total: Sums = {}
    for part in parts:
        add_sums(total, part)
    return total


def measure(run: TrainingRun, state: RunState, loader: EvaluationLoader | CachedBatches) -> Sums:
    """Return the sums over all samples of all ranks; only some of them after a stop request."""
    key = derive_seed(run.config.run.seed)
    parts = compute_batches(run, state, loader, "evaluating", lambda objective, batch: objective(batch, key=key).sums)
    return run.ranks.sum_over_ranks(add_parts(parts))


@torch.no_grad()
def compute_batches(
    run: TrainingRun,
    state: RunState,
    loader: EvaluationLoader | CachedBatches,
    task: str,
    compute: Callable[[Objective, Batch], T],
) -> list[T]:
    """Return what is computed for each batch of this rank; a stop request ends the pass.

    The objective is in evaluation mode, and has the averaged weights if there are any.
    """
    objective, average, computed = run.learner.objective, run.learner.average, []
    objective.eval()
    with average.use_in_module() if average is not None else nullcontext():
        send_event(run, state, "progress", {"task": task, "done": 0, "total": len(loader.source)})
        for number, batch in enumerate(loader, start=1):
            state.is_stopping = run.ranks.any(bool(state.stop_request))
            if state.is_stopping:
                break
            with autocast(run):
                computed.append(compute(objective, batch.to(run.ranks.device)))
            done = len(loader.source) * number // len(loader)
            send_event(run, state, "progress", {"task": task, "done": done, "total": len(loader.source)})
    objective.train()
    return computed


def write_record(run: TrainingRun, state: RunState, record: dict[str, Any]) -> None:
    """Write a record to metrics.jsonl, the trackers and the screen. Only the first rank does."""
    if not run.ranks.is_first:
        return
    try:
        run.records.append(record)
    except OSError as error:
        raise TrainingError(
            f"{run.records.path} cannot be written: {describe_reason(error)}; fix this (if the disk is full, free "
            "some space), and start the same command again"
        ) from None
    for tracker in run.trackers:
        tracker.log(record["step"], name_values(record))
    send_event(run, state, record["kind"], record)


def send_event(run: TrainingRun, state: RunState, kind: str, values: dict[str, Any]) -> None:
    """Tell the caller what happens. If the caller answers with a KeyboardInterrupt, the run saves and stops."""
    try:
        run.on_event(kind, values)
    except KeyboardInterrupt:
        state.stop_request.signal = signal.SIGINT
