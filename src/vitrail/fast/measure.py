"""How long things take, measured so that they can be compared: in turns, round by round, a device waited for.

Clocks of processors rise and fall, and a machine has other things to do: what is measured first, or last, has luck. So
those that are compared take turns, and the order is turned around in every other round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Step = Callable[[], object]
"""Does once what is measured; on a GPU it may return before that is done."""
Name = TypeVar("Name")
Found = TypeVar("Found")

MOST_CALLS = 1000
"""In one turn."""
SIDES = {"cpu": 2048, "cuda": 8192}
"""Of the matrices whose product stands for what a device can do: large enough to keep all of it busy."""


class Stopwatch:
    """Times calls, and waits for a device before it reads the clock."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock

    def now(self) -> float:
        """Seconds on the clock, once the device has done all it was told."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return self._clock()

    def together(self, step: Step, count: int) -> float:
        """Seconds of one call among `count` that are sent off without waiting: what throughput is made of."""
        start = self.now()
        for _ in range(count):
            step()
        return (self.now() - start) / count

    def each(self, step: Step, count: int) -> list[float]:
        """Seconds of every one of `count` calls, each waited for: what someone waits for an answer."""
        seconds = []
        for _ in range(count):
            start = self.now()
            step()
            seconds.append(self.now() - start)
        return seconds

    def calls_in(self, step: Step, seconds: float, least: int = 1) -> int:
        """How many calls fill so many seconds, by the time of one; never fewer than `least`."""
        one = max(self.together(step, 1), 1e-9)
        return max(least, min(MOST_CALLS, math.ceil(seconds / one)))


def take_turns(
    contestants: Mapping[Name, Callable[[], Found]],
    rounds: int,
    failed: Callable[[Name, Exception], None],
) -> dict[Name, list[Found]]:
    """What each gave in every round: first to last in one round, last to first in the next.

    One that raises is told to `failed`, has no results and takes no further part; the others go on.
    """
    results: dict[Name, list[Found]] = {name: [] for name in contestants}
    for number in range(rounds):
        order = list(results)
        for name in order if number % 2 == 0 else reversed(order):
            try:
                results[name].append(contestants[name]())
            except Exception as error:  # whatever a stranger's library raises
                del results[name]
                failed(name, error)
    return results


class Product:
    """A product of two large square matrices of random numbers (zeros would be faster): about a device's best."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        side = SIDES.get(device.type, SIDES["cpu"])
        self.flops = 2 * side**3
        self._left, self._right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        self._result = torch.empty_like(self._left)

    def __call__(self) -> None:
        """Once."""
        torch.mm(self._left, self._right, out=self._result)


class PeakMemory:
    """Bytes on a GPU beyond those that were in use when this was made; unknown on other devices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        self.restart()

    def restart(self) -> None:
        """Forget the peaks so far."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int | None:
        """The most at any time since the last start."""
        if self._device.type != "cuda":
            return None
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._before


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that such a share of them does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def relative_distance(found: Tensor, reference: Tensor) -> float:
    """‖found − reference‖ / ‖reference‖."""
    exact = reference.double().cpu()
    return float((found.double().cpu() - exact).norm() / exact.norm())
