"""Stop signals: the current step is finished, a checkpoint is saved, and then the run stops."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """True once a stop signal has arrived."""

    signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def listen_for_stop() -> Iterator[StopRequest]:
    """Turn stop signals into a request while the block runs. A second Ctrl-C interrupts at once, as usual."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # Python allows signal handlers in the main thread only
        return
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def handle(number: int, frame: FrameType | None) -> None:
        os.write(2, b"stopping: this step is finished and saved first; Ctrl-C again ends at once, without saving\n")
        request.signal = signal.Signals(number)
        signal.signal(number, previous[signal.Signals(number)])

    for number in STOP_SIGNALS:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
