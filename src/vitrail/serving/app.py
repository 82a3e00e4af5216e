"""The HTTP app: its routes, and one middleware around them for the token, headers, errors, metrics and the log."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.serving.access_log import AccessRecord, choose_request_id
from vitrail.serving.endpoints import MODEL_KEY, ImageEndpoint
from vitrail.serving.http_errors import CLOSE, HttpError
from vitrail.serving.metrics import ServerMetrics
from vitrail.serving.reference import OPEN_PATHS, SCRIPT_PATHS, describe_api, render_reference
from vitrail.serving.served_model import Operation
from vitrail.serving.service import Service
from vitrail.serving.settings import ServerSettings

log = logging.getLogger("vitrail")

HTML, CSS, JAVASCRIPT = (f"text/{name}; charset=utf-8" for name in ("html", "css", "javascript"))
STATIC_FILES = {
    "/": ("page/index.html", HTML),
    "/page.css": ("page/page.css", CSS),
    "/docs.css": ("reference.css", CSS),
    **{path: (f"page{path}", JAVASCRIPT) for path in SCRIPT_PATHS},
}
"""Files inside this package by the path at which they are served, with their content types."""
OPERATIONS: tuple[Operation, ...] = ("classify", "predict", "embed", "attention")
PATHS = {*OPEN_PATHS, "/metrics", "/v1/models", *(f"/v1/{operation}" for operation in OPERATIONS)}
HEALTH_PATHS = ("/healthz", "/readyz")
"""Paths that also take HEAD, which some load balancers send."""
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
CLIENT_GONE = 499
"""Status counted for a request whose client left before the answer, as in nginx."""
COMMON_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
ROUTING_MESSAGES = {
    404: "there is nothing at this path: /docs lists the paths",
    405: "this path does not take that method: see /docs",
}


def build_app(service: Service) -> ASGIApp:
    """Return the ASGI app that answers for the service."""
    # The image endpoints come first: routes are tried in order, and these are called most.
    images = [Route(f"/v1/{name}", ImageEndpoint(name, service), methods=["POST"]) for name in OPERATIONS]
    routes = [*images, *_state_routes(service), *_reference_routes(service.settings), *_static_routes()]
    return RequestMiddleware(Router(routes, redirect_slashes=False), service)


class RequestMiddleware:
    """Checks the token of every request, adds headers, turns errors into JSON answers, counts and logs."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service
        token = service.settings.token
        self.token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        scope["app"] = (
            self  # with an app, Starlette raises for a wrong path or method instead of answering in plain text
        )
        started, status, size, refusal = time.perf_counter(), 0, 0, None
        path = scope["path"] if scope["path"] in PATHS else "other"
        request_id = choose_request_id(scope["headers"])
        id_header = (b"x-request-id", request_id.encode())

        async def send_with_headers(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *COMMON_HEADERS, id_header]
            else:
                size += len(message.get("body", b""))
            await send(message)

        async def send_error(error: HttpError) -> None:
            nonlocal refusal
            refusal = error.code
            self.service.metrics.count_rejection(error.code)
            await _send_error(error, request_id, send_with_headers)

        try:
            _check_host(scope)
            self._check_token(scope)
            await self.app(scope, receive, send_with_headers)
        except HttpError as error:
            await send_error(error)
        except HTTPException as error:
            await send_error(_from_starlette(error))
        except Exception:
            log.exception("%s %s, request %s", scope["method"], path, request_id)
            if not status:
                await send_error(HttpError(500, "this server has failed at the request; its log says why"))
        finally:
            status, seconds = status or CLIENT_GONE, time.perf_counter() - started
            self.service.metrics.count_request(path, status, seconds)
            if self.service.access_log.is_on:
                self.service.access_log.add(_record(scope, request_id, status, size, seconds, refusal))

    def _check_token(self, scope: Scope) -> None:
        if self.token is None or scope["path"] in OPEN_PATHS:
            return
        scheme, _, token = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self.token):
            header = (b"www-authenticate", b"Bearer")
            raise HttpError(401, "this server needs a token: send Authorization: Bearer TOKEN", headers=(header,))


def _check_host(scope: Scope) -> None:
    """Refuse two Host headers: a proxy in front may have believed the other one."""
    if sum(name == b"host" for name, _ in scope["headers"]) > 1:
        raise HttpError(400, "the request has more than one Host header", headers=(CLOSE,))


def _record(scope: Scope, request_id: str, status: int, size: int, seconds: float, refusal: str | None) -> AccessRecord:
    client = scope["client"][0] if scope.get("client") else "-"
    model = scope.get(MODEL_KEY)
    return AccessRecord(
        time.time(), request_id, client, scope["method"], scope["path"], status, size, seconds, model, refusal
    )


async def _send_error(error: HttpError, request_id: str, send: Send) -> None:
    body = error.body(request_id)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *error.headers]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _from_starlette(error: HTTPException) -> HttpError:
    """Return the error of Starlette's router as one of ours."""
    headers = tuple((name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items())
    message = ROUTING_MESSAGES.get(error.status_code, str(error.detail))
    return HttpError(error.status_code, message, headers=headers)


def _state_routes(service: Service) -> list[Route]:
    """Return the routes for monitoring, and the list of models."""

    async def models(request: Request) -> Response:
        return JSONResponse({"default": service.default, "models": [model.facts for model in service.models.values()]})

    async def healthz(request: Request) -> Response:
        if service.has_failed:
            raise HttpError(503, "a model no longer computes: restart this server", "failed")
        return JSONResponse({"state": "alive"})

    async def readyz(request: Request) -> Response:
        state = "failed" if service.has_failed else service.state
        if state != "ready":
            raise HttpError(503, f"this server is {state}", state)
        return JSONResponse({"state": "ready"})

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.render(), headers={"content-type": ServerMetrics.content_type})

    endpoints = {"/v1/models": models, "/healthz": healthz, "/readyz": readyz, "/metrics": metrics}
    return [_get_route(path, endpoint) for path, endpoint in endpoints.items()]


def _reference_routes(settings: ServerSettings) -> list[Route]:
    document = describe_api(settings)
    json_answer = JSONResponse(document)
    page_answer = _static_answer(render_reference(document).encode(), HTML)

    async def openapi(request: Request) -> Response:
        return json_answer

    async def docs(request: Request) -> Response:
        return page_answer

    return [_get_route("/openapi.json", openapi), _get_route("/docs", docs)]


def _get_route(path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
    route = Route(path, endpoint)
    if path not in HEALTH_PATHS:
        route.methods = {"GET"}  # without HEAD, which Starlette adds
    return route


def _static_routes() -> list[Route]:
    package = files("vitrail.serving")
    routes = []
    for path, (file, content_type) in STATIC_FILES.items():
        answer = _static_answer(package.joinpath(file).read_bytes(), content_type)

        async def send_file(request: Request, answer: Response = answer) -> Response:
            return answer

        routes.append(Route(path, send_file))
    return routes


def _static_answer(content: bytes, content_type: str) -> Response:
    headers = {"content-security-policy": CONTENT_SECURITY_POLICY, "cache-control": "no-cache"}
    return Response(content, headers={**headers, "content-type": content_type})
