"""vitrail bench: how fast our models are here, beside the other libraries'."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.cli.printing import interruptible, print_lines, print_table

if TYPE_CHECKING:
    from vitrail.benchmark.report import Report, Row

COLUMNS = (
    *("model", "what", "library", "way", "precision", "size", "batch", "images/s", "ms", "p99 ms", "TFLOP/s"),
    *("of product", "GiB", "distance"),
)


def bench(
    names: Annotated[list[str] | None, typer.Argument(help="Which models, e.g. B/16 L/16; B/16 if none.")] = None,
    what: Annotated[
        str | None,
        typer.Option(
            help="Some of inference, training, latency, and with --data loader, end-to-end, with commas between; all "
            "if not given."
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Images at a time; 256 on a GPU, 8 on a CPU if not given.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp32 or bf16; bf16 on a GPU, fp32 on a CPU if not given. fp8 (on a GPU), int8 or auto (on a CPU): "
            "besides, for those that have it."
        ),
    ] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Side of the image; the model's own if not given.")] = None,
    peers: Annotated[
        str,
        typer.Option(
            help="all, none, or some of timm,torchvision,transformers,vit-pytorch and, on a CPU, onnxruntime,openvino."
        ),
    ] = "all",
    data: Annotated[
        str | None, typer.Option(help="DATA, as for train: for --what loader and --what end-to-end.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that read DATA; one for each core if not given.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of the CPU, for all; torch's choice if not given.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that everyone has; medians are over these.")] = 5,
    compiles: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compiled too; on a GPU yes, if not given, else no.")
    ] = None,
    autotune: Annotated[
        bool, typer.Option("--autotune", help="Compiled with max-autotune too, for all; takes many minutes.")
    ] = False,
    fast: Annotated[
        bool, typer.Option("--fast", help="Of our own ways only what vitrail.fast makes of the model: shorter.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, …; a GPU where there is one.")] = "auto",
    grow: Annotated[
        str | None, typer.Option(help="resolution (224 to 1024 px), batch (1 to 256) or model (Ti to H): one grows.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="With --grow: begin nothing that would end later.")] = 600,
    out: Annotated[Path | None, typer.Option(help="JSON with machine, versions and the times of every round.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A figure: a .png, and an .svg beside it.")] = None,
    kept: Annotated[
        Path | None, typer.Option("--from", help="Show, and by --plot draw, what --out wrote; measures nothing.")
    ] = None,
) -> None:
    """Measure how fast models are here, in every way there is, beside other libraries' models of the same shape.

    In one process, in turns, medians over rounds; with what could not be measured, and why. "of product" is the share
    of the operations a second that a large matrix product reached in the same rounds; "distance" is how far the logits
    are from those of our plain model in float32.
    """
    from vitrail.benchmark import run, shown_again

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if kept is not None:
        _alone(names=names, what=what, batch=batch, size=size, data=data, grow=grow, out=out)
        _show(shown_again(kept, plot), [plot])
        return
    with interruptible():
        report = run(
            names or [],
            what=what,
            batch=batch,
            precision=precision,
            size=size,
            peers=peers,
            data=data,
            workers=workers,
            threads=threads,
            rounds=rounds,
            compiles=compiles,
            autotune=autotune,
            plain=not fast,
            device=device,
            grow=grow,
            seconds=seconds,
            out=out,
            plot=plot,
            tell=tell,
        )
    _show(report, [out, plot if report.rows else None])
    if not report.rows:
        raise typer.Exit(1)


def _alone(**given: object) -> None:
    """Refuse what --from cannot heed."""
    from vitrail.errors import ConfigError

    for name, value in given.items():
        if value:
            option = name.upper() if name == "names" else f"--{name}"
            raise ConfigError(f"--from shows what was measured and measures nothing: leave {option} out")


def _show(report: Report, written: Sequence[Path | None]) -> None:
    title = f"{report.machine['device']}, {report.asked['precision']}, torch {report.machine['versions']['torch']}"
    print_table(title, COLUMNS, [_cells(row) for row in report.rows], left=6)
    print_lines(report.comparisons)
    print_lines(f"not measured: {missing}" for missing in report.missing)
    print_lines(f"note: {note}" for note in report.notes)
    print_lines(f"written: {path}" for path in written if path is not None)


def _cells(row: Row) -> list[str]:
    return [
        *(row.name, row.what, row.library, row.way, row.precision, row.size, f"{row.batch:,}"),
        _number(row.images_per_second),
        _number(row.median_seconds * 1000),
        "–" if row.p99_seconds is None else _number(row.p99_seconds * 1000),
        "–" if row.flops_per_second is None else _number(row.flops_per_second / 1e12),
        "–" if row.share_of_product is None else f"{row.share_of_product:.1%}",
        "–" if row.memory_bytes is None else f"{row.memory_bytes / 2**30:.2f}",
        "–" if row.distance is None else f"{row.distance:.1e}" if row.distance else "0",
    ]


def _number(value: float) -> str:
    """Three digits or more."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")
