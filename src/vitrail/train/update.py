"""What follows from a step's gradients: they are clipped, the optimiser makes its step, and once it is known whether
they were finite, the average, sums and counts follow.

Where a device can leave out a step by itself (`Run.deferred`), it is not waited for. It is asked when it already has
the gradients of the next step to work out; weights have not changed in between.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vitrail.errors import Diverged
from vitrail.metrics import Sums, add
from vitrail.train.distributed import whole_tensor
from vitrail.train.run import Pending, Run


def update(run: Run, sums: Sums) -> None:
    """Settle the step before, and make this one, which summed up to `sums`."""
    settle(run)
    run.scaler.unscale_(run.optimizer)
    norm = clip(run.learning, run.config.optimizer.clip_norm)
    if run.deferred:
        run.optimizer.found_inf = 1 - norm.isfinite().float()  # type: ignore[attr-defined]
        run.optimizer.step()
    elif norm.isfinite():
        run.scaler.step(run.optimizer)
    run.pending = under_way(run.progress.step, norm, sums)
    run.scaler.update()
    run.optimizer.zero_grad()
    run.progress.step += 1
    if not run.deferred:
        settle(run)


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
        if run.average is not None:
            run.average.update(last.number)
        add(run.window, last.sums)
    guard(run, finite, last.number + 1)


def catch_up(run: Run) -> None:
    """Settle the last step, and count the waiting as part of it."""
    began = time.perf_counter()
    settle(run)
    if run.step_seconds:
        run.step_seconds[-1] += time.perf_counter() - began


def clip(parameters: Iterable[nn.Parameter], most: float | None) -> Tensor:
    """The length of all gradients together, which are scaled down where it is more than `most`."""
    learning = [parameter for parameter in parameters if parameter.grad is not None]
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
