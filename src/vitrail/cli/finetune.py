"""vitrail finetune: a classifier for a folder of images."""

from __future__ import annotations

from typing import Annotated

import typer

from vitrail.cli.printing import print_lines


def finetune(
    data: Annotated[str, typer.Option(help="A folder with one for each class, CSV, Parquet, shards, hf:owner/name.")],
    start: Annotated[
        str | None, typer.Option("--from", help="MODEL to start from: folder, file, run, hf:owner/name, timm:name.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option(help="Choose the learning rate on a held-out part, as the paper does.")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value …", help="Such as schedule.steps=500 run.folder=runs/mine.")
    ] = None,
) -> None:
    """Train a classifier for your own images, from a model that has seen others.

    Resolution, steps, batch size and learning rate are chosen for the data; any of them can be given:
    steps=500 batch_size=32 learning_rate=0.003 image_size=224 folder=runs/mine. The model goes to runs/finetune-…, and
    the same command goes on where it was stopped.
    """
    from vitrail.workflows.finetune import finetune as run

    print_lines(run(data, start, sweep, overrides or []))
