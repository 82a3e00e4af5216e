"""The endpoints that take images: /v1/classify, /v1/predict, /v1/embed and /v1/attention."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import numpy as np
from PIL import Image
from starlette.types import Receive, Scope, Send

from vitrail.errors import did_you_mean
from vitrail.inference.predictor import RankedLabels
from vitrail.reliability.sets import check_coverage
from vitrail.reliability.unknown import describe_familiarity
from vitrail.serving.attention import Array
from vitrail.serving.batching import DeadlinePassedError, QueueClosedError, QueueFullError, QueueResult
from vitrail.serving.http_errors import Headers, HttpError, busy_error, closing_error
from vitrail.serving.request_body import MULTIPART, UploadedFile, read_content_type, read_multipart
from vitrail.serving.served_model import (
    ANSWERING,
    ImageRequest,
    JudgedAnswer,
    Operation,
    RolloutMaps,
    ServedModel,
)
from vitrail.serving.service import ModelBatcher, Service
from vitrail.serving.settings import MOST_TOP, TOP

OPTIONS = {
    "classify": ("model", "top", "coverage"),
    "predict": ("model", "top", "coverage"),
    "embed": ("model",),
    "attention": ("model", "layer"),
}
MOST_OPTIONS = 20
MODEL_KEY = "vitrail.model"
"""Key of the scope under which an endpoint leaves the name of the model, for the access log."""


class ClientGoneError(Exception):
    """The client closed its connection before the answer."""


class ImageQuery(NamedTuple):
    """What the path, the query string and the headers of a request ask for."""

    model: ServedModel
    batcher: ModelBatcher
    top: int
    coverage: float | None
    layer: int
    is_multipart: bool


class ImageEndpoint:
    """An ASGI app that answers one of the four endpoints.

    It is plain ASGI, without Starlette's Request and Response, because it answers thousands of small images a second.
    """

    def __init__(self, operation: Operation, service: Service) -> None:
        self.operation, self.service = operation, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or raise an HttpError."""
        if self.service.state != "ready":
            is_closing = self.service.state == "closing"
            raise closing_error() if is_closing else HttpError(503, "the models are not ready yet")
        self.service.unanswered += 1
        try:
            headers, body = await self._answer(scope, receive)
            headers += [(b"content-length", str(len(body)).encode()), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        except ClientGoneError:
            return
        finally:
            self.service.unanswered -= 1

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[Headers, bytes]:
        started = time.monotonic()
        query = self._read_query(scope)
        body = await self.service.bodies.read(scope["headers"], receive)
        size = len(body)
        try:
            if not query.is_multipart:
                return await self._answer_one(query, body, receive, started)
            files = await asyncio.get_running_loop().run_in_executor(
                self.service.pool, read_multipart, body, scope["headers"], self.service.settings.images_at_once
            )
            del body  # the files are copies
            return await self._answer_several(query, files, receive, started)
        finally:
            self.service.bodies.release(size)

    async def _answer_one(
        self, query: ImageQuery, content: bytes, receive: Receive, started: float
    ) -> tuple[Headers, bytes]:
        (computed,) = await self._compute(query, [content], receive)
        if isinstance(computed, Exception):
            raise _to_http_error(computed)
        if self.operation == "attention":
            return _rollout_answer(computed.result, query.layer)
        return _json_answer({"model": query.model.name, **self._describe(computed.result)}, [computed], started)

    async def _answer_several(
        self, query: ImageQuery, files: Sequence[UploadedFile], receive: Receive, started: float
    ) -> tuple[Headers, bytes]:
        rows: list[dict[str, Any]] = []
        errors: list[HttpError] = []
        results: list[QueueResult] = []
        for file, computed in zip(
            files, await self._compute(query, [file.content for file in files], receive), strict=True
        ):
            if isinstance(computed, Exception):
                errors.append(_to_http_error(computed))
                rows.append({"name": file.name, "error": str(errors[-1])})
            else:
                results.append(computed)
                rows.append({"name": file.name, **self._describe(computed.result)})
        if not results:
            if errors[0].status in (400, 413):
                raise HttpError(400, f"none of the images can be read: {errors[0]}", "bad_image")
            raise errors[0]
        return _json_answer({"model": query.model.name, "images": rows}, results, started)

    def _read_query(self, scope: Scope) -> ImageQuery:
        options = _read_options(scope["query_string"], OPTIONS[self.operation])
        model, batcher = self.service.find_model(options.get("model"))
        scope[MODEL_KEY] = model.name
        layers = model.rollout.layers
        if self.operation in ANSWERING and not model.has_answers:
            raise HttpError(422, f"{model.name} has no classes: use /v1/embed", "no_classes")
        if self.operation == "classify" and not model.labels:
            wrong = f"{model.name} gives {model.task.summarise()} and no labels: use /v1/predict"
            raise HttpError(422, wrong, "no_labels")
        if self.operation == "embed" and model.facts["embedding"] is None:
            instead = "/v1/classify" if model.labels else "/v1/predict"
            raise HttpError(422, f"{model.name} gives no representations: use {instead}", "no_embedding")
        if self.operation == "attention" and layers is None:
            raise HttpError(422, f"no attention to show: {model.rollout.why_none}", "no_attention")
        if "coverage" in options and not model.gives_sets:
            advice = "`vitrail calibrate` fits it" if model.labels else "only models of one label an image have them"
            wrong = f"nothing was fitted for sets of labels (coverage) of {model.name}: {advice}"
            raise HttpError(422, wrong, "no_sets")
        top, coverage = _read_number(options, "top", TOP, MOST_TOP), _read_coverage(options)
        layer = _read_number(options, "layer", layers or 1, layers)
        is_multipart = read_content_type(scope["headers"]) == MULTIPART
        if is_multipart and self.operation == "attention":
            raise HttpError(415, "attention is shown for one image at a time: send the file itself")
        return ImageQuery(model, batcher, top, coverage, layer, is_multipart)

    async def _compute(
        self, query: ImageQuery, contents: Sequence[bytes], receive: Receive
    ) -> list[QueueResult | Exception]:
        try:
            requests = [ImageRequest(self.operation, content, query.top, query.coverage) for content in contents]
            futures = query.batcher.submit(requests)
        except QueueFullError as error:
            raise busy_error(error.retry_after) from None
        except QueueClosedError:
            raise closing_error() from None
        await _wait_while_connected(futures, receive)
        return [future.exception() or future.result() for future in futures]  # type: ignore[misc]

    def _describe(self, result: Any) -> dict[str, Any]:
        if self.operation == "embed":
            return {"embedding": result}
        if isinstance(result, JudgedAnswer):
            return {**self._describe(result.result), **self._describe_judgement(result)}
        if self.operation == "predict":
            answer: dict[str, Any] = result.to_dict()
            return answer
        return {"labels": _list_labels(result)}

    def _describe_judgement(self, judged: JudgedAnswer) -> dict[str, Any]:
        """Return the coverage with the set of labels, unless that is the answer itself, and what is known of unknown
        images."""
        content: dict[str, Any] = {}
        if judged.coverage is not None:
            content = {"coverage": judged.coverage}
            if self.operation == "predict":
                content["set"] = _list_labels(judged.label_set)
        return content if judged.familiarity is None else {**content, **describe_familiarity(judged.familiarity)}


def _list_labels(ranked: RankedLabels) -> list[dict[str, Any]]:
    return [{"label": label, "probability": probability} for label, probability in ranked]


async def _wait_while_connected(futures: Sequence[asyncio.Future[QueueResult]], receive: Receive) -> None:
    """Wait until all futures are done. If the client disconnects first, cancel them and raise ClientGoneError."""

    def cancel(_: object = None) -> None:
        for future in futures:
            future.cancel()

    disconnect = asyncio.ensure_future(receive())  # after the body, the next message is the disconnect
    disconnect.add_done_callback(cancel)
    try:
        await asyncio.wait(futures)
    finally:
        disconnect.remove_done_callback(cancel)
        disconnect.cancel()
        cancel()
    outcomes = [future.exception() for future in futures if not future.cancelled()]  # also marks them as retrieved
    if len(outcomes) < len(futures):
        raise ClientGoneError


def _read_options(query: bytes, known: Sequence[str]) -> dict[str, str]:
    try:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=MOST_OPTIONS)
    except ValueError:
        raise HttpError(422, f"more than {MOST_OPTIONS} parameters") from None
    for name, _ in pairs:
        if name not in known:
            hint = did_you_mean(name[:100], known) or f"; there are {', '.join(known)}"
            raise HttpError(422, f"unknown parameter {name[:100]!r}{hint}", "unknown_parameter")
    return dict(pairs)


def _read_number(options: dict[str, str], name: str, default: int, most: int | None) -> int:
    """Return an option as a number of at least 1 and at most `most`; None for no limit."""
    text = options.get(name, str(default))
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if number < 1 or (most is not None and number > most):
        bounds = "of 1 or more" if most is None else f"from 1 to {most}"
        raise HttpError(422, f"{name} = {text[:100]!r}: give a whole number {bounds}")
    return number


def _read_coverage(options: dict[str, str]) -> float | None:
    """Return the coverage that sets of labels should have; None if no set is wanted."""
    text = options.get("coverage")
    if text is None:
        return None
    try:
        coverage = float(text[:20])
        check_coverage(coverage)
    except ValueError:  # a ConfigError is one
        raise HttpError(422, f"coverage = {text[:20]!r}: give a share between 0 and 1, such as 0.95") from None
    return coverage


def _to_http_error(error: Exception) -> HttpError:
    if isinstance(error, HttpError):
        return error
    if isinstance(error, DeadlinePassedError):
        return HttpError(503, "the deadline passed before this image's turn", "late", ((b"retry-after", b"1"),))
    return HttpError(500, "this server has failed at the image; its log says why")


def _json_answer(content: dict[str, Any], results: Sequence[QueueResult], started: float) -> tuple[Headers, bytes]:
    """Return headers and body, with the timing; for several images, the longest time of each stage."""
    content["timing"] = {
        "decode_ms": _to_milliseconds(max(result.prepare for result in results)),
        "queue_ms": _to_milliseconds(max(result.queue for result in results)),
        "compute_ms": _to_milliseconds(max(result.compute for result in results)),
        "total_ms": _to_milliseconds(time.monotonic() - started),
    }
    return [(b"content-type", b"application/json")], json.dumps(content, ensure_ascii=False).encode()


def _to_milliseconds(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1000, 3)


def _rollout_answer(rollout: RolloutMaps, layer: int) -> tuple[Headers, bytes]:
    shares = rollout.maps[layer - 1]
    headers = [
        (b"content-type", b"image/png"),
        (b"x-vitrail-box", ",".join(f"{part:.6g}" for part in rollout.box).encode()),
        (b"x-vitrail-layer", str(layer).encode()),
        (b"x-vitrail-peak", f"{float(shares.max()):.6g}".encode()),
    ]
    return headers, encode_grey_png(shares)


def encode_grey_png(shares: Array) -> bytes:
    """Return (rows, columns) attention shares as an 8-bit grey PNG in which the largest share is 255."""
    largest = max(float(shares.max()), np.finfo(np.float64).tiny)
    file = io.BytesIO()
    Image.fromarray(np.rint(shares / largest * 255).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()
