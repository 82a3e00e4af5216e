"""The HTTP app: routes, refusals, the token. Nothing here computes.

The three questions are asked thousands of times a second, so they are plain ASGI behind FastAPI's router: no model of
pydantic's is built for a request or an answer. `reference.py` describes them for OpenAPI.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any

import torch
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from vitrail.errors import did_you_mean
from vitrail.serving.batching import Batcher
from vitrail.serving.bodies import Bodies, Receive
from vitrail.serving.endpoints import Question
from vitrail.serving.http_errors import Refusal
from vitrail.serving.metrics import Metrics
from vitrail.serving.models import Kind, Ready, Served, Work
from vitrail.serving.reference import Health, Models, described, page_of
from vitrail.serving.settings import Settings

log = logging.getLogger("vitrail")

Scope = dict[str, Any]
Send = Callable[[Any], Awaitable[None]]

PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
QUESTIONS: tuple[Kind, ...] = ("classify", "embed", "attention")
OPEN = {*PAGE, "/healthz", "/readyz", "/docs", "/docs.css", "/openapi.json"}
"""What needs no token: what says nothing about models or clients."""
ROUTES = {*OPEN, "/metrics", "/v1/models", *(f"/v1/{kind}" for kind in QUESTIONS)}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
GONE = 499
"""What is counted where nobody was left to be answered, as others count it."""
ALWAYS = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]


class Service:
    """Models with a queue before each, and what they share.

    `state` is "starting" until all models are warm, then "ready", then "closing".
    """

    def __init__(self, models: Mapping[str, Served], settings: Settings) -> None:
        self.settings = settings
        self.state = "starting"
        self.metrics = Metrics()
        self.bodies = Bodies(settings.most_bytes, settings.most_held, settings.body_seconds)
        self.answering = 0
        """Questions that were taken and not answered yet."""
        self.models = dict(models)
        self.default = next(iter(models))
        self.pool = ThreadPoolExecutor(settings.decoders, "decode", initializer=torch.set_num_threads, initargs=(1,))
        self.batchers: dict[str, Batcher[Work, Ready, Any]] = {}
        for name, model in models.items():
            self.batchers[name] = Batcher(
                model.prepare,
                model.compute,
                self.pool,
                settings.limits,
                self.metrics.watching(name),
                model.backend.enter,
                settings.decoders,
            )
            self.metrics.queue(name, lambda batcher=self.batchers[name]: batcher.inside)  # type: ignore[misc]

    async def start(self) -> None:
        """Warm up, then answer."""
        for name, model in self.models.items():
            self.batchers[name].expect(await asyncio.to_thread(model.warm_up, self.settings.limits.batch))
        # The threads that decode set their number of threads first, for a part of that setting is everybody's.
        await asyncio.gather(*(asyncio.wrap_future(self.pool.submit(time.sleep, 0.01)) for _ in range(8)))
        for batcher in self.batchers.values():
            batcher.start()
        if self.state == "starting":
            self.state = "ready"

    async def close(self) -> None:
        """Accept nothing more and finish what was accepted, within the time that is given for it."""
        self.state = "closing"
        ends = time.monotonic() + self.settings.drain_seconds
        while self.answering and time.monotonic() < ends:
            await asyncio.sleep(0.01)
        for batcher in self.batchers.values():
            batcher.refuse()
        if not self.answering:
            await asyncio.gather(*(batcher.close() for batcher in self.batchers.values() if batcher.alive))
        self.pool.shutdown(wait=False, cancel_futures=True)

    @property
    def failed(self) -> bool:
        """Whether a model computes no longer, though it should."""
        return self.state == "ready" and not all(batcher.alive for batcher in self.batchers.values())

    def named(self, name: str | None) -> tuple[Served, Batcher[Work, Ready, Any]]:
        """A model that was given at the start, the first if none is named; a Refusal for any other."""
        name = name or self.default
        if name not in self.models:
            hint = did_you_mean(name, self.models) or f"; there are {', '.join(self.models)}"
            raise Refusal(404, f"there is no model {name[:100]!r}{hint}", "unknown_model")
        return self.models[name], self.batchers[name]


class Front:
    """Around the app: the token, what every answer carries, and counting. The questions go past FastAPI's layers, which
    they need nothing of, and which each of thousands of small images would pay for."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        self.app, self.service = app, service
        self.questions = {f"/v1/{kind}": Question(kind, service) for kind in QUESTIONS}
        token = service.settings.token
        self.wanted = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        started, status, service = time.perf_counter(), 0, self.service
        route = scope["path"] if scope["path"] in ROUTES else "other"

        async def sending(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *ALWAYS]
            await send(message)

        asked = self.questions.get(scope["path"]) if scope["method"] == "POST" else None
        try:
            self._check_token(scope)
            await (asked or self.app)(scope, receive, sending)
        except Refusal as refusal:
            await refuse(refusal, sending, service.metrics)
        except Exception:
            log.exception("%s %s", scope["method"], route)
            if not status:
                await refuse(failure(), sending, service.metrics)
        finally:
            service.metrics.answered(route, status or GONE, time.perf_counter() - started)

    def _check_token(self, scope: Scope) -> None:
        if self.wanted is None or scope["path"] in OPEN:
            return
        scheme, _, shown = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(shown.strip(), self.wanted):
            asks = ((b"www-authenticate", b"Bearer"),)
            raise Refusal(401, "this server wants a token: send Authorization: Bearer TOKEN", headers=asks)


def failure() -> Refusal:
    """500: what nobody thought of."""
    return Refusal(500, "this server has failed at the request; its log says why")


async def refuse(refusal: Refusal, send: Send, metrics: Metrics) -> None:
    """Send a refusal."""
    metrics.refused(refusal.code)
    body = refusal.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *refusal.headers]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def build_app(service: Service) -> Front:
    """The ASGI app."""
    app = FastAPI(
        title="vitrail", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, version=_version()
    )
    for kind in QUESTIONS:
        app.router.routes.append(Route(f"/v1/{kind}", _by_another_method, methods=["POST"]))
    _add_looks(app, service)
    _add_page(app)
    generated = app.openapi
    app.openapi = lambda: described(generated(), service.settings)  # type: ignore[method-assign]

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        service.metrics.refused(error.code)
        headers = {name.decode(): value.decode() for name, value in error.headers}
        return Response(error.body(), error.status, headers, "application/json")

    @app.exception_handler(HTTPException)
    async def wrong_path(request: Request, error: HTTPException) -> Response:
        said = {404: "there is nothing at this path: /docs lists what there is", 405: "not by this method: see /docs"}
        headers = tuple((name.encode(), value.encode()) for name, value in (error.headers or {}).items())
        message = said.get(error.status_code, str(error.detail))
        return await refused(request, Refusal(error.status_code, message, headers=headers))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return await refused(request, failure())

    return Front(app, service)


def _add_looks(app: FastAPI, service: Service) -> None:
    """What is asked by machines that look after the server."""

    @app.get("/v1/models", response_model=Models, summary="The models that are served", tags=["models"])
    async def models() -> Any:
        return {"default": service.default, "models": [model.facts for model in service.models.values()]}

    @app.get("/healthz", response_model=Health, summary="Whether the process lives", tags=["state"])
    async def healthz() -> Any:
        if service.failed:
            raise Refusal(503, "a model computes no longer: start this server again", "failed")
        return {"state": "alive"}

    @app.get("/readyz", response_model=Health, summary="Whether requests are welcome", tags=["state"])
    async def readyz() -> Any:
        if service.state != "ready" or service.failed:
            state = "failed" if service.failed else service.state
            raise Refusal(503, f"this server is {state}", state)
        return {"state": "ready"}

    @app.get("/metrics", summary="Counters and timings in Prometheus' format", tags=["state"], response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=Metrics.content_type)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Any:
        return app.openapi()

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return _static(page_of(app.openapi()).encode(), "text/html; charset=utf-8")


def _add_page(app: FastAPI) -> None:
    """Files that come with the package, read once."""
    room = files("vitrail.serving")
    places = {path: (room.joinpath("page", name), kind) for path, (name, kind) in PAGE.items()}
    places["/docs.css"] = (room.joinpath("reference.css"), "text/css; charset=utf-8")
    for path, (file, kind) in places.items():
        answer = _static(file.read_bytes(), kind)

        async def give(request: Request, answer: Response = answer) -> Response:
            return answer

        app.router.routes.append(Route(path, give, methods=["GET"]))


def _static(content: bytes, kind: str) -> Response:
    return Response(
        content, headers={"content-security-policy": POLICY, "cache-control": "no-cache", "content-type": kind}
    )


async def _by_another_method(request: Request) -> Response:
    """Behind the router a question is only known by its path: what is asked rightly never comes here."""
    raise AssertionError


def _version() -> str:
    from vitrail import __version__

    return __version__
