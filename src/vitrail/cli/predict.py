"""vitrail predict: what is in your images, one line for each, or a table, JSON, CSV; embeddings into a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from vitrail.cli.completion import WhichOption, complete_device, complete_precision
from vitrail.cli.printing import PRECISION_HELP, announce_pane, interruptible

if TYPE_CHECKING:
    from vitrail.inference.predict import PredictionResult

GAP = "  "
PERCENT = len("probability")
"""Width of the last column, in characters."""

Row = dict[str, Any]
"""The values of a `prediction` event: file, labels, error."""
Lines = Callable[[Row], Iterator[str]]


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
        typer.Option(help="MODEL: folder, file, run, hf:owner/name, timm:name, model.onnx; pane if not given."),
    ] = None,
    which: WhichOption = "last",
    top: Annotated[int, typer.Option(min=1, help="Labels for each image.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each image, on a line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV: file, rank, label, probability.")] = False,
    embed: Annotated[
        Path | None, typer.Option(help="out.parquet or out.npz: write the representation of each image there.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 32,
    device: Annotated[
        str, typer.Option(autocompletion=complete_device, help="cpu, cuda, mps, …; a GPU where there is one.")
    ] = "auto",
    precision: Annotated[
        str,
        typer.Option(autocompletion=complete_precision, help=PRECISION_HELP),
    ] = "fp32",
) -> None:
    """Say what is in images: the most probable labels of each.

    vitrail predict photos/ --model MODEL prints them as they come. A file that cannot be read is left out with a word
    on stderr, and the exit code at the end is 1.
    """
    from vitrail.errors import ConfigError
    from vitrail.inference.find_images import require_images

    if as_json and as_csv:
        raise ConfigError("--json and --csv: give one of them")
    remaining = "the rest was not looked at" + ("" if embed is None else f", and {embed} was not written")
    with interruptible(remaining):
        images = require_images(files or [])  # before torch is imported, which takes seconds
    from vitrail.inference.predict import predict as predict_images
    from vitrail.weights.source import PANE, choose_weights

    with interruptible(remaining), RowPrinter(as_json, as_csv, has_model=model is not None) as printer:
        result = predict_images(
            images,
            choose_weights(PANE if model is None else model, which),
            top=top,
            embed=embed,
            batch_size=batch_size,
            device=device,
            precision=precision,
            on_event=printer,
        )
    print(_describe_result(result), file=sys.stderr)
    if result.left_out:
        raise typer.Exit(1)


class RowPrinter:
    """A listener that prints predictions as they come, and shows a bar where they are not on the terminal."""

    def __init__(self, as_json: bool, as_csv: bool, has_model: bool) -> None:
        self._as_json, self._as_csv, self._has_model = as_json, as_csv, has_model
        self._stdout = sys.stdout  # a progress bar replaces sys.stdout with one that leads to stderr
        self._encoding = sys.stdout.encoding or "utf-8"
        self._lines: Lines = _tab_lines
        self._has_bar = True

    def __enter__(self) -> Self:
        from vitrail.system.event_display import EventDisplay

        self._display = EventDisplay(plain_lines=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._display.close()

    def __call__(self, kind: str, values: dict[str, Any]) -> None:
        if kind == "message":
            print(values["text"], file=sys.stderr)
        elif kind == "images":
            self._begin(values["files"], values["labels"])
        elif kind == "prediction":
            self._print_prediction(values)
        elif self._has_bar:
            self._display(kind, values)

    def _begin(self, files: list[str], labels: list[str]) -> None:
        if not self._has_model:
            announce_pane("--model MODEL takes another")
        heading = None
        if self._as_json:
            self._lines = _json_lines
        elif self._as_csv:
            heading, self._lines = _csv_line("file", "rank", "label", "probability"), _csv_lines
        elif self._stdout.isatty():
            heading, self._lines = _make_table(files, labels)
        if heading is not None and labels:
            self._print_line(heading)
        # On a terminal the rows show the progress, and a bar between them would be in the way.
        self._has_bar = not labels or not self._stdout.isatty()

    def _print_prediction(self, row: Row) -> None:
        if row["error"] is not None:
            print(f"left out: {_display_file(row['file'])}: {row['error']}", file=sys.stderr)
        for line in self._lines(row) if row["labels"] else ():
            self._print_line(line)

    def _print_line(self, line: str) -> None:
        text = line.encode(self._encoding, "backslashreplace").decode(self._encoding)
        print(text, file=self._stdout, flush=True)


def _describe_result(result: PredictionResult) -> str:
    """Return counts and speed in words: "132 images, 45.2 images/s, 1 left out"."""
    left_out = len(result.left_out)
    done = len(result) - left_out
    parts = [f"{done:,} image" + ("" if done == 1 else "s")]
    if done:
        parts.append(f"{result.images_per_second:,.1f} images/s")
    if left_out:
        parts.append(f"{left_out:,} left out")
    return ", ".join(parts)


def _json_lines(row: Row) -> Iterator[str]:
    import json

    labels = [{"label": label, "probability": _round_to_float32(probability)} for label, probability in row["labels"]]
    yield json.dumps({"file": row["file"], "labels": labels})


def _csv_lines(row: Row) -> Iterator[str]:
    for rank, (label, probability) in enumerate(row["labels"], start=1):
        yield _csv_line(row["file"], rank, label, _round_to_float32(probability))


def _csv_line(*cells: str | float) -> str:
    """Return a line of CSV. Its line end has both characters, so that a name with either is quoted."""
    import csv
    import io

    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(cells)
    return line.getvalue().removesuffix("\r\n")


def _tab_lines(row: Row) -> Iterator[str]:
    from vitrail.data.sources.image_files import make_printable

    guesses = [cell for label, probability in row["labels"] for cell in (make_printable(label), f"{probability:.4f}")]
    yield "\t".join([make_printable(row["file"]), *guesses])


def _make_table(files: list[str], labels: list[str]) -> tuple[str, Lines]:
    """Return heading and formatter of a table with fixed widths; names that are too long get a line of their own."""
    from rich.cells import cell_len, set_cell_size
    from rich.console import Console

    from vitrail.data.sources.image_files import make_printable

    terminal_width = Console().width
    longest = max(cell_len(make_printable(name)) for name in files)
    file = max(min(longest, terminal_width // 2), len("file"))
    widest = max((cell_len(make_printable(label)) for label in labels), default=0)
    label = max(min(widest, terminal_width - file - PERCENT - 2 * len(GAP)), len("label"))

    def line(first: str, second: str, third: str) -> str:
        padded = second if cell_len(second) > label else set_cell_size(second, label)
        return f"{set_cell_size(first, file)}{GAP}{padded}{GAP}{third:>{PERCENT}}"

    def lines(row: Row) -> Iterator[str]:
        name = make_printable(row["file"])
        if cell_len(name) > file:
            yield name
            name = ""
        for guess, probability in row["labels"]:
            yield line(name, make_printable(guess), f"{probability:.2%}")
            name = ""

    return f"{set_cell_size('file', file)}{GAP}{set_cell_size('label', label)}{GAP}probability", lines


def _display_file(file: str) -> str:
    from vitrail.data.sources.image_files import make_printable

    return "standard input" if file == "-" else make_printable(file)


def _round_to_float32(probability: float) -> float:
    """Return the probability with the digits that a float32 has."""
    return float(f"{probability:.9g}")
