"""Signals that ask a run to stop. The step under way is finished, a checkpoint saved, and then it stops."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ASKED = (signal.SIGTERM, signal.SIGINT)


class Request:
    """Whether anyone asked, and how."""

    signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_requests() -> Iterator[Request]:
    """Listen while the block runs. The second Ctrl-C is not listened to: it interrupts at once, as always."""
    request = Request()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may listen
        return
    before = {number: signal.getsignal(number) for number in ASKED}

    def take(number: int, frame: FrameType | None) -> None:
        os.write(2, b"stopping: this step is finished and saved first; Ctrl-C again ends at once, without saving\n")
        request.signal = signal.Signals(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in ASKED:
        signal.signal(number, take)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
