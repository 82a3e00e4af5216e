"""The three questions about an image: what it shows, how the model represents it, what the model looked at."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

from vitrail.errors import did_you_mean
from vitrail.serving.batching import Answer, Batcher, ClosingError, FullError, LateError
from vitrail.serving.bodies import MULTIPART, Receive, files_of, kind_of_content
from vitrail.serving.http_errors import Headers, Refusal, busy, closing
from vitrail.serving.images import grey_png
from vitrail.serving.models import Kind, Ready, Rollout, Served, Work

if TYPE_CHECKING:
    from vitrail.serving.app import Service

log = logging.getLogger("vitrail")

Futures = list[asyncio.Future[Answer]]

TOP = 5
OPTIONS = {"classify": ("model", "top"), "embed": ("model",), "attention": ("model", "layer")}
MOST_OPTIONS = 20


class ClientGoneError(Exception):
    """Nobody is there any more to be answered."""


class Asked(NamedTuple):
    """A request without its body."""

    model: Served
    batcher: Batcher[Work, Ready, Any]
    top: int
    layer: int
    multipart: bool


class Question:
    """An ASGI app for one of them."""

    def __init__(self, kind: Kind, service: Service) -> None:
        self.kind, self.service = kind, service

    async def __call__(self, scope: Any, receive: Receive, send: Callable[[Any], Awaitable[None]]) -> None:
        """From headers to the last byte of the answer; a Refusal is left to the app."""
        self._check_state()
        self.service.answering += 1
        try:
            await self._respond(scope, receive, send)
        except ClientGoneError:
            return
        finally:
            self.service.answering -= 1

    async def _respond(self, scope: Any, receive: Receive, send: Callable[[Any], Awaitable[None]]) -> None:
        held = 0

        def took(count: int) -> None:
            nonlocal held
            held += count

        try:
            headers, body = await self._answer(scope, receive, took)
        finally:
            self.service.bodies.let_go(held)
        headers += [(b"content-length", str(len(body)).encode()), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _check_state(self) -> None:
        if self.service.state != "ready":
            raise closing() if self.service.state == "closing" else Refusal(503, "the models are not ready yet")

    async def _answer(self, scope: Any, receive: Receive, took: Callable[[int], None]) -> tuple[Headers, bytes]:
        started = time.monotonic()
        asked = self._asked(scope)
        body = await self.service.bodies.read(scope["headers"], receive, took)
        if not asked.multipart:
            (found,) = await self._computed(asked, [body], receive)
            if isinstance(found, Exception):
                raise _refusal(found)
            if self.kind == "attention":
                return _picture(found.result, asked.layer)
            told = {"model": asked.model.name, **self._told(found.result)}
            return _json(told, [found], started)
        most = self.service.settings.images_at_once
        files = await asyncio.get_running_loop().run_in_executor(
            self.service.pool, files_of, body, scope["headers"], most
        )
        del body  # the files are copies
        answers = await self._computed(asked, [file.content for file in files], receive)
        rows = [
            {
                "name": file.name,
                **({"error": str(_refusal(found))} if isinstance(found, Exception) else self._told(found.result)),
            }
            for file, found in zip(files, answers, strict=True)
        ]
        good = [found for found in answers if not isinstance(found, Exception)]
        if not good:
            first = _refusal(next(found for found in answers if isinstance(found, Exception)))
            raise (
                first
                if first.status not in (400, 413)
                else Refusal(400, f"none of the images can be read: {first}", "bad_image")
            )
        return _json({"model": asked.model.name, "images": rows}, good, started)

    def _asked(self, scope: Any) -> Asked:
        options = _options(scope["query_string"], OPTIONS[self.kind])
        model, batcher = self.service.named(options.get("model"))
        layers = model.backend.layers
        if self.kind == "classify" and not model.backend.labels:
            raise Refusal(422, f"{model.name} has no classes: ask /v1/embed", "no_classes")
        if self.kind == "embed" and model.backend.embedding is None:
            raise Refusal(422, f"{model.name} gives out no representation: ask /v1/classify", "no_embedding")
        if self.kind == "attention" and layers is None:
            raise Refusal(422, f"no attention to show: {model.backend.why_no_attention}", "no_attention")
        top = _whole(options, "top", TOP, None)
        layer = _whole(options, "layer", layers or 1, layers)
        multipart = kind_of_content(scope["headers"]) == MULTIPART
        if multipart and self.kind == "attention":
            raise Refusal(415, "attention is shown of one image at a time: send the file itself")
        return Asked(model, batcher, top, layer, multipart)

    async def _computed(self, asked: Asked, contents: Sequence[bytes], receive: Receive) -> list[Answer | Exception]:
        try:
            futures = asked.batcher.submit([Work(self.kind, content, asked.top) for content in contents])
        except FullError as full:
            raise busy(full.retry_after) from None
        except ClosingError:
            raise closing() from None
        await _while_there(futures, receive)
        return [future.exception() or future.result() for future in futures]  # type: ignore[misc]

    def _told(self, result: Any) -> dict[str, Any]:
        if self.kind == "embed":
            return {"embedding": result}
        return {"labels": [{"label": label, "probability": share} for label, share in result]}


async def _while_there(futures: Futures, receive: Receive) -> None:
    """Until all are answered; where the client goes away, what is left is cancelled."""

    def cancel(_: object = None) -> None:
        for future in futures:
            future.cancel()

    leaving = asyncio.ensure_future(receive())
    leaving.add_done_callback(cancel)
    try:
        await asyncio.wait(futures)
    finally:
        leaving.remove_done_callback(cancel)
        leaving.cancel()
        cancel()
    failures = [future.exception() for future in futures if not future.cancelled()]
    if len(failures) < len(futures):
        raise ClientGoneError


def _options(query: bytes, known: Sequence[str]) -> dict[str, str]:
    try:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=MOST_OPTIONS)
    except ValueError:
        raise Refusal(422, f"more than {MOST_OPTIONS} parameters") from None
    for name, _ in pairs:
        if name not in known:
            hint = did_you_mean(name[:100], known) or f"; there are {', '.join(known)}"
            raise Refusal(422, f"unknown parameter {name[:100]!r}{hint}", "unknown_parameter")
    return dict(pairs)


def _whole(options: dict[str, str], name: str, default: int, most: int | None) -> int:
    """A number from 1 on."""
    text = options.get(name, str(default))
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if number < 1 or (most is not None and number > most):
        bounds = "of 1 or more" if most is None else f"from 1 to {most}"
        raise Refusal(422, f"{name} = {text[:100]!r}: give a whole number {bounds}")
    return number


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, Refusal):
        return error
    if isinstance(error, LateError):
        return Refusal(503, "the deadline passed before this image's turn", "late", ((b"retry-after", b"1"),))
    log.error("an image could not be computed", exc_info=error)
    return Refusal(500, "this server has failed at the image; its log says why")


def _json(told: dict[str, Any], answers: Sequence[Answer], started: float) -> tuple[Headers, bytes]:
    """With the timing: of several images, that of the one that took longest."""
    told["timing"] = {
        "decode_ms": _milliseconds(max(answer.prepare for answer in answers)),
        "queue_ms": _milliseconds(max(answer.queue for answer in answers)),
        "compute_ms": _milliseconds(max(answer.compute for answer in answers)),
        "total_ms": _milliseconds(time.monotonic() - started),
    }
    return [(b"content-type", b"application/json")], json.dumps(told, ensure_ascii=False).encode()


def _milliseconds(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1000, 3)


def _picture(rollout: Rollout, layer: int) -> tuple[Headers, bytes]:
    shares = rollout.maps[layer - 1]
    headers = [
        (b"content-type", b"image/png"),
        (b"x-vitrail-box", ",".join(f"{part:.6g}" for part in rollout.box).encode()),
        (b"x-vitrail-layer", str(layer).encode()),
        (b"x-vitrail-peak", f"{float(shares.max()):.6g}".encode()),
    ]
    return headers, grey_png(shares)
