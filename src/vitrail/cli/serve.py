"""vitrail serve: models behind HTTP, and a page where anyone can drop a photo."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.cli.completion import WhichOption, complete_precision
from vitrail.cli.printing import PRECISION_HELP, announce_pane, print_lines
from vitrail.system.commands import quote_word


def serve(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]MODEL",
            help="A folder or file of weights, a run, hf:owner/name, timm:name, an .onnx or .xml file; several by "
            "name. pane if not given.",
        ),
    ] = None,
    which: WhichOption = "last",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    backend: Annotated[
        str | None, typer.Option(help="torch or onnx, to take nothing else; not needed otherwise.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Images computed at a time, at most.")] = 32,
    wait: Annotated[float, typer.Option(help="Milliseconds an idle model waits for images on their way.")] = 5.0,
    queue: Annotated[int, typer.Option(help="Images inside at a time, at most; beyond, 429.")] = 256,
    deadline: Annotated[float, typer.Option(help="Seconds within which what is accepted is answered.")] = 10.0,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that clients must show; or VITRAIL_TOKEN.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="For each product; all cores if not given.")] = None,
    precision: Annotated[
        str,
        typer.Option(
            autocompletion=complete_precision,
            help=PRECISION_HELP,
        ),
    ] = "fp32",
    access_log: Annotated[
        str, typer.Option(metavar="plain|json|off", help="A line on stderr for each request, or none.")
    ] = "plain",
    log_level: Annotated[
        str,
        typer.Option(
            metavar="debug|info|warning|error",
            help="Requests in that log: debug adds health checks, warning has those that were refused or failed.",
        ),
    ] = "info",
) -> None:
    """Serve models over HTTP, with batching, limits, metrics, and a page at /.

    vitrail serve --model MODEL, then open http://127.0.0.1:8000 and drop a photo; or
    curl --data-binary @photo.jpg -H "Content-Type: image/jpeg" http://127.0.0.1:8000/v1/classify
    """
    from vitrail.errors import ConfigError

    if context.args:
        raise ConfigError(
            f"models are named by an option: vitrail serve --model {' --model '.join(map(quote_word, context.args))}"
        )
    from vitrail.serving.serve import read_token
    from vitrail.serving.serve import serve as serve_models
    from vitrail.weights.source import PANE

    def print_event(kind: str, values: dict[str, Any]) -> None:
        if kind == "loading":
            if not model:
                announce_pane("--model MODEL takes another")
            print(f"loading {values['model']}", file=sys.stderr)
        elif kind == "ready":
            print_lines([_describe_server(values)])
        elif kind == "stopped":
            with suppress(OSError):  # whoever read stderr may have gone, which is no failure of the server
                print("stopped", file=sys.stderr)
            has_served.append(True)

    has_served: list[bool] = []
    serve_models(
        model or PANE,
        which=which,
        host=host,
        port=port,
        batch=batch,
        wait=wait,
        queue=queue,
        deadline=deadline,
        token=read_token(token_file),
        threads=threads,
        precision=precision,
        backend=backend,
        access_log=access_log,
        log_level=log_level,
        on_event=print_event,
    )
    if has_served:
        _end_process()


def _end_process() -> None:
    """End the process with exit code 0, without the steps by which Python takes itself apart.

    A thread of granian may still run after the last answer. If it wants Python's lock while Python is ending, it aborts
    the process, and a server that stopped well would look like one that crashed.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody may be reading any more
            stream.flush()
    os._exit(0)


def _describe_server(values: dict[str, Any]) -> str:
    """Return one line with the models, the address and the limits."""
    limits = values["limits"]
    models = [f"{name} ({answers or 'no classes'})" for name, answers in values["answers"].items()]
    token = " with a token" if values["needs_token"] else ""
    return (
        f"serving {', '.join(models)} at {values['url']}{token}: up to {limits['images']} waiting images, "
        f"{limits['bytes'] / 1e6:g} MB a request, {limits['pixels'] / 1e6:g} megapixels an image, "
        f"deadline {limits['seconds']:g} s"
    )
