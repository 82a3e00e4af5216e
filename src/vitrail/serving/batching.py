"""Collect single requests into batches: prepare them in a few threads, compute them in one, answer on the event loop.

When a batch starts. While the model is busy, arriving images wait, so under load batches grow with the load. When the
model is idle and no other image is being prepared, the waiting images start at once: a lone request never waits for
company. When the model is idle and other images are being prepared, it waits for them until the batch is full, but at
most `wait` seconds from when the oldest was ready.

Which requests are admitted. At most `queue` images are in the server at a time, and no more than it can answer within
half the deadline at the rate measured last; the other half is a reserve for images that take longer. Preparing and
computing run side by side, so the slower of the two sets the rate. Only time spent working counts. A request that is
not admitted is refused at once, before any work, with the time after which to retry. An admitted request that is still
older than `deadline` when its turn comes is refused without being computed.

Call all methods on the thread of the event loop, except where a comment names another thread.
"""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
Result = TypeVar("Result")

ADMITTED_SHARE = 0.5
"""Share of the deadline within which admitted requests are expected to be answered."""
MEMORY_PER_IMAGE = 0.9
"""Weight that earlier measurements keep after each further image."""
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
    """A request was older than the deadline when its turn came."""


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
    """One image on its way through the queue."""

    __slots__ = ("admitted_at", "future", "is_cancelled", "item", "prepare_seconds", "prepared", "ready_at")

    def __init__(self, item: Any, future: asyncio.Future[QueueResult]) -> None:
        self.item = item
        self.future = future
        self.prepared: Any = None
        self.is_cancelled = False
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


class Batcher(Generic[Item, Prepared, Result]):
    """The queue in front of one model.

    Args:
        prepare: turns an item into the input of `compute`, in a thread of `pool`. If it raises, that request fails.
        compute: turns a batch into one result for each image, in a thread of its own. A result that is an exception
            fails that request; if `compute` itself raises, the images are computed one by one.
        pool: an executor with `threads` threads.
        on_batch: called on the event loop after every batch.
        on_thread_start: called once in the computing thread, before the first batch.
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
    ) -> None:
        self.limits = limits or QueueLimits()
        self.in_flight = 0
        """Number of images admitted and not answered yet."""
        self._prepare, self._compute, self._pool = prepare, compute, pool
        self._on_batch, self._on_thread_start = on_batch, on_thread_start
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._compute_batches, name="compute", daemon=True)
        self._changed = threading.Condition()
        self._waiting: deque[_QueuedItem] = deque()
        self._being_prepared = 0
        self._is_closed = self._has_ended = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._threads = threads
        self._prepare_time, self._compute_time = _AverageSeconds(), _AverageSeconds()

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
        self._check_room(len(items))
        self.in_flight += len(items)
        self._empty.clear()
        entries = [_QueuedItem(item, self._loop.create_future()) for item in items]
        with self._changed:
            self._being_prepared += len(entries)
        for entry in entries:
            entry.future.add_done_callback(functools.partial(self._release, entry))
            self._pool.submit(self._prepare_item, entry)
        return [entry.future for entry in entries]

    def expect_compute_seconds(self, seconds: float) -> None:
        """Set the expected seconds to compute an image before any was measured."""
        self._compute_time.update(seconds)

    @property
    def seconds_per_image(self) -> float:
        """Measured seconds from one answer to the next under load; 0 before the first measurement."""
        return max(self._compute_time.seconds, self._prepare_time.seconds / self._threads)

    def _check_room(self, count: int) -> None:
        if not self.in_flight and count <= self.limits.queue:
            return  # an empty queue admits the first request, however slow the model
        expected = (self.in_flight + count) * self.seconds_per_image
        if self.in_flight + count > self.limits.queue or expected > ADMITTED_SHARE * self.limits.deadline:
            raise QueueFullError(min(max(math.ceil(self.in_flight * self.seconds_per_image), 1), LONGEST_RETRY))

    def _release(self, entry: _QueuedItem, future: asyncio.Future[QueueResult]) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._empty.set()
        if future.cancelled():
            with self._changed:
                entry.is_cancelled, entry.item = True, None  # frees the bytes at once
                if entry in self._waiting:
                    self._waiting.remove(entry)

    # In a thread of the pool

    def _prepare_item(self, entry: _QueuedItem) -> None:
        item, failure = entry.item, None
        started = time.monotonic()
        if not entry.is_cancelled:
            try:
                entry.prepared = self._prepare(item)
            except Exception as error:
                failure = error
        entry.ready_at = time.monotonic()
        entry.prepare_seconds = entry.ready_at - started
        entry.item = None
        with self._changed:
            self._being_prepared -= 1
            if failure is None and not entry.is_cancelled:
                self._waiting.append(entry)
            self._changed.notify()
        if failure is not None:
            self._call_on_loop(self._fail_preparation, entry, failure)

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
                        return [self._waiting.popleft() for _ in range(count)]
                    self._changed.wait(seconds_left)
                elif self._has_ended:
                    return None
                else:
                    self._changed.wait()

    def _compute_batch(self, batch: list[_QueuedItem]) -> None:
        started = time.monotonic()
        late = [entry for entry in batch if started - entry.admitted_at > self.limits.deadline]
        entries = [entry for entry in batch if entry not in late and not entry.is_cancelled]
        results = self._compute_or_split([entry.prepared for entry in entries]) if entries else []
        self._call_on_loop(self._deliver, entries, results, late, started, time.monotonic())

    def _compute_or_split(self, prepared: list[Prepared]) -> Sequence[Result | Exception]:
        """Compute a batch; if that fails, compute its images one by one."""
        try:
            results = self._compute(prepared)
            assert len(results) == len(prepared)
            return results
        except Exception as error:
            if len(prepared) == 1:
                return [error]
            return [result for one in prepared for result in self._compute_or_split([one])]

    def _call_on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # On the event loop again

    def _deliver(
        self, entries: list[_QueuedItem], results: Sequence[Any], late: list[_QueuedItem], started: float, ended: float
    ) -> None:
        for entry in late:
            self._fail(entry, DeadlinePassedError())
        for entry, result in zip(entries, results, strict=True):
            if isinstance(result, Exception):
                self._fail(entry, result)
            elif not entry.future.done():
                waited = started - entry.admitted_at - entry.prepare_seconds
                entry.future.set_result(QueueResult(result, entry.prepare_seconds, waited, ended - started))
        if entries:
            for entry in entries:
                self._prepare_time.update(entry.prepare_seconds)
            self._compute_time.update((ended - started) / len(entries), len(entries))
            if self._on_batch is not None:
                waits = [started - entry.admitted_at - entry.prepare_seconds for entry in entries]
                self._on_batch(BatchTiming(waits, ended - started))

    def _fail_preparation(self, entry: _QueuedItem, failure: Exception) -> None:
        self._prepare_time.update(entry.prepare_seconds)
        self._fail(entry, failure)

    def _fail(self, entry: _QueuedItem, failure: Exception) -> None:
        if not entry.future.done():
            entry.future.set_exception(failure)
