"""vitrail finetune: a classifier for a folder of images."""

from __future__ import annotations

from typing import Annotated

import typer

from vitrail.cli.printing import interruptible, print_lines, progress_bar


def finetune(
    data: Annotated[str, typer.Option(help="A folder with one for each class, CSV, Parquet, shards, hf:owner/name.")],
    start: Annotated[
        str | None, typer.Option("--from", help="MODEL to start from: folder, file, run, hf:owner/name, timm:name.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option(help="Choose the learning rate on a held-out part, as the paper does.")
    ] = False,
    quick: Annotated[
        bool, typer.Option(help="Only solve a head on the frozen model: seconds on a CPU; lists doubtful labels.")
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

    if quick:
        _quick(data, start, sweep, overrides or [])
        return
    print_lines(run(data, start, sweep, overrides or []))


def _quick(data: str, start: str | None, sweep: bool, overrides: list[str]) -> None:
    from vitrail.errors import ConfigError
    from vitrail.workflows.quick import quick

    if sweep:
        raise ConfigError("--quick trains nothing that a --sweep could choose a learning rate for: give one of them")
    if start is None:
        raise ConfigError("--quick needs a model to take as it is: give --from MODEL")
    with interruptible("the features computed so far are kept"), progress_bar("features") as progress:
        print_lines(quick(data, start, overrides, progress=progress))
