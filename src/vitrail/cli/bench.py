"""vitrail bench: how fast our models are on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.benchmark.speed_table import COLUMNS, WORD_COLUMNS, format_cells
from vitrail.cli.printing import interruptible, print_lines, print_table

if TYPE_CHECKING:
    from vitrail.benchmark.report import BenchmarkReport


def bench(
    names: Annotated[list[str] | None, typer.Argument(help="Which models, e.g. B/16 L/16; B/16 if none.")] = None,
    what: Annotated[
        str | None,
        typer.Option(
            help="Some of inference, training, latency, and with --data loader, end-to-end, separated by commas; all "
            "if not given."
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Images at a time; 256 on a GPU, 8 on a CPU if not given.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp32 or bf16; bf16 on a GPU, fp32 on a CPU if not given. fp8 (on a GPU), int8 or auto (on a CPU) are "
            "measured in addition."
        ),
    ] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Side of the image; the model's own if not given.")] = None,
    data: Annotated[
        str | None, typer.Option(help="DATA, as for train: for --what loader and --what end-to-end.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that read DATA; one for each core if not given.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's choice if not given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each way; medians are over these.")] = 5,
    compiles: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Measure the compiled model too, however long that takes; if not given, on a GPU with --thorough.",
        ),
    ] = None,
    autotune: Annotated[
        bool, typer.Option("--autotune", help="Measure the model compiled with max-autotune too; takes many minutes.")
    ] = False,
    fast: Annotated[
        bool, typer.Option("--fast", help="Measure only what vitrail.fast makes of the model: shorter.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps, …; a GPU if there is one.")] = "auto",
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Measure everything, however long it takes; else two minutes at most.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="JSON with machine, versions and the times of every round.")] = None,
    source: Annotated[Path | None, typer.Option("--from", help="Show what --out wrote; measure nothing.")] = None,
) -> None:
    """Measure how fast models are on this machine: plain, compiled, and by vitrail.fast.

    Each case is printed and written when it is measured; if you stop it, the same command measures the rest.

    All ways take turns in one process; results are medians over rounds. "of product" is the share of the operations per
    second that a large matrix product reached in the same rounds; "distance" is how far the logits are from those of
    our plain model in float32. With --data: whether the data path keeps up with training.
    """
    from vitrail.benchmark.bench import DEFAULT_MODEL
    from vitrail.benchmark.bench import bench as measure_speed
    from vitrail.benchmark.report import BenchmarkReport

    if source is not None:
        _check_alone(names=names, what=what, batch=batch, size=size, data=data, thorough=thorough, out=out)
        report = BenchmarkReport.read(source)
        print_table(report.title, COLUMNS, list(map(format_cells, report.rows)), left=WORD_COLUMNS)
        _print_conclusions(report)
        return
    printer = _CasePrinter()
    with interruptible(printer.describe_remains):
        report = measure_speed(
            names or DEFAULT_MODEL,
            what=what,
            batch=batch,
            precision=precision,
            size=size,
            data=data,
            workers=workers,
            threads=threads,
            rounds=rounds,
            compiles=compiles,
            autotune=autotune,
            plain=not fast,
            device=device,
            thorough=thorough,
            out=out,
            on_event=printer,
        )
    _print_conclusions(report)
    if out is not None:
        print_lines([f"written: {out}"])
    elif printer.file is not None:
        print(f"kept: vitrail bench --from {shlex.quote(printer.file)} shows it again", file=sys.stderr)
    if not report.rows:
        raise typer.Exit(1)


class _CasePrinter:
    """A listener that prints messages, and the rows of each case when they are measured."""

    def __init__(self) -> None:
        self.file: str | None = None
        """What was measured so far is in it."""
        self._number = self._cases = 0
        self._has_heading = False

    def __call__(self, kind: str, values: dict[str, Any]) -> None:
        from vitrail.benchmark.report import SpeedRow

        if kind == "message":
            print(values["text"], file=sys.stderr, flush=True)
        elif kind == "measured":
            self._number, self._cases, self.file = values["number"], values["cases"], values["file"]
            cells = [format_cells(SpeedRow(**row)) for row in values["rows"]]
            if cells or not self._has_heading:
                print_table(values["title"], COLUMNS, cells, left=WORD_COLUMNS, goes_on=self._has_heading)
            self._has_heading = True

    def describe_remains(self) -> str:
        """Return what remains after a stop."""
        if not self._number:
            return "nothing was measured yet"
        measured = f"{self._number} of {self._cases} cases were measured, and the same command measures the rest"
        return (
            measured if self.file is None else f"{measured}; vitrail bench --from {shlex.quote(self.file)} shows them"
        )


def _check_alone(**options: object) -> None:
    """Refuse options that --from cannot use."""
    from vitrail.errors import ConfigError

    for name, value in options.items():
        if value:
            option = name.upper() if name == "names" else f"--{name}"
            raise ConfigError(f"--from shows what was measured and measures nothing: leave {option} out")


def _print_conclusions(report: BenchmarkReport) -> None:
    print_lines(report.comparisons)
    print_lines(f"not measured: {missing}" for missing in report.missing)
    print_lines(f"note: {note}" for note in report.notes)
    if report.measured is not None:
        print_lines([f"stopped: {report.explain_stop()}"])
