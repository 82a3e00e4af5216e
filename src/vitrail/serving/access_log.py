"""The access log: one line on stderr for each request, plain or JSON, and the ids by which requests are found in it.

Lines gather for a moment and are then written by the event loop, only as many as stderr takes at once. A stderr that is
slow, full or closed therefore delays no request and fails none. (A thread for it cost more: the interpreter's lock went
to and fro between the two, and on a busy machine each time was a wait.)
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import select
import sys
import time
from collections import deque
from datetime import UTC, datetime
from functools import lru_cache
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
LONGEST_METHOD = 20
"""Characters of a method that are logged."""
WRITE_BYTES = 4096
"""Bytes that are written at a time: a pipe that takes anything takes these at once (POSIX calls it PIPE_BUF)."""
GATHER_SECONDS = 0.05
"""Time for which lines gather until they are written together, and until a full pipe is tried again."""
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
        self._lines: deque[str] = deque()
        self._left_out = 0
        self._is_scheduled = False

    def add(self, record: AccessRecord) -> None:
        """Take a request from inside the event loop; its line is written soon afterwards."""
        if not self.is_on or LEVELS.index(choose_level(record)) < self._lowest:
            return
        if len(self._lines) >= MOST_WAITING:
            self._left_out += 1
            return
        self._lines.append(self._format_line(record))
        self._schedule()

    def close(self) -> None:
        """Write what is left, for `CLOSE_SECONDS` at most."""
        ends = time.monotonic() + CLOSE_SECONDS
        self._write()
        while self._lines and time.monotonic() < ends:
            time.sleep(0.01)
            self._write()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(GATHER_SECONDS, self._write_and_schedule)

    def _write_and_schedule(self) -> None:
        self._is_scheduled = False
        self._write()
        if self._lines:
            self._schedule()

    def _write(self) -> None:
        """Write as many lines as stderr takes without a wait."""
        while self._lines and _is_stderr_free():
            if self._left_out:
                self._lines.append(self._format_gap())
                self._left_out = 0
            text = f"{self._lines.popleft()}\n"
            while self._lines and len(text) + len(self._lines[0]) < WRITE_BYTES:
                text += f"{self._lines.popleft()}\n"
            _write_stderr(text)

    def _format_gap(self) -> str:
        words = f"{self._left_out} requests are not in this log: stderr took the lines too slowly"
        moment = _format_time(time.time())
        if self._format_line is format_json:
            return json.dumps({"time": moment, "level": "warning", "message": words})
        return f"{moment} warning {words}"


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
    model = f" model={record.model}" if record.model is not None else ""
    error = f" error={record.error}" if record.error is not None else ""
    return (
        f"{_format_time(record.time)} {choose_level(record)} {record.client} {record.method[:LONGEST_METHOD]} "
        f"{_escape_path(record.path)} {record.status} {record.size} B {record.seconds * 1000:.1f} ms"
        f"{model}{error} id={record.request_id}"
    )


def format_json(record: AccessRecord) -> str:
    """Return a JSON object in one line."""
    return json.dumps(
        {
            "time": _format_time(record.time),
            "level": choose_level(record),
            "request_id": record.request_id,
            "client": record.client,
            "method": record.method[:LONGEST_METHOD],
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


@lru_cache(maxsize=64)  # most requests are for the same few paths
def _escape_path(path: str) -> str:
    """Return the path with spaces, control characters and the like percent-encoded, so that it stays one word."""
    escaped = quote(path, safe="/!$&'()*+,;=:@~", errors="replace")
    return escaped if len(escaped) <= LONGEST_PATH else f"{escaped[:LONGEST_PATH]}..."


def _is_stderr_free() -> bool:
    try:
        return bool(select.select([], [sys.stderr.fileno()], [], 0)[1])
    except (OSError, ValueError, AttributeError):
        return True  # closed, or no file: writing neither waits nor fails a request


def _write_stderr(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # closed, broken, or None as in a program without a console: there is nowhere left to say so
