"""The time that a benchmark may take, unless it is to be thorough."""

from __future__ import annotations

import time
from collections.abc import Callable

from vitrail.benchmark.case import Case

DEFAULT_SECONDS = 110.0
"""Without --thorough, nothing is begun that is expected to end later: a benchmark ends within two minutes."""
BUILD_SECONDS = {"cuda": 40.0}
"""Time to reserve for building a candidate, by device: on a GPU kernels may be compiled, on a CPU nothing is."""
FEWEST_STEPS, FEWEST_LATENCY_STEPS = 5, 15
"""Steps that even one round of a candidate takes, with the first call and the warm-up."""
LEFT_OUT = "left out, to end within two minutes: --thorough (thorough=True) measures it"


class TimeLimit:
    """Decides what a benchmark still begins.

    Args:
        seconds: The time from now to the end; None for no limit.
        clock: Returns seconds since any moment.
    """

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self._clock, self._started = seconds, clock, clock()
        self._fastest, self._has_begun = 0.0, False

    def allows(self, expected: float = 0.0) -> bool:
        """Return whether something that takes `expected` seconds would end in time."""
        return self.seconds is None or self._clock() - self._started + expected <= self.seconds

    def begins(self, case: Case, needs_build: bool = False) -> bool:
        """Return whether there is time for a case, or one candidate of it; the first of a benchmark always begins.

        Args:
            case: What is measured.
            needs_build: Whether kernels may have to be compiled for it.
        """
        steps = FEWEST_LATENCY_STEPS if case.what == "latency" else FEWEST_STEPS if case.what != "loader" else 0
        expected = BUILD_SECONDS.get(case.device.type, 0.0) if needs_build else 0.0
        if self._fastest:
            expected += steps * case.flops / self._fastest
        begins = not self._has_begun or self.allows(expected)
        self._has_begun = True
        return begins

    def note_speed(self, flops_per_second: float) -> None:
        """Remember the speed of a candidate that is ready; the fastest one tells how long others will take."""
        self._fastest = max(self._fastest, flops_per_second)
