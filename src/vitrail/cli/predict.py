"""vitrail predict: what is in your images, one line for each, or a table, JSON, CSV; embeddings into a file.

Models of labels are printed as labels; models of another task as parts of their answer, each a name and a value.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from vitrail.cli.completion import WhichOption, complete_device, complete_precision
from vitrail.cli.printing import PRECISION_HELP, announce_pane, interruptible, stop_on_sigterm
from vitrail.inference.prediction_rows import Form, Lines, Row, choose_format, has_answer

if TYPE_CHECKING:
    from vitrail.inference.prediction_result import PredictionResult

GAP = "  "
PERCENT = len("probability")
"""Width of the last column, in characters."""

CHOSEN, CONSIDERED = "* ", "  "
"""What stands in a table before parts of an answer, and before what was only considered."""


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
    top: Annotated[int, typer.Option(min=1, help="Labels, or other guesses, for each image.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each image, on a line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV: file, rank, label, probability.")] = False,
    embed: Annotated[
        Path | None, typer.Option(help="out.parquet or out.npz: write the representation of each image there.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="answers.jsonl or .csv: write the rows there. The same command goes on after a stop."),
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(help="0.95: print the set of labels that holds the right one in 95% of images, not the best."),
    ] = None,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Also say which images look like nothing that the model knows.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 32,
    device: Annotated[
        str, typer.Option(autocompletion=complete_device, help="cpu, cuda, mps, …; a GPU where there is one.")
    ] = "auto",
    precision: Annotated[
        str,
        typer.Option(autocompletion=complete_precision, help=PRECISION_HELP),
    ] = "fp32",
) -> None:
    """Say what is in images: the most probable labels of each, or the answer of the model's task.

    vitrail predict photos/ --model MODEL prints them as they come. A file that cannot be read is left out with a word
    on stderr, and the exit code at the end is 1. With --out they go into a file, and a command that was stopped goes on
    where it was (exit code 3 after Ctrl-C or SIGTERM).
    """
    from vitrail.errors import ConfigError
    from vitrail.inference.find_images import require_images

    if as_json and as_csv:
        raise ConfigError("--json and --csv: give one of them")
    if out is not None and (as_json or as_csv):
        raise ConfigError("--json and --csv are for what is printed: the ending of --out says how the file is written")
    if out is None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("under torchrun, give --out answers.jsonl: a file where all ranks' answers are joined")
    remaining = "the rest was not looked at" + ("" if embed is None else f", and {embed} was not written")
    with interruptible(remaining):
        images = require_images(files or [])  # before torch is imported, which takes seconds
    from vitrail.inference.predict import predict as predict_images
    from vitrail.weights.source import PANE, choose_weights

    printer = RowPrinter("json" if as_json else "csv" if as_csv else None, model is not None, out is None)
    with interruptible(remaining) if out is None else _stop_with_kept_work(), printer:
        result = predict_images(
            images,
            choose_weights(PANE if model is None else model, which),
            top=top,
            embed=embed,
            coverage=coverage,
            unknown=unknown,
            batch_size=batch_size,
            device=device,
            precision=precision,
            out=out,
            on_event=printer,
        )
    if len(result):  # under torchrun, the first rank's result
        print(_describe_result(result), file=sys.stderr)
    if result.left_out:
        raise typer.Exit(1)


@contextmanager
def _stop_with_kept_work() -> Iterator[None]:
    """End the command on Ctrl-C and SIGTERM with exit code 3, for what is done is kept."""
    from vitrail.errors import Stopped

    stopped = "stopped: the same command goes on with what is not done"
    with stop_on_sigterm(stopped):
        try:
            yield
        except KeyboardInterrupt:
            raise Stopped(stopped) from None


class RowPrinter:
    """A listener that prints predictions as they come, and shows a bar where they are not on the terminal."""

    def __init__(self, form: Form | None, has_model: bool, prints_rows: bool) -> None:
        self._form, self._has_model, self._prints_rows = form, has_model, prints_rows
        self._stdout = sys.stdout  # a progress bar replaces sys.stdout with one that leads to stderr
        self._encoding = sys.stdout.encoding or "utf-8"
        self._lines: Lines = _tab_lines
        self._has_bar = True
        self._has_table = False

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
            self._begin(values["files"], values["labels"], values.get("columns"), "tells_unknown" in values)
        elif kind == "prediction":
            self._print_prediction(values)
        elif self._has_bar:
            self._display(kind, values)

    def _begin(self, files: list[str], labels: list[str], columns: list[str] | None, tells_unknown: bool) -> None:
        """Choose how rows are printed; `columns` are the cells of an answer, None for labels."""
        if not self._has_model:
            announce_pane("--model MODEL takes another")
        if not self._prints_rows:
            return
        heading = None
        if self._form is not None:
            heading, self._lines = choose_format(self._form, columns, tells_unknown)
        elif self._stdout.isatty():
            heading, self._lines = _make_table(files, labels, has_answers=columns is not None)
            self._has_table = True
        elif columns is not None:
            self._lines = _tab_answer
        if heading is not None and labels:
            self._print_line(heading)
        # On a terminal the rows show the progress, and a bar between them would be in the way.
        self._has_bar = not labels or not self._stdout.isatty()

    def _print_prediction(self, row: Row) -> None:
        if row["error"] is not None:
            print(f"left out: {_display_file(row['file'])}: {row['error']}", file=sys.stderr)
        if not self._prints_rows:
            return
        for line in self._lines(row) if has_answer(row) else ():
            self._print_line(line)
        if row.get("unknown") and self._has_table:
            self._print_line(f"{GAP}looks like nothing that the model knows")

    def _print_line(self, line: str) -> None:
        text = line.encode(self._encoding, "backslashreplace").decode(self._encoding)
        print(text, file=self._stdout, flush=True)


def _describe_result(result: PredictionResult) -> str:
    """Return counts and speed in words: "132 images, 45.2 images/s, 1 left out"."""
    from vitrail.data.sources.image_files import make_printable

    left_out = len(result.left_out)
    done = len(result) - left_out
    parts = [f"{done:,} image" + ("" if done == 1 else "s")]
    if done:
        parts.append(f"{result.images_per_second:,.1f} images/s")
    if left_out:
        parts.append(f"{left_out:,} left out")
    if result.done_before:
        parts.append(f"{result.done_before:,} were done before")
    if result.out is not None:
        parts.append(f"in {make_printable(result.out)}")
    return ", ".join(parts)


def _tab_words(row: Row) -> list[str]:
    """Return the column of a text line that says whether the image is known; none if it was not asked for."""
    return ["unknown" if row["unknown"] else "known"] if "unknown" in row else []


def _tab_lines(row: Row) -> Iterator[str]:
    from vitrail.data.sources.image_files import make_printable

    guesses = [cell for label, probability in row["labels"] for cell in (make_printable(label), f"{probability:.4f}")]
    yield "\t".join([make_printable(row["file"]), *_tab_words(row), *guesses])


def _tab_answer(row: Row) -> Iterator[str]:
    """Yield the file and the parts of its answer: those that were only considered are left out."""
    from vitrail.data.sources.image_files import make_printable

    chosen = [line for line in row["lines"] if line["is_chosen"]]
    cells = [make_printable(cell) for line in chosen for cell in (line["name"], line["text"])]
    yield "\t".join([make_printable(row["file"]), *_tab_words(row), *cells])


def _make_table(files: list[str], names: list[str], has_answers: bool) -> tuple[str, Lines]:
    """Return heading and formatter of a table with fixed widths; names that are too long get a line of their own.

    Args:
        files: the names of the images.
        names: the labels, or the names of other outputs.
        has_answers: whether rows hold answers of another task than labels.
    """
    from rich.cells import cell_len, set_cell_size
    from rich.console import Console

    from vitrail.data.sources.image_files import make_printable

    first, second = ("answer", "value") if has_answers else ("label", "probability")
    mark = len(CHOSEN) if has_answers else 0
    terminal_width = Console().width
    longest = max(cell_len(make_printable(name)) for name in files)
    file = max(min(longest, terminal_width // 2), len("file"))
    widest = max((cell_len(make_printable(name)) for name in names), default=0) + mark
    label = max(min(widest, terminal_width - file - PERCENT - 2 * len(GAP)), len(first) + mark)

    def line(first: str, second: str, third: str) -> str:
        padded = second if cell_len(second) > label else set_cell_size(second, label)
        return f"{set_cell_size(first, file)}{GAP}{padded}{GAP}{third:>{PERCENT}}"

    def cells(row: Row) -> Iterator[tuple[str, str]]:
        for part in row["lines"] if has_answers else ():
            yield (CHOSEN if part["is_chosen"] else CONSIDERED) + make_printable(part["name"]), part["text"]
        for guess, probability in row["labels"]:
            yield make_printable(guess), f"{probability:.2%}"

    def lines(row: Row) -> Iterator[str]:
        name = make_printable(row["file"])
        if cell_len(name) > file:
            yield name
            name = ""
        for guess, value in cells(row):
            yield line(name, guess, value)
            name = ""

    heading = set_cell_size(" " * mark + first, label)
    return f"{set_cell_size('file', file)}{GAP}{heading}{GAP}{second:>{PERCENT if has_answers else 0}}", lines


def _display_file(file: str) -> str:
    from vitrail.data.sources.image_files import make_printable

    return "standard input" if file == "-" else make_printable(file)
