"""vitrail calibrate: fit sets of labels and a score of unknown images, and store both with the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli.completion import LabelsFromOption, WhichOption, complete_device, complete_precision
from vitrail.cli.printing import PRECISION_HELP, interruptible, print_table, show_events


def calibrate(
    model: Annotated[str, typer.Option(help="MODEL: a folder or a run, which what is fitted is added to.")],
    data: Annotated[
        str, typer.Option(help="Images that neither trained the model nor chose anything: DATA as for evaluate.")
    ],
    split: Annotated[
        str | None, typer.Option(help="train, val or test; test, else val, else everything, if not given.")
    ] = None,
    unlike: Annotated[
        str | None, typer.Option(help="DATA of other things, which chooses the score that tells unknown images.")
    ] = None,
    no_sets: Annotated[
        bool, typer.Option("--no-sets", help="Only a score of unknown images, which needs 100 images and not 1,000.")
    ] = False,
    which: WhichOption = "last",
    labels: Annotated[
        str | None, typer.Option(help="The column of the data that holds the label, if it is not called so.")
    ] = None,
    labels_from: LabelsFromOption = None,
    mapping: Annotated[
        Path | None, typer.Option("--map", help="CSV or JSON: the model's classes for each class of the data.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder for the model, in place of adding to its own.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all results as JSON.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 64,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images; 0 reads in this one.")] = 0,
    device: Annotated[
        str, typer.Option(autocompletion=complete_device, help="cpu, cuda, mps, …; a GPU where there is one, for auto.")
    ] = "auto",
    precision: Annotated[str, typer.Option(autocompletion=complete_precision, help=PRECISION_HELP)] = "fp32",
) -> None:
    """Fit when a model can be relied on: sets of labels at a chosen coverage, and a score of unknown images.

    Afterwards `vitrail predict --coverage 0.95 --unknown`, exports and the server give both.
    """
    from vitrail.evaluation.calibrate import calibrate as fit
    from vitrail.weights.source import choose_weights

    with interruptible(), show_events() as on_event:
        result = fit(
            choose_weights(model, which),
            data,
            split,
            unlike=unlike,
            sets=not no_sets,
            labels=labels,
            labels_from=labels_from,
            mapping=mapping,
            batch_size=batch_size,
            workers=workers,
            device=device,
            precision=precision,
            out=out,
            on_event=on_event,
        )
    if as_json:
        content = result.to_dict()
        del content["reliability"]  # megabytes, and in the folder
        print(json.dumps(content, indent=2))
        return
    for title, (columns, *rows) in result.tables().items():
        print_table(title, columns, rows)
    for name, value in result.summary():
        if not name.startswith("sets at"):
            print(f"{name}: {value}")
