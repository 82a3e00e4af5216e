"""The learning rate as a function of the step: nothing to keep, nothing to restore."""

from __future__ import annotations

import math


def learning_rate(step: int, *, base: float, steps: int, warmup_steps: int, decay: str) -> float:
    """Of the step with this number, counted from 0.

    In a line from 0 to `base` over the warm-up, then down to 0 at `steps`. The first step of a warm-up has
    1/warmup_steps of the base, so that no step is without effect; the last step of all is the last above 0.
    """
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    left = (steps - step) / max(steps - warmup_steps, 1)
    match decay:
        case "cosine":
            return base * math.sin(math.pi * left / 2) ** 2  # (1 − cos π·left) / 2, without its cancelling near the end
        case "linear":
            return base * left
        case "none":
            return base
    raise AssertionError(decay)
