"""Timing with a clock of its own: who is called when, what the numbers are made of, and that a device is waited for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.fast import timing
from vitrail.fast.timing import PeakMemory, ReferenceProduct, Stopwatch, percentile, relative_distance, take_turns

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Clock:
    """Stands still, but for the steps that take time."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time

    def step(self, *seconds: float):
        """Takes these, one after the other, and then the last of them for ever."""
        left = list(seconds)

        def step() -> None:
            self.time += left.pop(0) if len(left) > 1 else left[0]

        return step


def test_calls_together_and_each():
    clock = Clock()
    watch = Stopwatch(CPU, clock)
    assert watch.time_calls(clock.step(1, 2, 3, 6), 4) == 3
    assert watch.time_each_call(clock.step(1, 2, 3), 4) == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("one", "least", "expected"),
    [(0.5, 1, 4), (0.7, 1, 3), (5, 1, 1), (5, 10, 10), (0.5, 10, 10), (1e-6, 1, timing.MOST_CALLS), (0, 1, 1000)],
)
def test_as_many_calls_as_fill_the_time(one, least, expected):
    clock = Clock()
    assert Stopwatch(CPU, clock).count_calls(clock.step(one), 2, least) == expected


def test_a_device_is_waited_for_before_the_clock_is_read(monkeypatch):
    events = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: events.append(f"wait for {device}"))
    watch = Stopwatch(CUDA, lambda: events.append("clock") or 0.0)
    watch.time_calls(lambda: events.append("step"), 2)
    assert events == ["wait for cuda", "clock", "step", "step", "wait for cuda", "clock"]
    events.clear()
    watch.time_each_call(lambda: events.append("step"), 2)
    assert events == ["wait for cuda", "clock", "step", "wait for cuda", "clock"] * 2


def test_turns_alternate():
    order: list[str] = []

    def contestant(name: str):
        return lambda: (order.append(name), len(order))[1]

    results = take_turns({name: contestant(name) for name in "abc"}, 3, on_failure=None)
    assert "".join(order) == "abccbaabc"
    assert results == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def test_one_that_fails_is_told_and_the_others_go_on():
    calls, failures = iter(range(9)), []

    def fails_at_its_second() -> int:
        if (number := next(calls)) == 1:
            raise RuntimeError("no more")
        return number

    contestants = {"good": lambda: "fine", "bad": fails_at_its_second, "other": lambda: "too"}
    results = take_turns(contestants, 3, lambda name, error: failures.append((name, str(error))))
    assert results == {"good": ["fine"] * 3, "other": ["too"] * 3}
    assert failures == [("bad", "no more")]


def test_an_interruption_is_no_failure():
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take_turns({"a": interrupted}, 1, on_failure=None)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
def test_percentiles(values, share):
    assert percentile(values, share) == np.percentile(values, 100 * share, method="inverted_cdf")


def test_the_slowest_hundredth():
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile(range(1, 71), 0.99) == 70


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_product_is_one(monkeypatch, dtype):
    monkeypatch.setitem(timing.SIDES, "cpu", 24)
    product = ReferenceProduct(CPU, dtype)
    product()
    assert product.flops == 2 * 24**3
    assert product._result.dtype == dtype
    assert product._result.std() > 1
    exact = product._left.double() @ product._right.double()
    torch.testing.assert_close(product._result.double(), exact, rtol=1e-4, atol=1e-4)


def test_memory_of_one_alone(monkeypatch):
    """100 bytes are others'; at first it takes 70, later 50."""
    peaks = iter([170, 150])
    state = {"peak": 1000}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: state.update(peak=next(peaks)))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: state["peak"])
    memory = PeakMemory(CUDA)
    assert memory.peak() == 70
    memory.restart()
    assert memory.peak() == 50


def test_memory_of_a_cpu_is_not_known():
    memory = PeakMemory(CPU)
    memory.restart()
    assert memory.peak() is None


def test_distances_are_relative():
    reference = torch.tensor([[3.0, 4.0]])
    assert relative_distance(torch.tensor([[3.0, 4.5]]), reference) == pytest.approx(0.1)
    assert relative_distance(reference.bfloat16(), reference) == 0
