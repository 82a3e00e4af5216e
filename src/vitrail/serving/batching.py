"""Requests, one by one, become batches: prepared in a few threads, computed in one, answered on the event loop.

When a batch leaves. The model is either busy or idle. While it is busy nothing can leave, and what arrives gathers:
under load batches form by themselves, as large as the load is. When it is idle and nothing else is on its way (admitted
and being decoded), what waits goes at once: a lone request never pays for company that does not come. Only while others
are known to be on their way does an idle model wait for them, and never longer than `wait` for the oldest, or than
until a batch is full. So `wait` is a bound, not a price.

Who is admitted. Not more than `queue` requests are inside at a time, and not more than can be answered within half the
deadline at the rate that was measured last: the other half is for images that take longer than their forerunners.
Preparing and computing go on side by side, so the slower of the two sets the rate; where they share cores, the time of
each has grown by what the other took. Only time spent at work is counted: whatever comes in between, or cannot be
prepared and so is never computed, makes no image dearer. Whoever is not admitted is told so at once, before any work,
and when to come again. What is admitted is therefore answered in time; should a request still grow older than
`deadline` before its turn, it is refused uncomputed.

All methods are for the thread of the event loop, but for those that say otherwise.
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

MARGIN = 0.5
"""Of the deadline, within which what is admitted is expected to be answered."""
FORGETTING = 0.9
"""How much of what was measured is still believed after another image."""
LONGEST_RETRY = 60
"""Seconds after which to come again, at most."""


class Limits(NamedTuple):
    """Of one model."""

    batch: int = 32
    """Images computed at a time, at most."""
    wait: float = 0.005
    """Seconds that an idle model waits for requests that are on their way, at most."""
    queue: int = 256
    """Images inside at a time, at most: being decoded, waiting and being computed."""
    deadline: float = 10.0
    """Seconds after which a request that has not been computed is refused."""


class FullError(Exception):
    """Too many are inside already. `retry_after`: whole seconds after which there is probably room."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"too many requests are waiting: come again in {retry_after} s")
        self.retry_after = retry_after


class LateError(Exception):
    """A request grew older than the deadline before its turn."""


class ClosingError(Exception):
    """Nothing new is accepted any more."""


class Answer(NamedTuple):
    """What came of a request, and the seconds it took."""

    result: Any
    prepare: float
    queue: float
    """Waiting for a thread to be prepared in, and for its batch."""
    compute: float


class Batch(NamedTuple):
    """What is told of a batch when it is done."""

    waits: list[float]
    """Seconds, of each of its images."""
    compute: float


class _Entry:
    """A request on its way through."""

    __slots__ = ("admitted", "future", "gone", "item", "prepared", "ready", "seconds")

    def __init__(self, item: Any, future: asyncio.Future[Answer]) -> None:
        self.item = item
        self.future = future
        self.prepared: Any = None
        self.gone = False
        self.admitted = time.monotonic()
        self.ready = 0.0
        self.seconds = 0.0


class _Pace:
    """Seconds for an image, as those of the last few dozen tell; 0 if there was none."""

    def __init__(self) -> None:
        self.seconds, self._known = 0.0, False

    def learn(self, seconds: float, count: int = 1) -> None:
        """So long each of so many took."""
        believed = FORGETTING**count if self._known else 0.0
        self.seconds, self._known = believed * self.seconds + (1 - believed) * seconds, True


class Batcher(Generic[Item, Prepared, Result]):
    """The queue before one model.

    Args:
        prepare: an item → what is computed, in a thread of `pool`; whatever it raises is that request's answer.
        compute: a batch → as many results, in a thread of its own. A result that is an exception is that request's
            answer; where it raises one itself, its images are computed one by one.
        pool: of so many `threads`.
        watch: told of every batch, on the event loop.
        enter: called once in the computing thread, before anything else.
    """

    def __init__(
        self,
        prepare: Callable[[Item], Prepared],
        compute: Callable[[list[Prepared]], Sequence[Result]],
        pool: Executor,
        limits: Limits | None = None,
        watch: Callable[[Batch], None] | None = None,
        enter: Callable[[], None] | None = None,
        threads: int = 1,
    ) -> None:
        self.limits = limits or Limits()
        self.inside = 0
        """Admitted and not answered."""
        self._prepare, self._compute, self._pool = prepare, compute, pool
        self._watch, self._enter = watch, enter
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._changed = threading.Condition()
        self._waiting: deque[_Entry] = deque()
        self._coming = 0
        self._closing = self._ended = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._threads = threads
        self._preparing, self._computing = _Pace(), _Pace()

    def start(self) -> None:
        """Begin to compute, for the event loop that runs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether anything is computed."""
        return self._thread.is_alive()

    def refuse(self) -> None:
        """Accept nothing more."""
        self._closing = True

    async def close(self) -> None:
        """Accept nothing more, answer what was accepted, and end the thread."""
        self.refuse()
        await self._empty.wait()
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def submit(self, items: Sequence[Item]) -> list[asyncio.Future[Answer]]:
        """Admit all or none. A future that is cancelled is not computed, if its turn has not come."""
        assert self._loop is not None
        if self._closing:
            raise ClosingError
        self._check_room(len(items))
        self.inside += len(items)
        self._empty.clear()
        entries = [_Entry(item, self._loop.create_future()) for item in items]
        with self._changed:
            self._coming += len(entries)
        for entry in entries:
            entry.future.add_done_callback(functools.partial(self._left, entry))
            self._pool.submit(self._make_ready, entry)
        return [entry.future for entry in entries]

    def expect(self, seconds: float) -> None:
        """So long an image is computed, as far as is known before any was answered."""
        self._computing.learn(seconds)

    @property
    def per_image(self) -> float:
        """Seconds from one answer to the next while there is enough to do, as measured; 0 if nothing was."""
        return max(self._computing.seconds, self._preparing.seconds / self._threads)

    def _check_room(self, count: int) -> None:
        if not self.inside and count <= self.limits.queue:
            return  # an empty house takes whoever comes first, however slow the model
        expected = (self.inside + count) * self.per_image
        if self.inside + count > self.limits.queue or expected > MARGIN * self.limits.deadline:
            raise FullError(min(max(math.ceil(self.inside * self.per_image), 1), LONGEST_RETRY))

    def _left(self, entry: _Entry, future: asyncio.Future[Answer]) -> None:
        self.inside -= 1
        if not self.inside:
            self._empty.set()
        if future.cancelled():
            with self._changed:
                entry.gone, entry.item = True, None  # the bytes are let go at once, wherever the entry still stands
                if entry in self._waiting:
                    self._waiting.remove(entry)

    def _make_ready(self, entry: _Entry) -> None:
        """In a thread of the pool."""
        item, failure = entry.item, None
        started = time.monotonic()
        if not entry.gone:
            try:
                entry.prepared = self._prepare(item)
            except Exception as error:
                failure = error
        entry.ready = time.monotonic()
        entry.seconds = entry.ready - started
        entry.item = None
        with self._changed:
            self._coming -= 1
            if failure is None and not entry.gone:
                self._waiting.append(entry)
            self._changed.notify()
        if failure is not None:
            self._on_loop(self._spoilt, entry, failure)

    # In the computing thread

    def _run(self) -> None:
        if self._enter is not None:
            self._enter()
        while (taken := self._take()) is not None:
            self._work(taken)

    def _take(self) -> list[_Entry] | None:
        """Wait for a batch; None at the end."""
        with self._changed:
            while True:
                if self._waiting:
                    left = self._waiting[0].ready + self.limits.wait - time.monotonic()
                    if len(self._waiting) >= self.limits.batch or not self._coming or left <= 0:
                        count = min(len(self._waiting), self.limits.batch)
                        return [self._waiting.popleft() for _ in range(count)]
                    self._changed.wait(left)
                elif self._ended:
                    return None
                else:
                    self._changed.wait()

    def _work(self, taken: list[_Entry]) -> None:
        started = time.monotonic()
        late = [entry for entry in taken if started - entry.admitted > self.limits.deadline]
        entries = [entry for entry in taken if entry not in late and not entry.gone]
        outcomes = self._outcomes([entry.prepared for entry in entries]) if entries else []
        self._on_loop(self._deliver, entries, outcomes, late, started, time.monotonic())

    def _outcomes(self, prepared: list[Prepared]) -> Sequence[Result | Exception]:
        try:
            results = self._compute(prepared)
            assert len(results) == len(prepared)
            return results
        except Exception as error:
            if len(prepared) == 1:
                return [error]
            return [outcome for one in prepared for outcome in self._outcomes([one])]

    def _on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # On the event loop again

    def _deliver(
        self, entries: list[_Entry], outcomes: Sequence[Any], late: list[_Entry], started: float, ended: float
    ) -> None:
        for entry in late:
            self._fail(entry, LateError())
        for entry, outcome in zip(entries, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._fail(entry, outcome)
            elif not entry.future.done():
                waited = started - entry.admitted - entry.seconds
                entry.future.set_result(Answer(outcome, entry.seconds, waited, ended - started))
        if entries:
            for entry in entries:
                self._preparing.learn(entry.seconds)
            self._computing.learn((ended - started) / len(entries), len(entries))
            if self._watch is not None:
                waits = [started - entry.admitted - entry.seconds for entry in entries]
                self._watch(Batch(waits, ended - started))

    def _spoilt(self, entry: _Entry, failure: Exception) -> None:
        self._preparing.learn(entry.seconds)
        self._fail(entry, failure)

    def _fail(self, entry: _Entry, failure: Exception) -> None:
        if not entry.future.done():
            entry.future.set_exception(failure)
