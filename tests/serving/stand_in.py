"""A server of made-up answers for the page: the same routes, headers and errors as the real one, and no model."""

from __future__ import annotations

import io
import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from PIL import Image, ImageOps

import vitrail
from vitrail.tasks.task import AnswerLine, format_share

PAGE = Path(vitrail.__file__).parent / "serving" / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{f"/{path.name}": (path.name, "text/javascript; charset=utf-8") for path in PAGE.glob("*.js")},
}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'"
ROWS, COLUMNS = 6, 6
TIMING = {"decode_ms": 3.2, "queue_ms": 0.4, "compute_ms": 12.3, "total_ms": 20.1}


@dataclass(frozen=True)
class Model:
    """One that a server may have; `cover`: it sees the centre, a square, and not all of the image squashed."""

    name: str = "vit"
    classes: int = 1000
    layers: int | None = 4
    attention: bool = True
    cover: bool = False
    labels: tuple[str, ...] = ("tabby cat", "Egyptian cat", "lynx", "window screen", "Persian cat")
    shares: tuple[float, ...] = (0.62, 0.2, 0.0514, 0.0042, 0.0001)
    task: str = "labels"
    lines: tuple[AnswerLine, ...] = ()
    """What is answered, for another task than labels."""
    set_size: int = 0
    """Labels in a set, for a model that gives sets."""
    is_unknown: bool | None = None
    """What it says of every image, if it tells unknown ones."""

    def told(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in ("name", "classes", "layers", "attention")}
        task = self.task if self.classes or self.lines else None
        answers = f"{self.classes:,} class{'' if self.classes == 1 else 'es'}" if task == "labels" else self.task
        lines = len(self.lines) or min(self.classes, 5)
        about = {"task": task, "answers": answers if task else None, "lines": lines}
        about |= {"coverage": self.set_size > 0, "unknown": self.is_unknown is not None}
        return {**told, **about, "image_size": [224, 224], "embedding": 384}

    def judged(self, query: dict[str, str]) -> dict[str, Any]:
        """What is said of how far the answer can be relied on."""
        about: dict[str, Any] = {}
        if "coverage" in query:
            rows = [*zip(self.labels, self.shares, strict=False)][: self.set_size]
            labels = [{"label": name, "probability": share} for name, share in rows]
            about = {"coverage": float(query["coverage"]), "set": labels}
        return about if self.is_unknown is None else {**about, "unknown": self.is_unknown, "known_share": 0.01}

    def answered(self, top: int) -> list[dict[str, Any]]:
        """The lines of an answer."""
        if self.lines:
            return [line._asdict() for line in self.lines]
        rows = [*zip(self.labels, self.shares, strict=False)][:top]
        return [AnswerLine(name, format_share(p), p, k == 0)._asdict() for k, (name, p) in enumerate(rows)]


@dataclass
class Seen:
    """A request, as it came."""

    method: str
    path: str
    query: dict[str, str]
    content_type: str | None
    size: int


@dataclass
class StandIn:
    """The server's behaviour, which a test may change as it goes, and what was asked of it."""

    models: tuple[Model, ...] = (Model(),)
    token: str | None = None
    most_bytes: int = 200_000
    busy: deque[str] = field(default_factory=deque)  # a Retry-After for each request to be refused with 429
    stopping: bool = False
    seen: list[Seen] = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)  # images are answered while it is set
    most_at_once: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        self.open.set()
        self._now = 0
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def asked(self, path: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.path == path]

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts who is inside at once, and keeps them there while the server is held up."""
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            self.open.wait(20)
            yield
        finally:
            with self._lock:
                self._now -= 1

    @contextmanager
    def running(self) -> Iterator[StandIn]:
        """Answers until left; entered again, on the same port."""
        server = Quiet(("127.0.0.1", self.port), partial(Handler, self))
        self.port = server.server_port
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.open.set()
            server.shutdown()
            server.server_close()
            thread.join()


class Quiet(ThreadingHTTPServer):
    """Says nothing of browsers that went away: the page aborts requests of removed images."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class Refusal(Exception):
    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers


class Handler(BaseHTTPRequestHandler):
    """One request, one connection: nothing is left open when the server goes."""

    def __init__(self, stand: StandIn, *arguments: Any) -> None:
        self.stand = stand
        super().__init__(*arguments)

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        path, query = urlsplit(self.path).path, dict(parse_qsl(urlsplit(self.path).query))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.stand.seen.append(Seen(self.command, path, query, self.headers.get("Content-Type"), len(body)))
        try:
            self.route(path, query, body)
        except Refusal as refusal:
            error = {"error": {"code": refusal.code, "message": refusal.message}}
            self.say(refusal.status, json.dumps(error).encode(), "application/json", refusal.headers)

    def route(self, path: str, query: dict[str, str], body: bytes) -> None:
        if path in FILES:
            name, kind = FILES[path]
            self.say(200, (PAGE / name).read_bytes(), kind, {"Content-Security-Policy": POLICY})
            return
        if self.stand.token and self.headers.get("Authorization") != f"Bearer {self.stand.token}":
            raise Refusal(401, "unauthorized", "A bearer token is needed.")
        if (self.command, path) == ("GET", "/v1/models"):
            models = [model.told() for model in self.stand.models]
            self.json({"default": self.stand.models[0].name, "models": models})
        elif self.command == "POST" and path in ("/v1/predict", "/v1/embed", "/v1/attention"):
            with self.stand.working():
                self.look(path, query, body)
        else:
            raise Refusal(404, "not_found", f"There is nothing at {path}.")

    def look(self, path: str, query: dict[str, str], body: bytes) -> None:
        model = next((model for model in self.stand.models if model.name == query["model"]), None)
        if model is None:
            raise Refusal(404, "unknown_model", f"There is no model {query['model']!r}.")
        if self.stand.stopping:
            raise Refusal(503, "shutting_down", "The server is shutting down.")
        if self.stand.busy:
            wait = self.stand.busy.popleft()
            raise Refusal(429, "queue_full", "The queue is full.", **{"Retry-After": wait})
        if len(body) > self.stand.most_bytes:
            raise Refusal(413, "too_large", f"the body has more than {self.stand.most_bytes:,} bytes")
        try:
            image = ImageOps.exif_transpose(Image.open(io.BytesIO(body)))
        except OSError:
            raise Refusal(400, "damaged_image", "This is not an image that can be read: <b>damaged</b>.") from None
        if path == "/v1/attention":
            self.attention(model, image, query)
        elif path == "/v1/embed":
            self.json({"model": model.name, "embedding": [0.0] * 384, "timing": TIMING})
        else:
            lines = model.answered(int(query["top"]))
            about = {"task": model.task, "answer": {}, "lines": lines, **model.judged(query)}
            self.json({"model": model.name, **about, "timing": TIMING})

    def attention(self, model: Model, image: Image.Image, query: dict[str, str]) -> None:
        if not model.attention:
            raise Refusal(422, "no_attention", "This model has no attention.")
        layer = int(query.get("layer", model.layers or 1))
        file = io.BytesIO()
        Image.fromarray(made_map(layer)).save(file, "PNG")
        width, height = image.size
        side = min(image.size)
        seen = ((width - side) / 2 / width, (height - side) / 2 / height, side / width, side / height)
        box = ",".join(f"{part:.6f}" for part in (seen if model.cover else (0, 0, 1, 1)))
        headers = {"X-Vitrail-Box": box, "X-Vitrail-Layer": str(layer), "X-Vitrail-Peak": "0.0875"}
        self.say(200, file.getvalue(), "image/png", headers)

    def json(self, answer: dict[str, Any]) -> None:
        self.say(200, json.dumps(answer).encode(), "application/json", {})

    def say(self, status: int, body: bytes, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)


def made_map(layer: int) -> np.ndarray:
    """(rows, columns), uint8: a hill whose top lies on the diagonal, further down the higher the layer (and round)."""
    down, across = np.mgrid[:ROWS, :COLUMNS]
    hill = np.exp(-((down - layer % ROWS) ** 2 + (across - layer % COLUMNS) ** 2) / 4)
    return np.round(hill / hill.max() * 255).astype(np.uint8)


if __name__ == "__main__":  # to look at the page while it is being made
    many = (
        Model(),
        Model("cover", cover=True),
        Model("resnet", attention=False, layers=None),
        Model("bare", classes=0),
    )
    with StandIn(many, most_bytes=20_000_000).running() as stand:
        print(stand.address)
        time.sleep(3600)
