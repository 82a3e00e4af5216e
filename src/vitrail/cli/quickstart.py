"""vitrail quickstart: everything in miniature, offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.cli.printing import print_lines, print_table, stop_on_sigterm
from vitrail.cli.train import describe_report


@stop_on_sigterm()
def quickstart(
    folder: Annotated[str, typer.Option(help="Where the runs go.")] = "runs/quickstart",
    start: Annotated[
        str | None, typer.Option("--from", help="MODEL, such as pane: fine-tune it on the digits too, and compare.")
    ] = None,
) -> None:
    """Everything in miniature on built-in handwritten digits, offline: pre-train, fine-tune larger, test."""
    from vitrail.system.event_display import EventDisplay
    from vitrail.workflows.quickstart import quickstart as run

    with EventDisplay(plain_lines=True) as display:
        tuned: dict[str, dict[str, Any]] = {}  # the events of the fine-tuned model, by their kinds

        def listen(kind: str, values: dict[str, Any]) -> None:
            display(kind, values)
            if "folder" in values and Path(values["folder"]).name == "finetune":
                tuned[kind] = values
                return
            if kind == "stage" and values["number"] == 4:
                print_lines(_describe_tuned(tuned["tested"], tuned.get("report", {})))
            print_lines(_describe_event(kind, values))

        result = run(folder, start, on_event=listen)
    if start is None:
        print_lines(_describe_tuned(tuned["tested"], tuned.get("report", {})))
    for title, (columns, *rows) in result.tables().items():
        print_table(title, columns, rows)


def _describe_event(kind: str, values: dict[str, Any]) -> Iterator[str]:
    if kind == "stage":
        yield f"{values['number']}. {values['title']}"
    elif kind == "report":
        yield from (f"   {line}" for line in describe_report(values))
    elif kind == "tested" and values["run"] == "pretrain":
        yield f"   test accuracy after pre-training: {values['accuracy']['value']:.1%}"
    elif kind == "tested" and values["run"] == "transfer":
        yield f"model: {values['weights']}"


def _describe_tuned(tested: dict[str, Any], report: dict[str, Any]) -> Iterator[str]:
    """Yield the files of the fine-tuned model, and last its accuracy."""
    yield f"curves: {Path(tested['folder']) / 'curves.png'}"
    yield f"model: {tested['weights']}"
    yield "next: vitrail finetune --data YOUR_FOLDER --from hf:google/vit-base-patch16-224-in21k"
    yield from describe_report(report)
    yield f"test accuracy: {tested['accuracy']['value']:.1%}"
