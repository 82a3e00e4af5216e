"""What to do where a batch does not fit into the memory of the device: parts that do fit are found by trying."""

from __future__ import annotations

import torch

from vitrail.data.loader import Batch
from vitrail.system.device import NO_APPLE_MEMORY
from vitrail.training.run import TrainingRun, autocast

OUT_OF_MEMORY = (
    "the GPU has too little memory: a larger optimizer.accumulate computes a batch in more parts, and "
    "run.gradient_checkpointing=true keeps less"
)


def explain_full_memory(run: TrainingRun, batch: Batch, key: int) -> str:
    """Return a message about a batch that did not fit, with the number of parts that would.

    It computes gradients of smaller and smaller parts, so this must be the end of the run. Several ranks cannot try:
    each would wait for the others.
    """
    accumulate, images = run.config.optimizer.accumulate, len(batch.images)
    count = None
    if run.ranks.size == 1 and run.learner.graph_step is None:
        count = find_fitting_parts(run, batch, key, accumulate + 1)
    if count is None:
        return OUT_OF_MEMORY
    fitting = images // count
    return (
        f"{images // accumulate:,} images at a time do not fit into the GPU's memory, {fitting:,} do: give "
        f"optimizer.accumulate={count}, which computes the same batch in more parts (data.batch_size=auto finds it by "
        f"itself), or data.batch_size={fitting}"
    )


def find_fitting_parts(run: TrainingRun, batch: Batch, key: int, fewest: int) -> int | None:
    """Return the smallest number of equal parts, at least `fewest`, of which one fits; None if no image does."""
    images = len(batch.images)
    for count in range(fewest, images + 1):
        if images % count == 0 and fits(run, batch.take(0, images // count), key):
            return count
    return None


def fits(run: TrainingRun, part: Batch, key: int) -> bool:
    """Return whether the gradients of some images can be computed with the memory that there is."""
    run.learner.optimizer.zero_grad()
    try:
        with autocast(run):
            loss = run.learner.objective(part, key).loss
        run.learner.scaler.scale(loss).backward()
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if isinstance(error, torch.OutOfMemoryError) or NO_APPLE_MEMORY in str(error):
            return False
        raise
    finally:
        if run.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
    return True
