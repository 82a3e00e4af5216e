"""What a client sends after its headers: read with limits on bytes, on time, and on all that is held at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from vitrail.serving.http_errors import Headers, Refusal, busy

Receive = Callable[[], Awaitable[Any]]

RAW = ("application/octet-stream", "")
"""Kinds of content beside image/* that are one image. Nothing said is taken for bytes."""
MULTIPART = "multipart/form-data"
MOST_HEADER = 16_384
"""Bytes of the headers of one part of a multipart body."""
MOST_FIELDS = 32
"""Parts of a multipart body that are no files."""

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # else each broken body of a stranger's is a line of ours


class File(NamedTuple):
    """One file of a multipart body."""

    name: str
    content: bytes


class Bodies:
    """Reads bodies.

    Args:
        most_bytes: of one body.
        most_held: bytes of all bodies that have been read and not answered.
        seconds: in which a body must have arrived.
    """

    def __init__(self, most_bytes: int, most_held: int, seconds: float) -> None:
        self.most_bytes, self.most_held, self.seconds = most_bytes, most_held, seconds
        self.held = 0

    async def read(self, headers: Headers, receive: Receive, took: Callable[[int], None]) -> bytes:
        """All of it, or a Refusal. `took` is told of bytes as they come, which `let_go` must be told of in the end."""
        length = dict(headers).get(b"content-length", b"")
        if length.isdigit() and int(length) > self.most_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self.seconds):
                return await self._read(receive, took)
        except TimeoutError:
            raise Refusal(
                408, f"the body did not arrive within {self.seconds:g} s", headers=((b"connection", b"close"),)
            ) from None

    async def _read(self, receive: Receive, took: Callable[[int], None]) -> bytes:
        parts, total = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "the body ended early", "truncated", ((b"connection", b"close"),))
            part = message.get("body", b"")
            total += len(part)
            if total > self.most_bytes:
                raise self._too_large()
            self.held += len(part)
            took(len(part))
            if self.held > self.most_held:
                raise busy(1, "too many bytes are being held")
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def let_go(self, count: int) -> None:
        """So many bytes are not needed any more."""
        self.held -= count

    def _too_large(self) -> Refusal:
        return Refusal(
            413, f"the body has more than {self.most_bytes:,} bytes", "too_many_bytes", ((b"connection", b"close"),)
        )


def kind_of_content(headers: Headers) -> str:
    """The media type without its parameters, or a Refusal for one that holds no image."""
    kind = dict(headers).get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if kind in RAW or kind == MULTIPART or kind.startswith("image/"):
        return kind
    raise Refusal(
        415,
        f"{kind[:100]!r} is no image: send the file itself with Content-Type image/jpeg, image/png, … or "
        f"application/octet-stream, or several as {MULTIPART}",
    )


def files_of(body: bytes, headers: Headers, most: int) -> list[File]:
    """The files in a multipart body, in their order; a Refusal where it is broken, or holds none or too many."""
    _, options = parse_options_header(dict(headers).get(b"content-type", b""))
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 70:
        raise Refusal(400, f"{MULTIPART} has no boundary", "bad_multipart")
    found = _Collected(most)
    try:
        parser = MultipartParser(boundary, found.callbacks())  # type: ignore[arg-type]
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise Refusal(400, f"the {MULTIPART} body is broken: {error}", "bad_multipart") from None
    if not found.ended:
        raise Refusal(400, f"the {MULTIPART} body ended early", "bad_multipart")
    if not found.files:
        raise Refusal(400, f"there is no file in the {MULTIPART} body", "no_image")
    return found.files


class _Collected:
    """What the parser has come across."""

    def __init__(self, most: int) -> None:
        self.files: list[File] = []
        self.ended = False
        self._most, self._parts = most, 0
        self._field = self._value = self._disposition = b""
        self._content: list[bytes] = []

    def callbacks(self) -> dict[str, Callable[..., None]]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._on_field,
            "on_header_value": self._on_value,
            "on_header_end": self._on_header_end,
            "on_part_data": self._on_data,
            "on_part_end": self._on_end,
            "on_end": self._on_whole,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > self._most + MOST_FIELDS:
            raise Refusal(413, f"more than {self._most + MOST_FIELDS} parts in one request", "too_many_images")
        self._disposition, self._content = b"", []

    def _on_field(self, data: bytes, start: int, end: int) -> None:
        self._field = self._bounded(self._field + data[start:end])

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value = self._bounded(self._value + data[start:end])

    def _on_header_end(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._disposition = self._value
        self._field = self._value = b""

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        self._content.append(data[start:end])

    def _on_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"filename" not in options:
            return  # a field of a form, not a file
        if len(self.files) == self._most:
            raise Refusal(413, f"more than {self._most} images in one request", "too_many_images")
        self.files.append(File(options[b"filename"].decode("utf-8", "replace"), b"".join(self._content)))

    def _on_whole(self) -> None:
        self.ended = True

    def _bounded(self, header: bytes) -> bytes:
        if len(header) > MOST_HEADER:
            raise Refusal(400, f"a part's header has more than {MOST_HEADER:,} bytes", "bad_multipart")
        return header
