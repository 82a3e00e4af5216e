"""vitrail serve: models by name → a server."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.errors import ConfigError, MissingExtraError, did_you_mean

if TYPE_CHECKING:
    from vitrail.serving.models import Served
    from vitrail.serving.settings import Settings

BACKENDS = ("torch", "onnx")
TOKEN = "VITRAIL_TOKEN"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def run(
    models: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    backend: str = "torch",
    batch: int = 32,
    wait: float = 5.0,
    queue: int = 256,
    deadline: float = 10.0,
    token_file: Path | None = None,
    threads: int | None = None,
    precision: str = "fp32",
    loading: Callable[[str], None] | None = None,
    ready: Callable[[Settings, list[str]], None] | None = None,
) -> None:
    """Load, warm up and serve until told to stop.

    Args:
        models: MODEL or NAME=MODEL; the first is the one that is meant where a request names none.
        wait: milliseconds; `deadline`: seconds.
        loading: told of each model before it is loaded.
        ready: told when requests are welcome, with the names of the models.
    """
    if backend not in BACKENDS:
        raise ConfigError(
            f"--backend {backend}{did_you_mean(backend, BACKENDS) or ':'} there are {', '.join(BACKENDS)}"
        )
    if not models:
        raise ConfigError("--model is missing: vitrail serve --model MODEL")
    named = by_name(models)
    _check_extra()
    from vitrail.serving.batching import Limits
    from vitrail.serving.server import check_free, serve
    from vitrail.serving.settings import Settings

    given: dict[str, Any] = {} if threads is None else {"threads": threads}
    settings = Settings(
        host=host,
        port=port,
        limits=Limits(batch, wait / 1000, queue, deadline),
        token=read_token(token_file),
        **given,
    )
    check_free(host, port)  # before the weights are read
    served = {}
    for name, model in named.items():
        if loading is not None:
            loading(model)
        served[name] = open_model(name, model, backend, settings.threads, precision, batch)
    serve(served, settings, None if ready is None else lambda: ready(settings, list(served)))


def by_name(models: Sequence[str]) -> dict[str, str]:
    """MODEL or NAME=MODEL of each → the models by name, in their order."""
    named: dict[str, str] = {}
    for given in models:
        name, equals, model = given.partition("=")
        if not equals or not NAME.fullmatch(name) or Path(given).exists():
            name, model = _own_name(given), given
        if name in named:
            raise ConfigError(f"two models are called {name}: give --model NAME={model}")
        if not model:
            raise ConfigError(f"--model {given}: there is no model behind the name")
        named[name] = model
    return named


def open_model(
    name: str, model: str, backend: str = "torch", threads: int | None = None, precision: str = "fp32", batch: int = 1
) -> Served:
    """One model, ready to be warmed up."""
    from vitrail.serving.models import OnnxBackend, Served, TorchBackend

    if backend == "onnx":
        path = Path(model)
        if path.suffix != ".onnx" or not path.is_file():
            raise ConfigError(f"--backend onnx serves .onnx files, and {model} is none: vitrail export makes one")
        if precision != "fp32":
            raise ConfigError("--precision is for --backend torch: an .onnx file has the precision it was exported in")
        return Served(name, OnnxBackend(path, threads))
    if Path(model).suffix == ".onnx":
        raise ConfigError(f"{model} is served with --backend onnx")
    from vitrail.weights.load import load

    return Served(name, TorchBackend(load(model), threads, precision=precision, batch=batch))


def read_token(file: Path | None) -> str | None:
    """From a file, else from the environment; None where there is none."""
    if file is None:
        token = os.environ.get(TOKEN)
        if token == "":
            raise ConfigError(f"{TOKEN} is set and empty: put a token into it, or unset it to serve without one")
        return token
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file {file} cannot be read: {error}") from None
    if not token:
        raise ConfigError(f"--token-file {file} is empty: write a token into it, or leave the option out")
    return token


def _own_name(model: str) -> str:
    """The last part of a path or of a name on the hub, without what an address cannot carry well."""
    last = (
        re.split(r"[/:\\]", model.rstrip("/\\"))[-1]
        .partition("@")[0]
        .removesuffix(".onnx")
        .removesuffix(".safetensors")
    )
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.") or "model"


def _check_extra() -> None:
    try:
        import fastapi  # noqa: F401
        import granian  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
    except ImportError:
        raise MissingExtraError("serving", "serve") from None
