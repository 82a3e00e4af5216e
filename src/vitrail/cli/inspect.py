"""vitrail inspect: the paper's figures from any model, as one page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.cli.completion import WhichOption, complete_device
from vitrail.cli.printing import announce_pane, interruptible, print_lines


def inspect(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] …",
            help="Folders or files of weights, runs, hf:owner/name, timm:name; if none, the newest run, else pane.",
        ),
    ] = None,
    which: WhichOption = "last",
    images: Annotated[
        str | None,
        typer.Option(
            help="A folder of images, an image, or a data set; a run's own, or two photographs, if not given."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="report.html; in the run's folder, or in ./runs, if not given.")
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="Images to measure attention distance and layers on.")] = 128,
    device: Annotated[
        str, typer.Option(autocompletion=complete_device, help="cpu, cuda, mps, …; a GPU where there is one.")
    ] = "auto",
) -> None:
    """Look at a model on one page: how good it is, its mistakes, attention over your images, distance, filters, layers.

    vitrail inspect MODEL --images photos/ writes report.html, which needs no network, and every figure as PNG and SVG
    with its data. Images with labels that the model knows are scored. vitrail inspect A B puts two models side by side.
    """
    from vitrail.errors import ConfigError
    from vitrail.inspection.inspect import inspect as inspect_models
    from vitrail.system.event_display import EventDisplay
    from vitrail.weights.source import choose_weights

    if which != "last" and not models:
        raise ConfigError("--which is for a run that is named: vitrail inspect RUN --which best")
    models = [choose_weights(model, which) for model in models or []]
    with interruptible("the report is not finished"), EventDisplay(plain_lines=True) as display:

        def listen(kind: str, values: dict[str, Any]) -> None:
            if kind == "chosen":
                print_choice(values)
            display(kind, values)

        result = inspect_models(models, images=images, out=out, most=most, device=device, on_event=listen)
    print_lines(result.notes)
    print_lines(f"{name}: {words}" for name, words in result.describe_accuracy())
    print_lines(f"figure: {path}" for path in result.figure_files)
    print_lines(f"data: {path}" for path in result.data_files)
    print_lines([f"report: {result.report}"])


def print_choice(values: dict[str, Any]) -> None:
    """Print which model is taken because none was named."""
    if values["reason"] == "newest run":
        taken = f"no model named: using {values['model']}, the newest run"
        print(f"{taken}; vitrail inspect MODEL takes another", file=sys.stderr)
    else:
        announce_pane("vitrail inspect MODEL takes another")
