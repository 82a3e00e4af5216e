"""Collect single requests into batches: prepare them in a few threads, compute them in one, answer on the event loop.

When a batch starts. While the model is busy, arriving images wait, so under load batches grow with the load. When the
model is idle and no other image is being prepared, the waiting images start at once: a lone request never waits for
company. When the model is idle and other images are being prepared, it waits for them until the batch is full, but at
most `wait` seconds from when the oldest was ready.

Which requests are admitted. At most `queue` images are in the server at a time, and no more than it can answer within
half the deadline at the rate measured last; the other half is a reserve for images that take longer. Preparing and
computing run side by side, so the slower of the two sets the rate. An image costs as much preparation as is expected of
it (more for a large one), corrected by how long all recent images took, also those that failed or came too late. Only
time spent working counts. A request that is not admitted is refused at once, before any work, with the time after which
to retry. An admitted request that is not being computed when its deadline passes is refused at that moment.

An error is handed over without its traceback, which would keep the failed image in memory.

Call all methods on the thread of the event loop, except where a comment names another thread.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from vitrail.errors import detach_error

log = logging.getLogger("vitrail")

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
Result = TypeVar("Result")

ADMITTED_SHARE = 0.5
"""Share of the deadline within which admitted requests are expected to be answered."""
MEMORY_PER_IMAGE = 0.9
"""Weight that earlier measurements keep after each further image."""
EXPECTED_SECONDS = 0.001
"""Seconds that preparing an image is expected to take, unless the batcher is given a function that tells."""
LONGEST_RETRY = 60
"""Largest Retry-After, in seconds."""


class QueueLimits(NamedTuple):
    """Limits of the queue in front of one model."""

    batch: int = 32
    """Largest number of images computed at a time."""
    wait: float = 0.005
    """Longest time in seconds that an idle model waits for images that are being prepared."""
    queue: int = 256
    """Largest number of images in the server: being prepared, waiting and being computed."""
    deadline: float = 10.0
    """Seconds after which a request that is not computed yet is refused."""


class QueueFullError(Exception):
    """The queue is full. `retry_after`: whole seconds after which there is probably room."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"too many requests are waiting: try again in {retry_after} s")
        self.retry_after = retry_after


class DeadlinePassedError(Exception):
    """The deadline of a request passed before its turn came."""


class QueueClosedError(Exception):
    """The queue admits no new requests."""


class QueueResult(NamedTuple):
    """The result for one image, and the seconds that it took."""

    result: Any
    prepare: float
    queue: float
    """Waiting for a thread to prepare it, and for its batch."""
    compute: float


class BatchTiming(NamedTuple):
    """How long one finished batch took, in seconds."""

    waits: list[float]
    """Waiting time of each image."""
    compute: float


class _QueuedItem:
    """One image on its way through the queue. `stage` changes only while the queue's lock is held."""

    __slots__ = (
        "admitted_at",
        "expected_seconds",
        "future",
        "item",
        "prepare_seconds",
        "prepared",
        "ready_at",
        "stage",
        "timer",
    )

    def __init__(self, item: Any, expected_seconds: float, future: asyncio.Future[QueueResult]) -> None:
        self.item, self.expected_seconds, self.future = item, expected_seconds, future
        self.timer: asyncio.TimerHandle | None = None
        self.stage: Literal["queued", "preparing", "waiting", "computing", "gone"] = "queued"
        self.prepared: Any = None
        self.admitted_at = time.monotonic()
        self.ready_at = 0.0
        self.prepare_seconds = 0.0


class _AverageSeconds:
    """Moving average of the seconds that an image takes; 0 before the first measurement."""

    def __init__(self) -> None:
        self.seconds, self._has_measurement = 0.0, False

    def update(self, seconds: float, count: int = 1) -> None:
        """Take into account `count` images that took `seconds` each."""
        weight = MEMORY_PER_IMAGE**count if self._has_measurement else 0.0
        self.seconds, self._has_measurement = weight * self.seconds + (1 - weight) * seconds, True


class _Slowness:
    """How much longer recent images took than was expected of them: 1 for as long."""

    def __init__(self) -> None:
        self._expected = self._measured = EXPECTED_SECONDS

    def update(self, expected: float, measured: float) -> None:
        """Take into account one image and its expected and measured seconds."""
        self._expected = MEMORY_PER_IMAGE * self._expected + expected
        self._measured = MEMORY_PER_IMAGE * self._measured + measured

    @property
    def factor(self) -> float:
        return self._measured / self._expected


class Batcher(Generic[Item, Prepared, Result]):
    """The queue in front of one model.

    Args:
        prepare: turns an item into the input of `compute`, in a thread of `pool`. If it raises, that request fails.
        compute: turns a batch into one result for each image, in a thread of its own. A result that is an exception
            fails that request; if `compute` itself raises, the images are computed one by one.
        pool: an executor with `threads` threads.
        on_batch: called on the event loop after every batch.
        on_thread_start: called once in the computing thread, before the first batch.
        expect_seconds: returns about how many seconds, above 0, preparing an item takes; called on the event loop.
    """

    def __init__(
        self,
        prepare: Callable[[Item], Prepared],
        compute: Callable[[list[Prepared]], Sequence[Result]],
        pool: Executor,
        limits: QueueLimits | None = None,
        on_batch: Callable[[BatchTiming], None] | None = None,
        on_thread_start: Callable[[], None] | None = None,
        threads: int = 1,
        expect_seconds: Callable[[Item], float] = lambda item: EXPECTED_SECONDS,
    ) -> None:
        self.limits = limits or QueueLimits()
        self.in_flight = 0
        """Number of images admitted and not answered yet."""
        self._prepare, self._compute, self._pool = prepare, compute, pool
        self._on_batch, self._on_thread_start = on_batch, on_thread_start
        self._expect_seconds = expect_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._compute_batches, name="compute", daemon=True)
        self._changed = threading.Condition()
        self._waiting: deque[_QueuedItem] = deque()
        self._being_prepared = 0
        """Number of images that are waiting for a thread or being prepared."""
        self._seconds_to_prepare = 0.0
        """What is expected of these images together."""
        self._is_closed = self._has_ended = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._threads = threads
        self._slowness, self._compute_time = _Slowness(), _AverageSeconds()

    def start(self) -> None:
        """Start the computing thread, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the computing thread runs."""
        return self._thread.is_alive()

    def stop_admitting(self) -> None:
        """Refuse all further requests."""
        self._is_closed = True

    async def close(self) -> None:
        """Refuse further requests, answer the admitted ones, and end the computing thread."""
        self.stop_admitting()
        await self._empty.wait()
        with self._changed:
            self._has_ended = True
            self._changed.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def submit(self, items: Sequence[Item]) -> list[asyncio.Future[QueueResult]]:
        """Admit all items or none.

        Returns:
            A future for each item. An item whose future is cancelled before its turn is not computed.

        Raises:
            QueueFullError: if there is no room for all of them.
            QueueClosedError: if the queue is closed.
        """
        assert self._loop is not None
        if self._is_closed:
            raise QueueClosedError
        expected = [self._expect_seconds(item) for item in items]
        self._check_room(len(items), sum(expected))
        self.in_flight += len(items)
        self._empty.clear()
        entries = [
            _QueuedItem(item, seconds, self._loop.create_future())
            for item, seconds in zip(items, expected, strict=True)
        ]
        with self._changed:
            self._being_prepared += len(entries)
            self._seconds_to_prepare += sum(expected)
        for entry in entries:
            entry.future.add_done_callback(functools.partial(self._release, entry))
            entry.timer = self._loop.call_later(self.limits.deadline, self._expire, entry)
            self._pool.submit(self._prepare_item, entry)
        return [entry.future for entry in entries]

    def expect_compute_seconds(self, seconds: float) -> None:
        """Set the expected seconds to compute an image before any was measured."""
        self._compute_time.update(seconds)

    def _expected_wait(self, count: int = 0, seconds: float = 0.0) -> float:
        """Return the seconds until all in the queue are answered, and `count` more that take `seconds` to prepare."""
        preparing = (self._seconds_to_prepare + seconds) * self._slowness.factor / self._threads
        return max(preparing, (self.in_flight + count) * self._compute_time.seconds)

    def _check_room(self, count: int, seconds: float) -> None:
        if not self.in_flight and not self._being_prepared and count <= self.limits.queue:
            return  # an empty queue admits the first request, however slow the model
        expected = self._expected_wait(count, seconds)
        if self.in_flight + count > self.limits.queue or expected > ADMITTED_SHARE * self.limits.deadline:
            raise QueueFullError(min(max(math.ceil(self._expected_wait()), 1), LONGEST_RETRY))

    def _expire(self, entry: _QueuedItem) -> None:
        if entry.stage != "computing":
            self._fail(entry, DeadlinePassedError())

    def _release(self, entry: _QueuedItem, future: asyncio.Future[QueueResult]) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        self.in_flight -= 1
        if not self.in_flight:
            self._empty.set()
        if entry.stage == "computing":  # the usual end
            return
        with self._changed:  # cancelled, failed or too late
            if entry.stage == "queued":
                self._end_preparation(entry)
            elif entry.stage == "waiting":
                self._waiting.remove(entry)
            entry.stage, entry.item = "gone", None  # frees the bytes at once
            self._changed.notify()

    def _end_preparation(self, entry: _QueuedItem) -> None:
        self._being_prepared -= 1
        self._seconds_to_prepare = self._seconds_to_prepare - entry.expected_seconds if self._being_prepared else 0.0

    # In a thread of the pool

    def _prepare_item(self, entry: _QueuedItem) -> None:
        with self._changed:
            if entry.stage == "gone":
                return
            entry.stage = "preparing"
        item, entry.item = entry.item, None
        prepared, failure = None, None
        started = time.monotonic()
        try:
            prepared = self._prepare(item)
        except Exception as error:
            failure = detach_error(error)
        entry.ready_at = time.monotonic()
        entry.prepare_seconds = entry.ready_at - started
        with self._changed:
            self._end_preparation(entry)
            self._slowness.update(entry.expected_seconds, entry.prepare_seconds)
            if entry.stage == "preparing":
                entry.stage = "gone" if failure else "waiting"
            if entry.stage == "waiting":
                entry.prepared = prepared
                self._waiting.append(entry)
            self._changed.notify()
        if failure is not None:
            self._call_on_loop(self._fail, entry, failure)

    # In the computing thread

    def _compute_batches(self) -> None:
        if self._on_thread_start is not None:
            self._on_thread_start()
        while (batch := self._next_batch()) is not None:
            self._compute_batch(batch)

    def _next_batch(self) -> list[_QueuedItem] | None:
        """Wait for a batch and return it; None when the queue has ended."""
        with self._changed:
            while True:
                if self._waiting:
                    seconds_left = self._waiting[0].ready_at + self.limits.wait - time.monotonic()
                    if len(self._waiting) >= self.limits.batch or not self._being_prepared or seconds_left <= 0:
                        count = min(len(self._waiting), self.limits.batch)
                        batch = [self._waiting.popleft() for _ in range(count)]
                        for entry in batch:
                            entry.stage = "computing"
                        return batch
                    self._changed.wait(seconds_left)
                elif self._has_ended:
                    return None
                else:
                    self._changed.wait()

    def _compute_batch(self, batch: list[_QueuedItem]) -> None:
        started = time.monotonic()
        results = self._compute_or_split([entry.prepared for entry in batch])
        self._call_on_loop(self._deliver, batch, results, started, time.monotonic())

    def _compute_or_split(self, prepared: list[Prepared]) -> Sequence[Result | Exception]:
        """Compute a batch; if that fails, compute its images one by one."""
        try:
            results = self._compute(prepared)
            assert len(results) == len(prepared)
            return results
        except Exception as error:
            if len(prepared) == 1:
                log.exception("an image could not be computed")
                return [detach_error(error)]
        return [result for one in prepared for result in self._compute_or_split([one])]

    def _call_on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # On the event loop again

    def _deliver(self, entries: Sequence[_QueuedItem], results: Sequence[Any], started: float, ended: float) -> None:
        waits = [started - entry.admitted_at - entry.prepare_seconds for entry in entries]
        for entry, result, waited in zip(entries, results, waits, strict=True):
            if isinstance(result, Exception):
                self._fail(entry, result)
            elif not entry.future.done():
                entry.future.set_result(QueueResult(result, entry.prepare_seconds, waited, ended - started))
        self._compute_time.update((ended - started) / len(entries), len(entries))
        if self._on_batch is not None:
            self._on_batch(BatchTiming(waits, ended - started))

    def _fail(self, entry: _QueuedItem, failure: Exception) -> None:
        if not entry.future.done():
            entry.future.set_exception(failure)
