"""Read request bodies, with limits on their bytes, their time and the bytes held at once; parse multipart forms."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from vitrail.serving.http_errors import CLOSE, Headers, HttpError, busy_error

Receive = Callable[[], Awaitable[Any]]

RAW = ("application/octet-stream", "")
"""Content types that hold one image, besides image/*. A missing content type counts as raw bytes."""
MULTIPART = "multipart/form-data"
MOST_HEADER_BYTES = 16_384
"""Largest header of one part of a multipart body."""
MOST_FIELDS = 32
"""Largest number of parts of a multipart body that are not files."""

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # else it logs every broken body that a client sends


class UploadedFile(NamedTuple):
    """One file of a multipart body."""

    name: str
    content: bytes


class BodyReader:
    """Reads request bodies within limits.

    Args:
        most_bytes: largest number of bytes in one body.
        most_held: largest number of bytes in all bodies that are read and not answered yet.
        seconds: time within which a body must arrive.
    """

    def __init__(self, most_bytes: int, most_held: int, seconds: float) -> None:
        self.most_bytes, self.most_held, self.seconds = most_bytes, most_held, seconds
        self.held = 0

    async def read(self, headers: Headers, receive: Receive) -> bytes:
        """Return the whole body. Its bytes count as held until the caller hands their number to `release`.

        Raises:
            HttpError: 400, 408, 413 or 429.
        """
        length = dict(headers).get(b"content-length", b"")
        if length.isdigit() and int(length) > self.most_bytes:
            raise self._too_large_error()
        try:
            async with asyncio.timeout(self.seconds):
                return await self._read_parts(receive)
        except TimeoutError:
            raise HttpError(408, f"the body did not arrive within {self.seconds:g} s", headers=(CLOSE,)) from None

    async def _read_parts(self, receive: Receive) -> bytes:
        parts, total = [], 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HttpError(400, "the body ended early", "truncated", (CLOSE,))
                part = message.get("body", b"")
                total += len(part)
                self.held += len(part)
                if total > self.most_bytes:
                    raise self._too_large_error()
                if self.held > self.most_held:
                    raise busy_error(1, "too many bytes are being held")
                parts.append(part)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
        except BaseException:
            self.release(total)
            raise

    def release(self, count: int) -> None:
        """Record that so many bytes are no longer held."""
        self.held -= count

    def _too_large_error(self) -> HttpError:
        return HttpError(413, f"the body has more than {self.most_bytes:,} bytes", "too_many_bytes", (CLOSE,))


def read_content_type(headers: Headers) -> str:
    """Return the content type without its parameters; raise a 415 for one that holds no image."""
    content_type = dict(headers).get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if content_type in RAW or content_type == MULTIPART or content_type.startswith("image/"):
        return content_type
    raise HttpError(
        415,
        f"{content_type[:100]!r} is no image: send the file itself with Content-Type image/jpeg, image/png, … or "
        f"application/octet-stream, or several as {MULTIPART}",
    )


def read_multipart(body: bytes, headers: Headers, most: int) -> list[UploadedFile]:
    """Return the files in a multipart body, in their order.

    Raises:
        HttpError: 400 if the body is broken or holds no file, 413 if it holds more than `most`.
    """
    _, options = parse_options_header(dict(headers).get(b"content-type", b""))
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 70:
        raise HttpError(400, f"{MULTIPART} has no boundary", "bad_multipart")
    parts = _MultipartParts(most)
    try:
        parser = MultipartParser(boundary, parts.callbacks())  # type: ignore[arg-type]
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise HttpError(400, f"the {MULTIPART} body is broken: {error}", "bad_multipart") from None
    if not parts.has_ended:
        raise HttpError(400, f"the {MULTIPART} body ended early", "bad_multipart")
    if not parts.files:
        raise HttpError(400, f"there is no file in the {MULTIPART} body", "no_image")
    return parts.files


class _MultipartParts:
    """Collects the files of a multipart body while the parser calls back."""

    def __init__(self, most: int) -> None:
        self.files: list[UploadedFile] = []
        self.has_ended = False
        self._most, self._part_count = most, 0
        self._field = self._value = self._disposition = b""
        self._content: list[bytes] = []

    def callbacks(self) -> dict[str, Callable[..., None]]:
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_field,
            "on_header_value": self._on_value,
            "on_header_end": self._on_header_end,
            "on_part_data": self._on_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def _on_part_begin(self) -> None:
        self._part_count += 1
        if self._part_count > self._most + MOST_FIELDS:
            raise HttpError(413, f"more than {self._most + MOST_FIELDS} parts in one request", "too_many_images")
        self._disposition, self._content = b"", []

    def _on_field(self, data: bytes, start: int, end: int) -> None:
        self._field = self._check_header(self._field + data[start:end])

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value = self._check_header(self._value + data[start:end])

    def _on_header_end(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._disposition = self._value
        self._field = self._value = b""

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        self._content.append(data[start:end])

    def _on_part_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"filename" not in options:
            return  # a form field, not a file
        if len(self.files) == self._most:
            raise HttpError(413, f"more than {self._most} images in one request", "too_many_images")
        self.files.append(UploadedFile(options[b"filename"].decode("utf-8", "replace"), b"".join(self._content)))

    def _on_end(self) -> None:
        self.has_ended = True

    def _check_header(self, header: bytes) -> bytes:
        if len(header) > MOST_HEADER_BYTES:
            raise HttpError(400, f"a part's header has more than {MOST_HEADER_BYTES:,} bytes", "bad_multipart")
        return header
