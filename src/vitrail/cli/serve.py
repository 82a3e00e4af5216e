"""vitrail serve: models behind HTTP, and a page where anyone can drop a photo."""

from __future__ import annotations

import sys
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
            print_lines([f"serving {', '.join(values['models'])} at {values['url']}"])
        elif kind == "stopped":
            print("stopped", file=sys.stderr)

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
        on_event=print_event,
    )
