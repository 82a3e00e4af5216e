"""Tables of a suite's results beside those of the paper, as Markdown and JSON."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.system.files import write_whole

NOTHING = "–"
PAPER_MODELS = (
    "ViT-H/14 JFT",
    "ViT-L/16 JFT",
    "ViT-L/16 I21k",
    "BiT-L (R152x4)",
    "Noisy Student (EffNet-L2)",
)
TABLE_2 = {
    "ImageNet": ("88.55 ± 0.04", "87.76 ± 0.03", "85.30 ± 0.02", "87.54 ± 0.02", "88.4 / 88.5"),
    "ImageNet ReaL": ("90.72", "90.54", "88.62", "90.54", "90.55"),
    "CIFAR-10": ("99.50", "99.42", "99.15", "99.37", NOTHING),
    "CIFAR-100": ("94.55", "93.90", "93.25", "93.51", NOTHING),
    "Oxford-IIIT Pets": ("97.56", "97.32", "94.67", "96.62", NOTHING),
    "Flowers-102": ("99.68", "99.74", "99.61", "99.63", NOTHING),
    "VTAB (19 tasks)": ("77.63", "76.28", "72.72", "76.29", NOTHING),
    "TPUv3-core-days": ("2.5k", "0.68k", "0.23k", "9.9k", "12.3k"),
}
"""The paper's table 2, a number for each of `PAPER_MODELS`: top-1 in per cent, and the cost of pre-training."""

Rows = list[tuple[str, ...]]


class SuiteTable(NamedTuple):
    """A table of results."""

    columns: tuple[str, ...]
    rows: Rows
    left: int = 1
    """The number of columns at the front that hold words; the others hold numbers."""


def mean_and_deviation(shares: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the sample deviation (n − 1) of the runs; the deviation of one run is None."""
    return statistics.fmean(shares), statistics.stdev(shares) if len(shares) > 1 else None


def format_mean(shares: Sequence[float]) -> str:
    """Return mean and deviation in per cent, such as 91.20 ± 0.15."""
    mean, deviation = mean_and_deviation(shares)
    return f"{mean:.2%}".rstrip("%") + ("" if deviation is None else f" ± {100 * deviation:.2f}")


def format_results(tables: Sequence[SuiteTable], notes: Sequence[str]) -> list[str]:
    """Return tables and the notes below them as lines of Markdown."""
    lines = [line for table in tables for line in (*format_table(*table), "")]
    return [*lines, *(f"- {note}" for note in notes)]


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return a Markdown table with aligned columns; the first `left` columns are words, the others numbers."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    rule = ["-" * (width + 1) + ("-" if number < left else ":") for number, width in enumerate(widths)]
    return [_line(columns, widths, left), f"|{'|'.join(rule)}|", *(_line(row, widths, left) for row in rows)]


def _line(cells: Sequence[str], widths: Sequence[int], left: int) -> str:
    padded = [
        cell.ljust(width) if number < left else cell.rjust(width)
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |"


def write_results(folder: Path, title: str, lines: Sequence[str], content: dict[str, Any]) -> None:
    """Write suite.json and suite.md, on the first rank only."""
    if os.environ.get("RANK", "0") != "0":
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "suite.json", (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
    write_whole(folder / "suite.md", "\n".join([f"# {title}", "", *lines, ""]).encode())
