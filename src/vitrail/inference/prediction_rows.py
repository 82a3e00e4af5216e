"""How predictions are written as lines of JSON or of CSV, on standard output and in files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

Row = dict[str, Any]
"""The values of a `prediction` event: file, labels, error; of another task also task, answer, lines, cells; and, if
asked for, unknown and known_share."""
Lines = Callable[[Row], Iterator[str]]
Form = Literal["json", "csv"]
UNKNOWN = ("unknown", "known_share")
"""Columns of CSV and keys of JSON for images that the model may not know."""


class RowFormat(NamedTuple):
    """How rows are written."""

    heading: str | None
    """The line before all others; None if there is none."""
    lines: Lines


def choose_format(form: Form, columns: Sequence[str] | None, tells_unknown: bool) -> RowFormat:
    """Return the format of rows.

    Args:
        form: json for an object on a line for each image, csv for a table.
        columns: the names of the cells of an answer; None for labels.
        tells_unknown: whether rows say if the model may not know the image.
    """
    if form == "json":
        return RowFormat(None, _json_lines if columns is None else _json_answer)
    more = UNKNOWN if tells_unknown else ()
    if columns is None:
        return RowFormat(_csv_line("file", "rank", "label", "probability", *more), _csv_lines)
    names = (f"{name} (answer)" if name in ("file", *UNKNOWN) else name for name in columns)
    return RowFormat(_csv_line("file", *names, *more), _csv_answer)


def has_answer(row: Row) -> bool:
    """Return whether there is something to write of an image: not if it was left out, or only embedded."""
    return bool(row["labels"]) or "answer" in row or "unknown" in row


def _json_lines(row: Row) -> Iterator[str]:
    labels = [{"label": label, "probability": _round_to_float32(probability)} for label, probability in row["labels"]]
    yield json.dumps({"file": row["file"], "labels": labels, **_unknown_cells(row)})


def _json_answer(row: Row) -> Iterator[str]:
    yield json.dumps({**{name: row[name] for name in ("file", "task", "answer")}, **_unknown_cells(row)})


def _csv_lines(row: Row) -> Iterator[str]:
    for rank, (label, probability) in enumerate(row["labels"], start=1):
        yield _csv_line(row["file"], rank, label, _round_to_float32(probability), *_csv_unknown(row))


def _csv_answer(row: Row) -> Iterator[str]:
    yield _csv_line(row["file"], *row["cells"].values(), *_csv_unknown(row))


def _unknown_cells(row: Row) -> Row:
    """Return what is said of unknown images; nothing if it was not asked for."""
    return {name: row[name] for name in UNKNOWN if name in row}


def _csv_unknown(row: Row) -> list[str | float]:
    return [str(cell).lower() if isinstance(cell, bool) else cell for cell in _unknown_cells(row).values()]


def _csv_line(*cells: str | float) -> str:
    """Return a line of CSV. Its line end has both characters, so that a name with either is quoted."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(cells)
    return line.getvalue().removesuffix("\r\n")


def _round_to_float32(probability: float) -> float:
    """Return the probability with the digits that a float32 has."""
    return float(f"{probability:.9g}")
