"""`serve`: models behind HTTP, until the server is stopped."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from vitrail.errors import ConfigError, MissingExtraError, did_you_mean
from vitrail.system.events import OnEvent, open_listener
from vitrail.system.files import read_regular_file

if TYPE_CHECKING:
    from vitrail.inference.engine import Model
    from vitrail.serving.served_model import ServedModel

    Models: TypeAlias = Model | Sequence[Model] | Mapping[str, Model]

BACKENDS = ("torch", "onnx")
TOKEN_VARIABLE = "VITRAIL_TOKEN"
MOST_TOKEN_BYTES = 10_000
"""Largest token file that is read."""
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def serve(
    models: Models = "pane",
    *,
    which: str = "last",
    host: str = "127.0.0.1",
    port: int = 8000,
    batch: int = 32,
    wait: float = 5.0,
    queue: int = 256,
    deadline: float = 10.0,
    token: str | None = None,
    threads: int | None = None,
    precision: str = "fp32",
    backend: str | None = None,
    access_log: str = "plain",
    log_level: str = "info",
    on_event: OnEvent | None = None,
) -> None:
    """Serve models over HTTP until Ctrl-C or SIGTERM, with batching, limits, metrics, and a page at /.

    Events:
        loading: name, model: a model is being loaded.
        ready: models, classes, answers, url, needs_token, limits: requests are accepted. `models` are the names that
            requests may give; by name, `classes` has their numbers of classes and `answers` what they give in words,
            such as "12 tags", or None; and `limits` has images (waiting), bytes (of a request), pixels (of an image)
            and seconds (to the answer).
        stopped: no values. The server has answered what it had accepted.

    Args:
        models: a model, a list of models, or models by name. A model is anything that `vitrail.load` takes (in a list
            also NAME=MODEL), an exported .onnx or .xml file, or a loaded model, which is copied. Requests that name no
            model get the first.
        which: "last", or "best" for the weights of runs that had the best evaluation.
        host: address to listen on; 0.0.0.0 for all.
        port: port to listen on.
        batch: largest number of images that are computed at a time.
        wait: milliseconds that an idle model waits for images that are being decoded.
        queue: largest number of images in the server; further requests get the answer 429.
        deadline: seconds within which an accepted request is answered.
        token: clients must send it; without one, that of the environment variable VITRAIL_TOKEN, if it is set.
        threads: CPU threads for each matrix product; all cores if None.
        precision: fp32, or a faster one: bf16, fp16 and fp8 (GPU), int8 (CPU), or auto. Exported files have their own.
        backend: "torch" or "onnx" requires models or .onnx files; None takes both.
        access_log: "plain" or "json" writes a line on stderr for each request, "off" none.
        log_level: the requests that are logged: "debug" all, "info" all but successful health checks, "warning" those
            that were refused or failed, "error" those that failed.
        on_event: called with events.

    Raises:
        ConfigError: an option is not valid, or the port is taken.
        MissingExtraError: the packages for serving are not installed.
        WeightsError: a model cannot be read.
    """
    if backend is not None and backend not in BACKENDS:
        hint = did_you_mean(backend, BACKENDS) or ":"
        raise ConfigError(f"backend {backend}{hint} there are {', '.join(BACKENDS)}")
    models_by_name = name_models(models)
    if which != "last":
        from vitrail.weights.source import choose_weights

        models_by_name = {name: choose_weights(_describe(model), which) for name, model in models_by_name.items()}
    from vitrail.serving.batching import QueueLimits
    from vitrail.serving.settings import ServerSettings, count_cores

    settings = ServerSettings(
        host=host,
        port=port,
        limits=QueueLimits(batch, wait / 1000, queue, deadline),
        token=read_token(None) if token is None else token,
        threads=count_cores() if threads is None else threads,
        access_log=access_log,
        log_level=log_level,
    )
    _check_extra()
    from vitrail.serving import server

    server.check_port(host, port)  # before the weights are read
    with open_listener(on_event) as listener:
        served = {}
        for name, model in models_by_name.items():
            listener("loading", {"name": name, "model": str(model) if isinstance(model, str | Path) else name})
            served[name] = open_served_model(
                name, model, backend, threads=settings.threads, precision=precision, batch=batch
            )
        ready = {
            "models": list(served),
            "classes": {name: len(model.labels) for name, model in served.items()},
            "answers": {name: model.facts["answers"] for name, model in served.items()},
            "url": f"http://{f'[{host}]' if ':' in host else host}:{port}",
            "needs_token": settings.token is not None,
            "limits": settings.summarise_limits(),
        }
        server.run_server(served, settings, lambda: listener("ready", ready))
        listener("stopped", {})


def name_models(models: Models) -> dict[str, Model]:
    """Return models by the names that requests give, in their order; see `serve`."""
    if isinstance(models, Mapping):
        for name in models:
            if not MODEL_NAME.fullmatch(name):
                raise ConfigError(f"{name!r} is no name for a model: give letters, digits, '.', '_' or '-'")
        named: dict[str, Model] = dict(models)
    else:
        named = {}
        for model in [models] if isinstance(models, str | Path) or not isinstance(models, Sequence) else models:
            name, model = _split_name(model)
            if name in named:
                raise ConfigError(f"two models are called {name}: name them, as in {name}-2={_describe(model)}")
            named[name] = model
    if not named:
        raise ConfigError("there is no model to serve: name one or more (--model MODEL)")
    return named


def open_served_model(
    name: str,
    model: Model,
    backend: str | None = None,
    *,
    threads: int | None = None,
    precision: str = "fp32",
    batch: int = 1,
) -> ServedModel:
    """Load a model for the server; it is not warmed up yet. The arguments are those of `serve`."""
    from vitrail.inference.engine import is_exported, open_engine
    from vitrail.serving.served_model import ServedModel

    path = Path(model) if isinstance(model, str | Path) else None
    if backend == "onnx" and (path is None or path.suffix.lower() != ".onnx" or not path.is_file()):
        made = "vitrail export makes one"
        raise ConfigError(
            f"backend onnx (--backend onnx) serves .onnx files, and {_describe(model)} is not one: {made}"
        )
    if backend == "torch" and is_exported(model):
        raise ConfigError(f"{model} is an exported file, not a model for torch: leave backend (--backend) out")
    if path is None:
        model = copy.deepcopy(model)  # its layers are packed, which ends its training
    return ServedModel(
        name,
        open_engine(model, target="latency", batch=batch, threads=threads, precision=precision, owns_model=True),
    )


def read_token(file: Path | None) -> str | None:
    """Return the token in the file, else the one in VITRAIL_TOKEN; None if neither is given."""
    if file is None:
        token = os.environ.get(TOKEN_VARIABLE)
        if token == "":
            raise ConfigError(f"{TOKEN_VARIABLE} is empty: put a token into it, or unset it to serve without one")
        return token
    try:
        token = read_regular_file(file, MOST_TOKEN_BYTES).decode().strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--token-file {file} cannot be read: {reason}") from None
    if not token:
        raise ConfigError(f"--token-file {file} is empty: write a token into it, or leave the option out")
    return token


def _split_name(model: Model) -> tuple[str, Model]:
    """Return the name of a model, given as NAME=MODEL or made from MODEL, and the model."""
    if not isinstance(model, str | Path):
        return "model", model
    text = str(model)
    name, equals, rest = text.partition("=")
    if not equals or not MODEL_NAME.fullmatch(name) or Path(text).exists():
        return _shorten_name(text), text
    if not rest:
        raise ConfigError(f"{text}: there is no model after the name")
    return name, rest


def _shorten_name(model: str) -> str:
    """Return the last part of a path or hub name, with only the characters that a URL carries well.

    The best weights of a run, in NAME/best, are NAME-best.
    """
    *before, last = re.split(r"[/:\\]", model.rstrip("/\\"))
    last = f"{before[-1]}-best" if before and last == "best" else last.partition("@")[0]
    for suffix in (".onnx", ".xml", ".safetensors"):
        last = last.removesuffix(suffix)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.") or "model"


def _describe(model: Model) -> str:
    return str(model) if isinstance(model, str | Path) else "MODEL"


def _check_extra() -> None:
    try:
        import granian  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import starlette  # noqa: F401
    except ImportError:
        raise MissingExtraError("serving", "serve") from None
