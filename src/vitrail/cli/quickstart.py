"""vitrail quickstart: everything in miniature, offline."""

from __future__ import annotations

from typing import Annotated

import typer

from vitrail.cli.printing import print_lines, print_table


def quickstart(
    folder: Annotated[str, typer.Option(help="Where the runs go.")] = "runs/quickstart",
    start: Annotated[
        str | None, typer.Option("--from", help="MODEL, such as pane: fine-tune it on the digits too, and compare.")
    ] = None,
) -> None:
    """Everything in miniature on built-in handwritten digits, offline: pre-train, fine-tune larger, test."""
    from vitrail.workflows.quickstart import compare_runs, quickstart_with_model
    from vitrail.workflows.quickstart import quickstart as run

    if start is None:
        print_lines(run(folder))
        return
    print_lines(quickstart_with_model(start, folder))
    print_table("Handwritten digits", ["from", "images in training", "test accuracy"], compare_runs(start, folder))
