"""Serve models by name: what `vitrail serve` does."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.errors import ConfigError, MissingExtraError, did_you_mean

if TYPE_CHECKING:
    from vitrail.serving.served_model import ServedModel
    from vitrail.serving.settings import ServerSettings

BACKENDS = ("torch", "onnx")
TOKEN_VARIABLE = "VITRAIL_TOKEN"
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def serve_models(
    models: Sequence[str],
    settings: ServerSettings,
    *,
    backend: str = "torch",
    precision: str = "fp32",
    on_load: Callable[[str], None] | None = None,
    on_ready: Callable[[list[str]], None] | None = None,
) -> None:
    """Load the models, warm them up, and serve until SIGTERM or SIGINT.

    Args:
        models: MODEL or NAME=MODEL. Requests that name no model get the first.
        backend: "torch", or "onnx" for .onnx files.
        on_load: called with each model before it is loaded.
        on_ready: called with the names of the models when the server accepts requests.

    Raises:
        ConfigError: if an option is wrong or the port is taken.
        MissingExtraError: if the packages for serving are not installed.
    """
    if backend not in BACKENDS:
        hint = did_you_mean(backend, BACKENDS) or ":"
        raise ConfigError(f"--backend {backend}{hint} there are {', '.join(BACKENDS)}")
    if not models:
        raise ConfigError("--model is missing: vitrail serve --model MODEL")
    models_by_name = parse_models(models)
    _check_extra()
    from vitrail.serving.server import check_port, run_server

    check_port(settings.host, settings.port)  # before the weights are read
    served = {}
    for name, model in models_by_name.items():
        if on_load is not None:
            on_load(model)
        served[name] = open_model(name, model, backend, settings.threads, precision, settings.limits.batch)
    run_server(served, settings, None if on_ready is None else lambda: on_ready(list(served)))


def parse_models(models: Sequence[str]) -> dict[str, str]:
    """Return the models by name, in their order. Each is MODEL or NAME=MODEL."""
    models_by_name: dict[str, str] = {}
    for option in models:
        name, equals, model = option.partition("=")
        if not equals or not MODEL_NAME.fullmatch(name) or Path(option).exists():
            name, model = _short_model_name(option), option
        if name in models_by_name:
            raise ConfigError(f"two models are called {name}: give --model NAME={model}")
        if not model:
            raise ConfigError(f"--model {option}: there is no model after the name")
        models_by_name[name] = model
    return models_by_name


def open_model(
    name: str, model: str, backend: str = "torch", threads: int | None = None, precision: str = "fp32", batch: int = 1
) -> ServedModel:
    """Load a model for the server; it is not warmed up yet.

    Args:
        model: MODEL for "torch", the path of an .onnx file for "onnx".
        threads: threads for each matrix product; the library's own number if None.
        batch: the number of images that will usually be computed at a time.
    """
    from vitrail.serving.backends import OnnxBackend, TorchBackend
    from vitrail.serving.served_model import ServedModel

    if backend == "onnx":
        path = Path(model)
        if path.suffix != ".onnx" or not path.is_file():
            raise ConfigError(f"--backend onnx serves .onnx files, and {model} is not one: vitrail export makes one")
        if precision != "fp32":
            raise ConfigError("--precision is for --backend torch: an .onnx file has the precision it was exported in")
        return ServedModel(name, OnnxBackend(path, threads))
    if Path(model).suffix == ".onnx":
        raise ConfigError(f"{model} is an ONNX file: give --backend onnx")
    from vitrail.weights.load import load

    return ServedModel(name, TorchBackend(load(model), threads, precision=precision, batch=batch))


def read_token(file: Path | None) -> str | None:
    """Return the token in the file, else the one in VITRAIL_TOKEN; None if neither is given."""
    if file is None:
        token = os.environ.get(TOKEN_VARIABLE)
        if token == "":
            raise ConfigError(f"{TOKEN_VARIABLE} is empty: put a token into it, or unset it to serve without one")
        return token
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file {file} cannot be read: {error}") from None
    if not token:
        raise ConfigError(f"--token-file {file} is empty: write a token into it, or leave the option out")
    return token


def _short_model_name(model: str) -> str:
    """Return the last part of a path or hub name, with only the characters that a URL carries well."""
    last = (
        re.split(r"[/:\\]", model.rstrip("/\\"))[-1]
        .partition("@")[0]
        .removesuffix(".onnx")
        .removesuffix(".safetensors")
    )
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.") or "model"


def _check_extra() -> None:
    try:
        import granian  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import starlette  # noqa: F401
    except ImportError:
        raise MissingExtraError("serving", "serve") from None
