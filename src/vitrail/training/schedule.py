"""The learning rate as a function of the step, so that there is no state to save."""

from __future__ import annotations

import math


def learning_rate(step: int, *, base: float, steps: int, warmup_steps: int, decay: str, final: float = 0.0) -> float:
    """Return the learning rate of a step, counted from 0.

    It grows linearly from 0 to `base` during the warm-up, then decays to `final` at `steps`. The first warm-up step has
    base / warmup_steps, so that every step has an effect; the last step is the last one above `final`.
    """
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    left = (steps - step) / max(steps - warmup_steps, 1)
    match decay:
        case "cosine":
            # (1 − cos π·left) / 2, without its cancelling near the end
            return final + (base - final) * math.sin(math.pi * left / 2) ** 2
        case "linear":
            return final + (base - final) * left
        case "none":
            return base
    raise AssertionError(decay)
