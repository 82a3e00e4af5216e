"""vitrail quickstart: everything in miniature, offline."""

from __future__ import annotations

from typing import Annotated

import typer

from vitrail.cli.printing import print_lines


def quickstart(
    folder: Annotated[str, typer.Option(help="Where the runs go.")] = "runs/quickstart",
) -> None:
    """Everything in miniature on built-in handwritten digits, offline: pre-train, fine-tune larger, test."""
    from vitrail.workflows.quickstart import quickstart as run

    print_lines(run(folder))
