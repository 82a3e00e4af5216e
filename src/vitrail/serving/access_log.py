"""The access log: one line on stderr for each request, plain or JSON, and the ids by which requests are found in it.

A thread of its own writes the lines. A stderr that is slow, full or closed therefore delays no request and fails none.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
import threading
import time
from datetime import UTC, datetime
from functools import lru_cache
from queue import Empty, SimpleQueue
from typing import NamedTuple
from urllib.parse import quote

FORMATS = ("plain", "json", "off")
LEVELS = ("debug", "info", "warning", "error")
QUIET_PATHS = ("/healthz", "/readyz", "/metrics")
QUIET_ERRORS = (None, "starting", "closing")
"""Monitoring asks for these paths every few seconds. They are logged as "debug" while nothing is wrong."""
QUIET_SUFFIXES = (".js", ".css")
"""Files that belong to a page, whose own request is logged."""
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:=+/@-]{1,128}")
"""Ids that are taken over from clients: they cannot break a line or a header."""
LONGEST_PATH = 200
"""Characters of a path that are logged."""
GATHER_SECONDS = 0.05
"""Time for which lines gather until they are written together."""
MOST_WAITING = 20_000
"""Largest number of lines that wait to be written; further requests are only counted."""
CLOSE_SECONDS = 2.0
"""Time that a stopping server gives to the last lines."""


class AccessRecord(NamedTuple):
    """A request that has been answered."""

    time: float
    """When it was answered, in seconds since 1970."""
    request_id: str
    client: str
    method: str
    path: str
    """Without the query string, which may hold what is nobody else's business."""
    status: int
    size: int
    """Bytes of the answer's body."""
    seconds: float
    model: str | None
    """None if the request was about no model, or was refused before the model was known."""
    error: str | None
    """Code of the refusal; None if there was none."""


class AccessLog:
    """Writes a line for each request whose level is high enough.

    Args:
        line_format: "plain", "json" or "off".
        level: the lowest level that is written, one of `LEVELS`.
    """

    def __init__(self, line_format: str, level: str) -> None:
        self.is_on = line_format != "off"
        self._format_line = format_json if line_format == "json" else format_plain
        self._lowest = LEVELS.index(level)
        self._waiting: SimpleQueue[str | None] = SimpleQueue()
        self._left_out = 0
        self._writer: threading.Thread | None = None

    def add(self, record: AccessRecord) -> None:
        """Hand over a request; it is written soon afterwards."""
        if not self.is_on or LEVELS.index(choose_level(record)) < self._lowest:
            return
        if self._waiting.qsize() >= MOST_WAITING:
            self._left_out += 1
            return
        # A line takes a few microseconds. Many at a time in the other thread would keep the interpreter from requests.
        self._waiting.put(self._format_line(record))
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_until_closed, name="access-log", daemon=True)
            self._writer.start()

    def close(self) -> None:
        """Write what is left, for `CLOSE_SECONDS` at most."""
        if self._writer is not None:
            self._waiting.put(None)
            self._writer.join(CLOSE_SECONDS)
            self._writer = None

    def _write_until_closed(self) -> None:
        is_open = True
        while is_open:
            waiting = [self._waiting.get()]
            if waiting[0] is not None:
                time.sleep(GATHER_SECONDS)
            try:
                while len(waiting) < MOST_WAITING:
                    waiting.append(self._waiting.get_nowait())
            except Empty:
                pass
            is_open = None not in waiting
            lines = [line for line in waiting if line is not None]
            left_out, self._left_out = self._left_out, 0
            if left_out:
                lines.append(f"{left_out} requests are not in this log: stderr took the lines too slowly")
            if lines:
                _write_stderr("\n".join([*lines, ""]))


def choose_request_id(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the X-Request-ID of a request if there is exactly one and it is safe; otherwise a new id."""
    given = [value for name, value in headers if name == b"x-request-id"]
    if len(given) == 1 and REQUEST_ID.fullmatch(given[0]):
        return given[0].decode()
    return secrets.token_hex(8)


def choose_level(record: AccessRecord) -> str:
    """Return "error" if the server failed, "warning" if it refused, "debug" for routine requests, otherwise "info"."""
    if record.path in QUIET_PATHS and record.error in QUIET_ERRORS:
        return "debug"
    if record.error is not None:
        return "error" if record.error == "failed" else "warning"
    return "debug" if record.path.endswith(QUIET_SUFFIXES) else "info"


def format_plain(record: AccessRecord) -> str:
    """Return a line for people; what may be missing stands at its end, with its name."""
    words = [
        _format_time(record.time),
        choose_level(record),
        record.client,
        record.method,
        _escape_path(record.path),
        str(record.status),
        f"{record.size} B",
        f"{record.seconds * 1000:.1f} ms",
    ]
    if record.model is not None:
        words.append(f"model={record.model}")
    if record.error is not None:
        words.append(f"error={record.error}")
    return " ".join([*words, f"id={record.request_id}"])


def format_json(record: AccessRecord) -> str:
    """Return a JSON object in one line."""
    return json.dumps(
        {
            "time": _format_time(record.time),
            "level": choose_level(record),
            "request_id": record.request_id,
            "client": record.client,
            "method": record.method,
            "path": _escape_path(record.path),
            "status": record.status,
            "bytes": record.size,
            "ms": round(record.seconds * 1000, 3),
            "model": record.model,
            "error": record.error,
        }
    )


def _format_time(seconds: float) -> str:
    milliseconds = round(seconds * 1000)
    return f"{_format_second(milliseconds // 1000)}.{milliseconds % 1000:03d}Z"


@lru_cache(maxsize=4)  # thousands of requests may share a second
def _format_second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _escape_path(path: str) -> str:
    """Return the path with spaces, control characters and the like percent-encoded, so that it stays one word."""
    escaped = quote(path, safe="/!$&'()*+,;=:@~", errors="replace")
    return escaped if len(escaped) <= LONGEST_PATH else f"{escaped[:LONGEST_PATH]}…"


def _write_stderr(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # closed, broken, or None as in a program without a console: there is nowhere left to say so
