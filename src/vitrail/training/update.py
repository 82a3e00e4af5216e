"""What follows from a step's gradients: they are clipped, the optimiser makes its step, and once it is known whether
they were finite, the average, sums and counts follow.

Where a device can leave out a step by itself (`Run.deferred`), it is not waited for. It is asked when it already has
the gradients of the next step to work out; weights have not changed in between. A step that is recorded as a whole
(`Run.recorded`) has changed them by then: its average is part of it, and sums and counts alone follow.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from vitrail.errors import Diverged
from vitrail.objectives.metrics import Sums, add
from vitrail.training.clipping import clip_gradients
from vitrail.training.run import Pending, Run


def update(run: Run, sums: Sums, norm: Tensor | None = None) -> None:
    """Settle the step before, and make this one, which summed up to `sums`; unless it is made already, with a gradient
    of length `norm`."""
    settle(run)
    run.pending = under_way(run.progress.step, optimizer_step(run) if norm is None else norm, sums)
    run.progress.step += 1
    if not run.deferred:
        settle(run)


def optimizer_step(run: Run) -> Tensor:
    """Clip the gradient and follow it. Its length."""
    run.scaler.unscale_(run.optimizer)
    norm = clip_gradients(run.learning, run.config.optimizer.clip_norm)
    if run.deferred:
        run.optimizer.found_inf = 1 - norm.isfinite().float()  # type: ignore[attr-defined]
        run.optimizer.step()
    elif norm.isfinite():
        run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    return norm


def under_way(number: int, norm: Tensor, sums: Sums) -> Pending:
    """A step, with its gradient's norm on the way to the CPU."""
    if not norm.is_cuda:
        return Pending(number, norm, None, sums)
    here = norm.to("cpu", non_blocking=True)
    written = torch.cuda.Event()
    written.record()
    return Pending(number, here, written, sums)


def settle(run: Run) -> None:
    """Once it is known whether the last step's gradient was finite: the average, sums and counts."""
    last, progress, run.pending = run.pending, run.progress, None
    if last is None:
        return
    if last.written is not None:
        last.written.synchronize()
    progress.gradient_norm = last.norm.item()
    finite = math.isfinite(progress.gradient_norm)
    if finite:
        if run.average is not None and run.recorded is None:
            run.average.update(last.number)
        add(run.window, last.sums)
    guard(run, finite, last.number + 1)


def catch_up(run: Run) -> None:
    """Settle the last step, and count the waiting as part of it."""
    began = time.perf_counter()
    settle(run)
    if run.step_seconds:
        run.step_seconds[-1] += time.perf_counter() - began


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
