"""The queue before a model, without HTTP: everyone is answered exactly once, and nobody pays for a neighbour."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.serving.batching import (
    Batcher,
    BatchTiming,
    DeadlinePassedError,
    QueueClosedError,
    QueueFullError,
    QueueLimits,
    QueueResult,
)


def double(batch: list[int]) -> list[int]:
    return [2 * number for number in batch]


def with_batcher(test: Callable[[Batcher[Any, Any, Any]], Any], compute: Any = double, **options: Any) -> Any:
    """Run an async test around a batcher that is closed in the end."""
    prepare = options.pop("prepare", lambda item: item)
    on_batch = options.pop("on_batch", None)
    threads = options.pop("threads", 2)
    more = {"expect_seconds": options.pop("expect_seconds")} if "expect_seconds" in options else {}

    async def run() -> Any:
        with ThreadPoolExecutor(threads) as pool:
            batcher = Batcher(prepare, compute, pool, QueueLimits(**options), on_batch, threads=threads, **more)
            batcher.start()
            try:
                return await asyncio.wait_for(test(batcher), 20)
            finally:
                await asyncio.wait_for(batcher.close(), 20)
                assert batcher.in_flight == 0
                assert not batcher.is_alive

    return asyncio.run(run())


async def collect_results(futures: list[asyncio.Future[QueueResult]]) -> list[Any]:
    found = await asyncio.gather(*futures, return_exceptions=True)
    return [one.result if isinstance(one, QueueResult) else one for one in found]


class Gate:
    """A model that computes when it is let, and remembers its batches."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.batches: list[list[int]] = []

    def __call__(self, batch: list[int]) -> list[int]:
        self.batches.append(list(batch))
        self.entered.set()
        assert self.open.wait(20)
        return double(batch)

    async def busy_with(self, batcher: Batcher[Any, Any, Any], item: int) -> asyncio.Future[QueueResult]:
        (future,) = batcher.submit([item])
        await asyncio.to_thread(self.entered.wait)
        return future


@settings(max_examples=25, deadline=None)
@given(
    groups=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    batch=st.integers(1, 8),
    wait=st.sampled_from([0.0, 0.002]),
)
def test_every_request_is_answered_once_with_its_own(groups, batch, wait):
    sizes: list[int] = []
    computed: list[int] = []

    def compute(numbers: list[int]) -> list[int]:
        sizes.append(len(numbers))
        computed.extend(numbers)
        return double(numbers)

    async def test(batcher: Batcher[Any, Any, Any]) -> list[Any]:
        first, futures = 0, []
        for count in groups:
            futures += batcher.submit(list(range(first, first + count)))
            first += count
            await asyncio.sleep(0)
        return await collect_results(futures)

    found = with_batcher(test, compute, batch=batch, wait=wait)
    assert found == [2 * number for number in range(sum(groups))]
    assert sorted(computed) == list(range(sum(groups)))
    assert max(sizes) <= batch


def test_what_waits_behind_a_busy_model_leaves_together_and_in_order():
    gate = Gate()

    async def test(batcher: Batcher[Any, Any, Any]) -> list[Any]:
        first = await gate.busy_with(batcher, 0)
        futures = batcher.submit(list(range(1, 8)))
        while len(batcher._waiting) < 7:
            await asyncio.sleep(0.001)
        gate.open.set()
        return await collect_results([first, *futures])

    assert with_batcher(test, gate, batch=4, threads=1) == [2 * number for number in range(8)]
    assert gate.batches == [[0], [1, 2, 3, 4], [5, 6, 7]]


def test_a_lone_request_does_not_wait():
    async def test(batcher: Batcher[Any, Any, Any]) -> float:
        started = time.monotonic()
        await batcher.submit([1])[0]
        return time.monotonic() - started

    assert with_batcher(test, wait=5.0) < 2


def test_an_idle_model_waits_for_those_on_their_way_but_not_for_long():
    slow = threading.Event()
    batches: list[list[int]] = []

    def prepare(number: int) -> int:
        if number == 2:
            assert slow.wait(20)
        return number

    def compute(batch: list[int]) -> list[int]:
        batches.append(batch)
        return double(batch)

    async def test(batcher: Batcher[Any, Any, Any]) -> list[Any]:
        started = time.monotonic()
        futures = batcher.submit([1, 2])
        await futures[0]
        assert time.monotonic() - started >= 0.1
        slow.set()
        return await collect_results(futures)

    assert with_batcher(test, compute, prepare=prepare, wait=0.1) == [2, 4]
    assert batches == [[1], [2]]

    def a_little_later(number: int) -> int:
        time.sleep(0.05 * number)
        return number

    async def both(batcher: Batcher[Any, Any, Any]) -> list[Any]:
        return await collect_results(batcher.submit([0, 1]))

    batches.clear()
    assert with_batcher(both, compute, prepare=a_little_later, wait=5.0) == [0, 2]
    assert batches == [[0, 1]]


def test_one_that_cannot_be_prepared_touches_no_other():
    def prepare(number: int) -> int:
        if number % 3 == 0:
            raise ValueError(f"bad {number}")
        return number

    async def test(batcher: Batcher[Any, Any, Any]) -> list[Any]:
        return await collect_results(batcher.submit(list(range(9))))

    found = with_batcher(test, prepare=prepare)
    assert [str(one) if number % 3 == 0 else one for number, one in enumerate(found)] == [
        f"bad {number}" if number % 3 == 0 else 2 * number for number in range(9)
    ]


def test_a_batch_that_fails_is_computed_one_by_one():
    def compute(batch: list[int]) -> list[int]:
        if 5 in batch:
            raise RuntimeError("five")
        return double(batch)

    async def test(batcher: Batcher[Any, Any, Any]) -> list[Any]:
        return await collect_results(batcher.submit(list(range(8))))

    found = with_batcher(test, compute, wait=0.5)
    assert isinstance(found[5], RuntimeError)
    assert [one for number, one in enumerate(found) if number != 5] == [0, 2, 4, 6, 8, 12, 14]


def test_what_is_cancelled_is_not_computed_and_leaves_room():
    gate = Gate()

    async def test(batcher: Batcher[Any, Any, Any]) -> list[Any]:
        first = await gate.busy_with(batcher, 0)
        second, third = batcher.submit([1, 2])
        with pytest.raises(QueueFullError):
            batcher.submit([3])
        second.cancel()
        await asyncio.sleep(0)
        fourth = batcher.submit([3])
        gate.open.set()
        return await collect_results([first, third, *fourth])

    assert with_batcher(test, gate, queue=3, batch=3) == [0, 4, 6]
    assert sorted(number for batch in gate.batches for number in batch) == [0, 2, 3]


def test_a_full_queue_refuses_all_or_nothing():
    gate = Gate()

    async def test(batcher: Batcher[Any, Any, Any]) -> list[Any]:
        first = await gate.busy_with(batcher, 0)
        with pytest.raises(QueueFullError) as full:
            batcher.submit([1, 2, 3, 4])
        assert full.value.retry_after >= 1
        assert batcher.in_flight == 1
        rest = batcher.submit([1, 2, 3])
        gate.open.set()
        return await collect_results([first, *rest])

    assert with_batcher(test, gate, queue=4) == [0, 2, 4, 6]


def test_only_so_many_are_admitted_as_the_measured_rate_can_answer_in_time():
    """A model that takes 50 ms an image, a deadline of 1 s: ten are inside at most, and all are in time."""

    def compute(batch: list[int]) -> list[int]:
        time.sleep(0.05 * len(batch))
        return double(batch)

    took: list[float] = []
    refused = 0

    async def ask(batcher: Batcher[Any, Any, Any]) -> None:
        nonlocal refused
        started = time.monotonic()
        try:
            await batcher.submit([1])[0]
        except QueueFullError:
            refused += 1
        else:
            took.append(time.monotonic() - started)

    async def test(batcher: Batcher[Any, Any, Any]) -> None:
        await ask(batcher)
        for _ in range(4):
            await asyncio.gather(*(ask(batcher) for _ in range(50)))

    with_batcher(test, compute, batch=4, deadline=1.0)
    assert refused >= 120
    assert len(took) >= 12
    assert max(took) < 1.0


def test_a_stream_of_broken_ones_makes_no_good_one_dearer():
    """However long nothing was computed while somebody was inside: that time was not spent on the next good one."""

    def prepare(number: int) -> int:
        time.sleep(0.001)
        if number < 0:
            raise ValueError(number)
        return number

    async def test(batcher: Batcher[Any, Any, Any]) -> list[Any]:
        async def broken() -> None:
            while time.monotonic() < ends:
                await asyncio.gather(*batcher.submit([-1]), return_exceptions=True)

        ends = time.monotonic() + 1.0
        flood = [asyncio.create_task(broken()) for _ in range(4)]
        found = []
        for wait in (0.8, 0.0, 0.0):  # an estimate that took the first pause for work would refuse the ones after it
            await asyncio.sleep(wait)
            found.append((await batcher.submit([3])[0]).result)
        await asyncio.gather(*flood)
        return found

    assert with_batcher(test, prepare=prepare, deadline=1.0) == [6, 6, 6]


def test_before_anything_is_measured_the_warm_up_is_believed():
    async def test(batcher: Batcher[Any, Any, Any]) -> list[Any]:
        batcher.expect_compute_seconds(0.1)
        futures = batcher.submit([1, 2, 3])
        with pytest.raises(QueueFullError) as full:
            batcher.submit([4, 5, 6])
        assert full.value.retry_after == 1
        return await collect_results([*futures, *batcher.submit([4, 5])])

    assert with_batcher(test, deadline=1.0) == [2, 4, 6, 8, 10]


def test_what_grows_too_old_is_refused_uncomputed():
    gate = Gate()

    async def test(batcher: Batcher[Any, Any, Any]) -> list[Any]:
        first = await gate.busy_with(batcher, 0)
        futures = batcher.submit([1])
        await asyncio.sleep(0.15)
        gate.open.set()
        return await collect_results([first, *futures])

    first, second = with_batcher(test, gate, deadline=0.1)
    assert first == 0
    assert isinstance(second, DeadlinePassedError)
    assert gate.batches == [[0]]


def test_closing_finishes_what_was_accepted_and_accepts_nothing_more():
    gate = Gate()

    async def test(batcher: Batcher[Any, Any, Any]) -> list[Any]:
        first = await gate.busy_with(batcher, 0)
        rest = batcher.submit([1, 2])
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0)
        with pytest.raises(QueueClosedError):
            batcher.submit([3])
        assert not closing.done()
        gate.open.set()
        await closing
        return await collect_results([first, *rest])

    assert with_batcher(test, gate) == [0, 2, 4]


def test_times_and_batches_are_told():
    timings: list[BatchTiming] = []

    def prepare(number: int) -> int:
        time.sleep(0.02)
        return number

    def compute(batch: list[int]) -> list[int]:
        time.sleep(0.03)
        return double(batch)

    async def test(batcher: Batcher[Any, Any, Any]) -> QueueResult:
        return await batcher.submit([4])[0]

    answer = with_batcher(test, compute, prepare=prepare, on_batch=timings.append)
    assert answer.result == 8
    assert answer.prepare >= 0.02
    assert answer.compute >= 0.03
    assert 0 <= answer.queue < 1
    (batch,) = timings
    assert batch == BatchTiming([answer.queue], answer.compute)


def test_the_deadline_passes_while_an_image_waits_for_a_thread():
    """Whoever waits is told at the deadline, not when the slow neighbour before it is done."""
    slow = threading.Event()

    def prepare(number: int) -> int:
        assert slow.wait(20)
        return number

    async def test(batcher: Batcher[Any, Any, Any]) -> None:
        futures = batcher.submit([1, 2])
        started = time.monotonic()
        await asyncio.wait(futures)
        assert time.monotonic() - started < 1
        assert all(isinstance(future.exception(), DeadlinePassedError) for future in futures)
        assert batcher.in_flight == 0
        slow.set()
        while batcher._being_prepared:
            await asyncio.sleep(0.001)
        assert (await batcher.submit([3])[0]).result == 6

    with_batcher(test, prepare=prepare, deadline=0.1, threads=1)


def test_the_pace_is_learned_from_those_that_come_too_late():
    """Three clients that always come too late: they and others are then refused at once, with a time to retry."""

    def prepare(number: int) -> int:
        time.sleep(0.15)
        return number

    async def test(batcher: Batcher[Any, Any, Any]) -> None:
        late = await collect_results(batcher.submit([1, 2, 3]))
        assert isinstance(late[-1], DeadlinePassedError)
        while batcher._being_prepared:
            await asyncio.sleep(0.001)
        first = batcher.submit([4])  # an empty queue admits it
        with pytest.raises(QueueFullError):
            batcher.submit([5])
        await asyncio.wait(first)

    with_batcher(test, prepare=prepare, deadline=0.2, threads=1)


def test_large_ones_are_refused_while_there_is_room_for_small_ones():
    gate = Gate()

    async def test(batcher: Batcher[Any, Any, Any]) -> list[Any]:
        futures = batcher.submit([400])
        with pytest.raises(QueueFullError):
            batcher.submit([200])
        futures += batcher.submit([50, 1])
        gate.open.set()
        return await collect_results(futures)

    def prepare(number: int) -> int:
        assert gate.open.wait(20)
        return number

    options = {"prepare": prepare, "deadline": 1.0, "threads": 1, "expect_seconds": lambda number: number / 1000}
    assert with_batcher(test, **options) == [800, 100, 2]


def test_failures_are_handed_over_without_what_they_hold():
    def prepare(number: int) -> int:
        if number == 1:
            raise ValueError("one")
        return number

    def compute(batch: list[int]) -> list[int]:
        raise RuntimeError("all")

    async def test(batcher: Batcher[Any, Any, Any]) -> list[Any]:
        futures = batcher.submit([1, 2, 3])
        await asyncio.wait(futures)
        return [future.exception() for future in futures]

    found = with_batcher(test, compute, prepare=prepare)
    assert [str(error) for error in found] == ["one", "all", "all"]
    assert all(error.__traceback__ is error.__context__ is None for error in found)
