"""The rows of a benchmark as a table for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitrail.benchmark.report import SpeedRow

COLUMNS = (
    *("model", "what", "library", "way", "precision", "size", "batch", "images/s", "ms", "p99 ms", "TFLOP/s"),
    *("of product", "GiB", "distance"),
)
WORD_COLUMNS = 6
"""Columns at the front that hold words; the others hold numbers."""


def format_cells(row: SpeedRow) -> list[str]:
    """Return the cells of a row, in the order of `COLUMNS`."""
    return [
        *(row.name, row.what, row.library, row.way, row.precision, row.size, f"{row.batch:,}"),
        _format_number(row.images_per_second),
        _format_number(row.median_seconds * 1000),
        "–" if row.p99_seconds is None else _format_number(row.p99_seconds * 1000),
        "–" if row.flops_per_second is None else _format_number(row.flops_per_second / 1e12),
        "–" if row.share_of_product is None else f"{row.share_of_product:.1%}",
        "–" if row.memory_bytes is None else f"{row.memory_bytes / 2**30:.2f}",
        "–" if row.distance is None else f"{row.distance:.1e}" if row.distance else "0",
    ]


def _format_number(value: float) -> str:
    """Write a number with at least three digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")
