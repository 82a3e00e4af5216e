"""vitrail study: a claim of the paper, tested."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.completion import complete_device, complete_study
from vitrail.cli.printing import interruptible, print_lines, print_table, stop_on_sigterm
from vitrail.system.events import OnEvent

if TYPE_CHECKING:
    from vitrail.studies.run_study import StudyResult

INTERRUPTED = "the runs that are finished are kept, and the same command goes on from there"


def study(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", autocompletion=complete_study, help="One or more studies, or all."),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Print all studies with their claims.")] = False,
    scale: Annotated[
        str, typer.Option(help="tiny: digits, any machine. small: one GPU, images that you give.")
    ] = "tiny",
    seeds: Annotated[int | None, typer.Option(min=1, help="How often every arm is trained.")] = None,
    data: Annotated[str | None, typer.Option(help="DATA to pre-train on.")] = None,
    transfer: Annotated[
        list[str] | None, typer.Option(help="DATA to transfer to; give it again for more, few-shot accuracy is a mean.")
    ] = None,
    masks: Annotated[
        str | None, typer.Option(help="Folder of trimaps of the first of them, for attention-focus.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where trainings and results are kept.")] = Path("runs/studies"),
    jobs: Annotated[int, typer.Option(min=1, help="Trainings that run at a time on the device.")] = 1,
    device: Annotated[
        str, typer.Option(autocompletion=complete_device, help="cpu, cuda, mps, …; a GPU where there is one, for auto.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print verdict, checks and all runs as JSON.")] = False,
) -> None:
    """Test a claim of the paper: train what it compares, and decide by a rule that was written before.

    What has been measured is kept: the same command goes on where it was stopped, and more seeds add to the old ones.
    """
    from vitrail.studies.catalogue import NAMES, list_studies
    from vitrail.studies.run_study import run_studies

    if show_list:
        rows = [[each.name, each.claim, each.where] for each in list_studies()]
        print_table("Studies", ["name", "claim", "where"], rows, left=3)
        return
    chosen = list(NAMES) if names and "all" in names else names or []
    with interruptible(INTERRUPTED), stop_on_sigterm(), _show_runs() as on_event:
        results = run_studies(
            chosen,
            scale=scale,
            seeds=seeds,
            data=data,
            transfer=transfer or (),
            masks=masks,
            folder=folder,
            jobs=jobs,
            device=device,
            on_event=on_event,
        )
    if as_json:
        print(json.dumps([result.to_dict() for result in results], indent=2))
        return
    for result in results:
        _print_result(result)


@contextmanager
def _show_runs() -> Iterator[OnEvent]:
    """Yield a listener that prints each run on stderr, with the time that is left, and shows steps as a bar."""
    from vitrail.system.display import format_duration
    from vitrail.system.event_display import EventDisplay

    with EventDisplay(plain_lines=False) as display:

        def listen(kind: str, values: dict[str, Any]) -> None:
            if kind == "measured":
                display.close()
                what = f"{values['study']}: {values['arm']}, seed {values['seed']}"
                found = values["failure"] or f"{values['value']:.2f} ({values['unit']})"
                left = values["total"] - values["done"]
                time = f"; about {format_duration(values['seconds_left'])} left" if left else ""
                print(f"{values['done']} of {values['total']}  {what}: {found}{time}", file=sys.stderr, flush=True)
            elif kind == "message":
                print(values["text"], file=sys.stderr)
            elif kind == "step":
                display("progress", {"task": "training", "done": values["step"], "total": values["steps"]})

        yield listen


def _print_result(result: StudyResult) -> None:
    title, (columns, *rows) = next(iter(result.tables().items()))
    print_table(title, columns, rows)
    print_lines(f"{name}: {value}" for name, value in result.summary())
