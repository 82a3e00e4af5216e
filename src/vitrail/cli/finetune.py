"""vitrail finetune: a classifier for a folder of images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli.printing import announce_pane, interruptible, print_lines, progress_bar

SCRATCH = "scratch"
"""The name that stands for no model. A folder of that name is ./scratch."""
ANY_MODEL_KEYS = ("image_size", "weights")
"""Keys of the model section that fit every model."""


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
    quick: Annotated[
        bool, typer.Option(help="Only fit a head to the frozen features: seconds on a CPU; lists doubtful labels.")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value …", help="Such as schedule.steps=500 run.folder=runs/mine.")
    ] = None,
) -> None:
    """Train a classifier for your own images, from a model that has seen others.

    Resolution, steps, batch size and learning rate are chosen for the data; you can set any of them:
    steps=500 batch_size=32 learning_rate=0.003 image_size=224 folder=runs/mine. The model goes to runs/finetune-…, and
    the same command resumes it.
    """
    from vitrail.errors import ConfigError, did_you_mean
    from vitrail.training.resolve import list_keys
    from vitrail.weights.load import TRAINING_ONLY
    from vitrail.weights.source import PANE
    from vitrail.workflows.finetune import finetune as run

    overrides = overrides or []
    options = {each.partition("=")[0].strip().removeprefix("model.") for each in overrides}
    if "weights" in options:
        raise ConfigError("give --from MODEL in place of model.weights")
    if start is None and options & (set(list_keys("model")) - {*ANY_MODEL_KEYS, *TRAINING_ONLY}):
        start = SCRATCH  # an architecture was given
    if start is not None and start != SCRATCH and not Path(start).exists() and did_you_mean(start, [SCRATCH]):
        raise ConfigError(f"there is no model {start!r}{did_you_mean(start, [SCRATCH])}")
    model = PANE if start is None else start
    if quick:
        _fit_linear_head(data, model, sweep, overrides, is_default=start is None)
        return
    lines = run(data, None if model == SCRATCH else model, sweep, overrides)
    print_lines(_announce_default(lines, is_default=start is None))


def _fit_linear_head(data: str, model: str, sweep: bool, overrides: list[str], is_default: bool) -> None:
    from vitrail.errors import ConfigError
    from vitrail.workflows.linear_head import fit_linear_head

    if sweep:
        raise ConfigError("--quick trains nothing, so there is no learning rate to --sweep: give one of them")
    if model == SCRATCH:
        raise ConfigError("--quick needs a trained model: give --from MODEL, or no --from")
    with interruptible("the features computed so far are kept"), progress_bar("features") as progress:
        print_lines(_announce_default(fit_linear_head(data, model, overrides, progress=progress), is_default))


def _announce_default(lines: Iterator[str], is_default: bool) -> Iterator[str]:
    """Yield the lines; if no model was named, say so before the first, when the command is known to be valid."""
    first = next(lines)
    if is_default:
        announce_pane("--from MODEL takes another, --from scratch none")
    yield first
    yield from lines
