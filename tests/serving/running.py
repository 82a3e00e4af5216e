"""Real servers in processes of their own, and what their tests send them. Run as a program, this is such a server."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import vitrail
from vitrail.data.transforms.preprocess import prepare
from vitrail.weights.save import save

COMMAND = "import typer; from vitrail.cli.serve import serve; typer.run(serve)"


@dataclass
class Running:
    port: int
    process: subprocess.Popen[str]
    said: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def socket(self, timeout: float = 10) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def told(self, request: bytes, timeout: float = 10, ends: bool = False) -> bytes:
        """All that comes back until the server closes, or nothing more comes; `ends`: nothing more will be sent."""
        with self.socket(timeout) as wire:
            with suppress(OSError):  # refused before all was sent; the answer can still be there
                wire.sendall(request)
                if ends:
                    wire.shutdown(socket.SHUT_WR)
            return rest(wire)


def rest(wire: socket.socket) -> bytes:
    found = b""
    try:
        while part := wire.recv(65536):
            found += part
            head, ended, body = found.partition(b"\r\n\r\n")
            length = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
            if ended and length and len(body) >= int(length[0]):
                break
    except OSError:
        pass
    return found


def post(path: str, body: bytes = b"", kind: str = "image/png", **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", f"Content-Type: {kind}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def make_model(folder: Path, seed: int = 0, classes: int = 7, **options: Any) -> Path:
    """One whose guesses differ from image to image."""
    sizes = {"image_size": 16, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64}
    model = vitrail.create_model("Ti/4", **{**sizes, **options}, num_classes=classes, seed=seed)
    if classes:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            model.head.weight.normal_(generator=generator)
    return save(model, folder)


def image(seed: int = 0, size: tuple[int, int] = (24, 20), kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def expected(folder: Path, content: bytes) -> np.ndarray:
    """Probabilities, by the model itself."""
    model = vitrail.load(folder)
    with torch.inference_mode():
        return model(prepare(content, model.preprocessing)[None]).softmax(dim=1)[0].numpy()


@contextmanager
def running(*command: str, port: int | None = None, environment: dict[str, str] | None = None) -> Iterator[Running]:
    """A server that is ready; at the end it is told to stop, and must do so well."""
    port = port or free_port()
    process = subprocess.Popen(
        [sys.executable, *command, "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )
    said: list[str] = []
    ready = threading.Event()

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if line.startswith("serving "):
                ready.set()
        ready.set()

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        assert ready.wait(60)
        assert process.poll() is None, said
        yield Running(port, process, said)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, said
    finally:
        process.kill()
        process.wait()
        listener.join()
        process.stdout.close()  # type: ignore[union-attr]


@contextmanager
def command_line(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[Running]:
    with running("-c", COMMAND, *arguments, environment=environment) as server:
        yield server


@contextmanager
def with_settings(
    model: Path, limits: dict[str, Any] | None = None, slow: float = 0.0, **settings: Any
) -> Iterator[Running]:
    """What the command line does not offer: short limits, and a model that takes so many seconds for a batch."""
    told = json.dumps({"model": str(model), "limits": limits or {}, "slow": slow, "settings": settings})
    with running(__file__, told) as server:
        yield server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    from vitrail.serving.batching import QueueLimits
    from vitrail.serving.serve import open_served_model
    from vitrail.serving.server import run_server
    from vitrail.serving.settings import ServerSettings

    told, _, port = sys.argv[1:]
    given = json.loads(told)
    model = open_served_model("tiny", given["model"], threads=1)
    compute = model.engine.predict

    def slowly(pixels: Any) -> Any:
        time.sleep(given["slow"])
        return compute(pixels)

    model.engine.predict = slowly
    settings = ServerSettings(port=int(port), limits=QueueLimits(**given["limits"]), threads=1, **given["settings"])
    run_server({"tiny": model}, settings, lambda: print("serving tiny", flush=True))


if __name__ == "__main__":
    main()
