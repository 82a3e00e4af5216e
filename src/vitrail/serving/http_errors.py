"""Errors that become HTTP answers: a status, a code for programs and a message for people."""

from __future__ import annotations

import json

Headers = list[tuple[bytes, bytes]]

CODES = {
    400: "bad_request",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    408: "too_slow",
    413: "too_large",
    415: "unsupported_media_type",
    422: "wrong_parameter",
    429: "busy",
    500: "failed",
    503: "unavailable",
}
CLOSE = (b"connection", b"close")
"""The header that ends a connection whose body was not read to its end."""


class HttpError(Exception):
    """An answer other than 200.

    Args:
        status: the HTTP status.
        message: a sentence for the person.
        code: a word for programs; by default the one in `CODES`.
        headers: headers to send besides the usual ones.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code or CODES.get(status, "refused")
        self.headers = headers

    def body(self, request_id: str) -> bytes:
        """Return the JSON body of the answer."""
        error = {"code": self.code, "message": self.message, "request_id": request_id}
        return json.dumps({"error": error}, ensure_ascii=False).encode()


def busy_error(retry_after: int, reason: str = "too many requests are waiting") -> HttpError:
    """Return a 429 that asks the client to retry after so many seconds."""
    header = (b"retry-after", str(retry_after).encode())
    return HttpError(429, f"{reason}: try again in {retry_after} s", headers=(header,))


def closing_error() -> HttpError:
    """Return the 503 of a server that is shutting down."""
    return HttpError(503, "this server is shutting down: try again", "shutting_down", ((b"retry-after", b"1"), CLOSE))
