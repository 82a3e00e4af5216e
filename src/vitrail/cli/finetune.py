"""vitrail finetune: a classifier for a folder of images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli.printing import interruptible, print_lines, progress_bar, tell_of_pane

SCRATCH = "scratch"
"""In the place of a model: none. A folder of that name is ./scratch."""
FREE = ("image_size", "weights")
"""Options of the model that do not ask for another one than the weights are of."""


def finetune(
    data: Annotated[str, typer.Option(help="A folder with one for each class, CSV, Parquet, shards, hf:owner/name.")],
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="MODEL to start from: folder, file, run, hf:owner/name, timm:name; pane if not given; or scratch.",
        ),
    ] = None,
    sweep: Annotated[
        bool, typer.Option(help="Choose the learning rate on a held-out part, as the paper does.")
    ] = False,
    fit_linear_head: Annotated[
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
    from vitrail.errors import ConfigError, did_you_mean
    from vitrail.training.resolve import list_keys
    from vitrail.weights.load import TRAINING_ONLY
    from vitrail.weights.source import PANE
    from vitrail.workflows.finetune import finetune as run

    given = overrides or []
    options = {each.partition("=")[0].strip().removeprefix("model.") for each in given}
    if "weights" in options:
        raise ConfigError("give --from MODEL in place of model.weights")
    if start is None and options & (set(list_keys("model")) - {*FREE, *TRAINING_ONLY}):
        start = SCRATCH  # who asks for an architecture has said what to train
    if start is not None and start != SCRATCH and not Path(start).exists() and did_you_mean(start, [SCRATCH]):
        raise ConfigError(f"there is no model {start!r}{did_you_mean(start, [SCRATCH])}")
    model = PANE if start is None else start
    if fit_linear_head:
        _quick(data, model, sweep, given, unnamed=start is None)
        return
    print_lines(_told(run(data, None if model == SCRATCH else model, sweep, given), unnamed=start is None))


def _quick(data: str, model: str, sweep: bool, overrides: list[str], unnamed: bool) -> None:
    from vitrail.errors import ConfigError
    from vitrail.workflows.linear_head import fit_linear_head

    if sweep:
        raise ConfigError("--quick trains nothing that a --sweep could choose a learning rate for: give one of them")
    if model == SCRATCH:
        raise ConfigError("--quick needs a model to take as it is: give --from MODEL, or no --from")
    with interruptible("the features computed so far are kept"), progress_bar("features") as progress:
        print_lines(_told(fit_linear_head(data, model, overrides, progress=progress), unnamed))


def _told(lines: Iterator[str], unnamed: bool) -> Iterator[str]:
    """With a word on the model where none was named: before the first line, when the command is found to be good."""
    first = next(lines)
    if unnamed:
        tell_of_pane("--from MODEL takes another, --from scratch none")
    yield first
    yield from lines
