"""vitrail quickstart: everything in miniature, offline."""

from __future__ import annotations

from typing import Annotated

import typer


def quickstart(
    folder: Annotated[str, typer.Option(help="Where the runs go.")] = "runs/quickstart",
) -> None:
    """Everything in miniature on built-in handwritten digits, offline: pre-train, fine-tune larger, test."""
    from vitrail.workflows.quickstart import quickstart as run

    for line in run(folder):
        print(line, flush=True)
