"""One training step: the gradients of a batch, and the update that follows from them.

Steps without a finite gradient are skipped. If the device can skip one by itself (`Learner.skips_on_device`), the CPU
does not wait for it: the step stays pending, and the CPU asks for its result when the device already computes the next
step's gradients. Weights have not changed in between, so the average is still updated from the right ones. A
`GraphStep` has changed them by then; it updates the average itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from vitrail.data.loader import Batch
from vitrail.data.order import derive_seed
from vitrail.errors import Diverged, TrainingError
from vitrail.objectives.base import Outcome
from vitrail.objectives.metrics import Sums, add_sums
from vitrail.training.clipping import clip_gradients
from vitrail.training.distributed import skip_gradient_sync
from vitrail.training.memory import explain_full_memory
from vitrail.training.optim import set_learning_rate
from vitrail.training.run import Learner, PendingStep, Progress, RunState, TrainingRun, autocast
from vitrail.training.schedule import learning_rate


def train_step(run: TrainingRun, state: RunState) -> None:
    """Take the next batch, compute its gradients and update the weights."""
    began, config, progress = time.perf_counter(), run.config, state.progress
    schedule = config.schedule
    rate = learning_rate(
        progress.step,
        base=config.optimizer.learning_rate,
        steps=run.steps,
        warmup_steps=schedule.warmup_steps,
        decay=schedule.decay,
        final=schedule.final_learning_rate,
        decay_at=schedule.decay_at,
    )
    set_learning_rate(run.learner.optimizer, rate)
    batch = next(run.training_loader).to(run.ranks.device)
    sums, norm = compute_gradients(run, progress.step, batch)
    # Ranks talk here, before they wait for an accelerator: a broken connection is noticed in talking, not in waiting.
    state.is_stopping = run.ranks.any(bool(state.stop_request))
    finish_pending_step(run, state)
    if norm is None:
        norm = update_weights(run.learner, config.optimizer.clip_norm)
    run.learner.objective.finish_step((progress.step + 1) / run.steps)
    state.pending_step = start_pending_step(progress.step, norm, sums)
    progress.step += 1
    if not run.learner.skips_on_device:
        finish_pending_step(run, state)
    progress.position = run.training_loader.position
    state.step_seconds.append(time.perf_counter() - began)


def compute_gradients(run: TrainingRun, step: int, batch: Batch) -> tuple[Sums, Tensor | None]:
    """Compute the gradients of a batch, part by part.

    Returns:
        The sums of the batch, and the gradient's length if a `GraphStep` has already updated the weights.

    Raises:
        TrainingError: The GPU has too little memory.
    """
    try:
        return _compute_parts(run, step, batch)
    except torch.OutOfMemoryError:
        pass  # the failed computation is freed only when this block has ended
    raise TrainingError(explain_full_memory(run, batch, derive_seed(run.config.run.seed, step, 0)))


def _compute_parts(run: TrainingRun, step: int, batch: Batch) -> tuple[Sums, Tensor | None]:
    sums: Sums = {}
    for part, key, is_last in split_batch(run, step, batch):
        if run.learner.graph_step is not None:
            return run.learner.graph_step(part, key, step)  # the batch is one part
        with skip_gradient_sync(run.learner.module, skip=not is_last):
            with autocast(run):
                outcome: Outcome = run.learner.module(part, key)
            run.learner.scaler.scale(outcome.loss / run.config.optimizer.accumulate).backward()
        add_sums(sums, outcome.sums)
    return sums, None


def split_batch(run: TrainingRun, step: int, batch: Batch) -> Iterator[tuple[Batch, int, bool]]:
    """Yield the parts that a batch is computed in, each with its random key and whether it is the last.

    Randomness depends on the seed and the step alone, so no generator's state has to be saved. Dropout draws from
    torch's generator, which differs from rank to rank; everything else uses the key, which is the same on all ranks.
    vitrail's kernels draw dropout by the number of each image in the step, so neither ranks nor parts change it.
    """
    count = run.config.optimizer.accumulate
    size = len(batch.images) // count
    first_image = run.ranks.rank * len(batch.images)
    for number in range(count):
        key = derive_seed(run.config.run.seed, step, number)
        torch.manual_seed(derive_seed(key, run.ranks.rank) >> 1)
        if run.learner.fused is not None:
            run.learner.fused.set_step(derive_seed(run.config.run.seed, step), first_image + number * size)
        part = batch if count == 1 else batch.take(number * size, (number + 1) * size)
        yield part, key, number == count - 1


def update_weights(learner: Learner, clip_norm: float | None) -> Tensor:
    """Clip the gradient, let the optimizer step unless the gradient is not finite, and return the gradient's length."""
    learner.scaler.unscale_(learner.optimizer)
    norm = clip_gradients(learner.parameters, clip_norm)
    if learner.skips_on_device:
        learner.optimizer.found_inf = 1 - norm.isfinite().float()  # type: ignore[attr-defined]
        learner.optimizer.step()
    elif norm.isfinite():
        learner.scaler.step(learner.optimizer)
    learner.scaler.update()
    learner.optimizer.zero_grad()
    return norm


def start_pending_step(number: int, norm: Tensor, sums: Sums) -> PendingStep:
    """Start copying a gradient's length to the CPU, without waiting for it."""
    if not norm.is_cuda:
        return PendingStep(number, norm, None, sums)
    on_cpu = norm.to("cpu", non_blocking=True)
    norm_copied = torch.cuda.Event()
    norm_copied.record()
    return PendingStep(number, on_cpu, norm_copied, sums)


def finish_pending_step(run: TrainingRun, state: RunState) -> None:
    """Wait until the gradient's length is known. If it is finite, update the average and the sums."""
    pending, progress, state.pending_step = state.pending_step, state.progress, None
    if pending is None:
        return
    if pending.norm_copied is not None:
        pending.norm_copied.synchronize()
    progress.gradient_norm = pending.norm.item()
    is_finite = math.isfinite(progress.gradient_norm)
    if is_finite:
        if run.learner.average is not None and run.learner.graph_step is None:
            run.learner.average.update(pending.number)
        add_sums(state.window, pending.sums)
    count_skipped_step(run, progress, is_finite, pending.number + 1)


def wait_for_pending_step(run: TrainingRun, state: RunState) -> None:
    """Finish the pending step, and count the waiting as part of its duration."""
    began = time.perf_counter()
    finish_pending_step(run, state)
    if state.step_seconds:
        state.step_seconds[-1] += time.perf_counter() - began


def count_skipped_step(run: TrainingRun, progress: Progress, is_finite: bool, steps_done: int) -> None:
    """Count a step that was skipped, and end the run after too many in a row.

    Raises:
        Diverged: `run.most_skipped` steps in a row had no finite gradient.
    """
    most = run.config.run.most_skipped
    progress.skipped += not is_finite
    progress.skipped_in_a_row = 0 if is_finite else progress.skipped_in_a_row + 1
    if progress.skipped_in_a_row >= most:
        run.checkpoints.finish()
        saved_steps = run.checkpoints.list_steps()
        last = (
            f"the checkpoint of step {max(saved_steps)} is from before" if saved_steps else "there is no checkpoint yet"
        )
        raise Diverged(
            f"no finite gradient in the {most} steps up to step {steps_done}: {last}; run.precision=fp32 may help, "
            "or in another run.folder a lower optimizer.learning_rate or a longer schedule.warmup_steps"
        )
