"""The learning rate as a function of the step, so that there is no state to save."""

from __future__ import annotations

import math
from collections.abc import Sequence


def learning_rate(
    step: int,
    *,
    base: float,
    steps: int,
    warmup_steps: int,
    decay: str,
    final: float = 0.0,
    decay_at: Sequence[int] = (),
) -> float:
    """Return the learning rate of a step, counted from 0.

    It grows linearly from 0 to `base` during the warm-up, then decays to `final` at `steps`. The first warm-up step has
    base / warmup_steps, so that every step has an effect; the last step is the last one above `final`.
    A staircase falls to a tenth after each of the steps `decay_at` instead.
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
        case "staircase":
            return float(base / 10 ** sum(at < step for at in decay_at))
        case "none":
            return base
    raise AssertionError(decay)
