"""vitrail predict: what is in your images, one line for each, or a table, JSON, CSV; embeddings into a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.cli.printing import announce_pane, interruptible, progress_bar

if TYPE_CHECKING:
    from vitrail.inference.predict import FilePrediction, PredictionRun

GAP = "  "
PERCENT = len("probability")
"""Width of the last column, in characters."""

Lines = Callable[["FilePrediction"], Iterator[str]]


def predict(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILES|DIR|-",
            help="Images, folders with images at any depth, or -: standard input, an image or a list of files.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="MODEL: a folder or file of weights, a run, hf:owner/name, timm:name; pane if not given."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Labels for each image.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each image, on a line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV: file, rank, label, probability.")] = False,
    embed: Annotated[
        Path | None, typer.Option(help="out.parquet or out.npz: write the representation of each image there.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 32,
    device: Annotated[str, typer.Option(help="cpu, cuda, …; a GPU where there is one.")] = "auto",
    precision: Annotated[
        str,
        typer.Option(help="fp32, or faster and less exact: bf16, fp8 (GPU), int8 (CPU); auto: what is fastest here."),
    ] = "fp32",
) -> None:
    """Say what is in images: the most probable labels of each.

    vitrail predict photos/ --model MODEL prints them as they come. A file that cannot be read is left out with a word
    on stderr, and the exit code at the end is 1.
    """
    from vitrail.errors import ConfigError
    from vitrail.inference.predict import PredictionRun
    from vitrail.weights.source import PANE

    if as_json and as_csv:
        raise ConfigError("--json and --csv: give one of them")
    remaining = "the rest was not looked at" + ("" if embed is None else f", and {embed} was not written")
    with interruptible(remaining):
        predictions = PredictionRun(
            files or [],
            PANE if model is None else model,
            top=top,
            embed=embed,
            batch_size=batch_size,
            device=device,
            precision=precision,
            on_message=lambda line: print(line, file=sys.stderr),
        )
        if model is None:
            announce_pane("--model MODEL takes another")
        heading, lines = _choose_format(as_json, as_csv, predictions)
        _print(predictions, heading, lines)
    print(predictions.summary(), file=sys.stderr)
    if predictions.left_out:
        raise typer.Exit(1)


def _print(predictions: PredictionRun, heading: str | None, lines: Lines) -> None:
    stdout = sys.stdout  # a progress bar replaces sys.stdout with one that leads to stderr
    encoding = stdout.encoding or "utf-8"

    def print_line(line: str) -> None:
        print(line.encode(encoding, "backslashreplace").decode(encoding), file=stdout, flush=True)

    if heading is not None and predictions.labels:
        print_line(heading)
    # On a terminal the rows show the progress, and a bar between them would be in the way.
    has_bar = not predictions.labels or not stdout.isatty()
    bar = progress_bar("predicting") if has_bar else nullcontext()
    with bar as progress, closing(predictions.predict_files(progress)) as rows:
        for row in rows:
            if row.error is not None:
                print(f"left out: {_display_file(row.file)}: {row.error}", file=sys.stderr)
            for line in lines(row) if row.labels else ():
                print_line(line)


def _choose_format(as_json: bool, as_csv: bool, predictions: PredictionRun) -> tuple[str | None, Lines]:
    """Return the heading, if there is one, and the function that formats a prediction as lines."""
    if as_json:
        return None, _json_lines
    if as_csv:
        return _csv_line("file", "rank", "label", "probability"), _csv_lines
    if sys.stdout.isatty():
        return _make_table(predictions)
    return None, _tab_lines


def _json_lines(row: FilePrediction) -> Iterator[str]:
    import json

    labels = [{"label": label, "probability": _round_to_float32(probability)} for label, probability in row.labels]
    yield json.dumps({"file": row.file, "labels": labels})


def _csv_lines(row: FilePrediction) -> Iterator[str]:
    for rank, (label, probability) in enumerate(row.labels, start=1):
        yield _csv_line(row.file, rank, label, _round_to_float32(probability))


def _csv_line(*cells: str | float) -> str:
    """Return a line of CSV. Its line end has both characters, so that a name with either is quoted."""
    import csv
    import io

    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(cells)
    return line.getvalue().removesuffix("\r\n")


def _tab_lines(row: FilePrediction) -> Iterator[str]:
    from vitrail.data.sources.source import make_printable

    guesses = [cell for label, probability in row.labels for cell in (make_printable(label), f"{probability:.4f}")]
    yield "\t".join([make_printable(row.file), *guesses])


def _make_table(predictions: PredictionRun) -> tuple[str, Lines]:
    """Return heading and formatter of a table with fixed widths; names that are too long get a line of their own."""
    from rich.cells import cell_len, set_cell_size
    from rich.console import Console

    from vitrail.data.sources.source import make_printable
    from vitrail.inference.predict import to_valid_text

    terminal_width = Console().width
    longest = max(cell_len(make_printable(to_valid_text(image))) for image in predictions.images)
    file = max(min(longest, terminal_width // 2), len("file"))
    widest = max((cell_len(make_printable(label)) for label in predictions.labels), default=0)
    label = max(min(widest, terminal_width - file - PERCENT - 2 * len(GAP)), len("label"))

    def line(first: str, second: str, third: str) -> str:
        padded = second if cell_len(second) > label else set_cell_size(second, label)
        return f"{set_cell_size(first, file)}{GAP}{padded}{GAP}{third:>{PERCENT}}"

    def lines(row: FilePrediction) -> Iterator[str]:
        name = make_printable(row.file)
        if cell_len(name) > file:
            yield name
            name = ""
        for guess, probability in row.labels:
            yield line(name, make_printable(guess), f"{probability:.2%}")
            name = ""

    return f"{set_cell_size('file', file)}{GAP}{set_cell_size('label', label)}{GAP}probability", lines


def _display_file(file: str) -> str:
    from vitrail.data.sources.source import make_printable

    return "standard input" if file == "-" else make_printable(file)


def _round_to_float32(probability: float) -> float:
    """Return the probability with the digits that a float32 has."""
    return float(f"{probability:.9g}")
