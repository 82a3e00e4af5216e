"""What a client is told when a request cannot be answered: a status, a code for programs, a sentence for people."""

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


class Refusal(Exception):
    """An answer other than the one that was asked for."""

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code or CODES.get(status, "refused")
        self.headers = headers

    def body(self) -> bytes:
        """The JSON that is sent."""
        return json.dumps({"error": {"code": self.code, "message": self.message}}, ensure_ascii=False).encode()


def busy(retry_after: int, what: str = "too many requests are waiting") -> Refusal:
    """429: come again."""
    after = (b"retry-after", str(retry_after).encode())
    return Refusal(429, f"{what}: try again in {retry_after} s", headers=(after,))


def closing() -> Refusal:
    """503: another server of its kind may answer."""
    headers = ((b"retry-after", b"1"), (b"connection", b"close"))
    return Refusal(503, "this server is shutting down: try again", "shutting_down", headers)
