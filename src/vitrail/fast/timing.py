"""Fair timing: what is compared takes turns, round by round, and the device finishes before the clock is read.

The clock rate of a processor changes, and a machine has other work: whatever always runs first, or last, has an
advantage. So the steps take turns, and every second round runs in reverse order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Step = Callable[[], object]
"""Does the measured work once. On a GPU it may return before the work is finished."""
Name = TypeVar("Name")
Measurement = TypeVar("Measurement")

MOST_CALLS = 1000
"""Largest number of calls in one turn."""
SIDES = {"cpu": 2048, "cuda": 8192}
"""Side of the square matrices whose product shows what a device can do: large enough to keep all of it busy."""


class Stopwatch:
    """Times calls, and waits for a device before it reads the clock."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock

    def now(self) -> float:
        """Wait until the device has finished its work, and return the clock's seconds."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return self._clock()

    def time_calls(self, step: Step, count: int) -> float:
        """Return the mean seconds of `count` calls that are started without waiting in between (throughput)."""
        start = self.now()
        for _ in range(count):
            step()
        return (self.now() - start) / count

    def time_each_call(self, step: Step, count: int) -> list[float]:
        """Return the seconds of each of `count` calls, waiting for every one (latency)."""
        seconds = []
        for _ in range(count):
            start = self.now()
            step()
            seconds.append(self.now() - start)
        return seconds

    def count_calls(self, step: Step, seconds: float, least: int = 1) -> int:
        """Call `step` once, and return how many such calls fill `seconds`: between `least` and `MOST_CALLS`."""
        return fit_calls(self.time_calls(step, 1), seconds, least)


def fit_calls(one: float, seconds: float, least: int = 1) -> int:
    """Return how many calls that take `one` second each fill `seconds`: between `least` and `MOST_CALLS`."""
    return max(least, min(MOST_CALLS, math.ceil(seconds / max(one, 1e-9))))


def take_turns(
    contestants: Mapping[Name, Callable[[], Measurement]],
    rounds: int,
    on_failure: Callable[[Name, Exception], None],
    begins_round: Callable[[int], bool] = lambda number: True,
) -> dict[Name, list[Measurement]]:
    """Call every contestant once per round, first to last in one round and last to first in the next.

    Args:
        contestants: What to call, by name.
        rounds: How many times each is called.
        on_failure: Gets the name and the error of a contestant that raises. That contestant has no results and takes
            no further part; the others continue.
        begins_round: Called with the number of a round, from 1 on, before each but the first; False ends it there.

    Returns:
        By name, what the contestant returned in every round.
    """
    results: dict[Name, list[Measurement]] = {name: [] for name in contestants}
    for number in range(rounds):
        if number and not begins_round(number + 1):
            break
        order = list(results)
        for name in order if number % 2 == 0 else reversed(order):
            try:
                results[name].append(contestants[name]())
            except Exception as error:  # another library may raise anything
                del results[name]
                on_failure(name, error)
    return results


class ReferenceProduct:
    """A product of two large square matrices of random numbers: about the fastest that a device can compute."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        side = SIDES.get(device.type, SIDES["cpu"])
        self.flops = 2 * side**3
        # Random numbers, because multiplying zeros would be faster.
        self._left, self._right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        self._result = torch.empty_like(self._left)

    def __call__(self) -> None:
        torch.mm(self._left, self._right, out=self._result)


class PeakMemory:
    """Bytes on a GPU beyond those that were in use when this was made; unknown on other devices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        self.restart()

    def restart(self) -> None:
        """Measure the peak from now on."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int | None:
        """Return the largest number of bytes since the last start; None where the device is no GPU."""
        if self._device.type != "cuda":
            return None
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._before


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as `share` (0 to 1) of the values."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def relative_distance(computed: Tensor, reference: Tensor) -> float:
    """Return ‖computed − reference‖ / ‖reference‖, computed in float64 on the CPU."""
    exact = reference.cpu().double()
    return float((computed.cpu().double() - exact).norm() / exact.norm())
