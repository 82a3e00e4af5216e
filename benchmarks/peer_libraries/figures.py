"""Figures of a benchmark: bars for the candidates of each case, or lines over what grew."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.benchmark.case import OURS
from vitrail.benchmark.report import BenchmarkReport, SpeedRow, group_by_case
from vitrail.system.figures import BLUE, FAINT, GREEN, INK, PURPLE, VERMILION, new_figure, set_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {OURS: BLUE, "timm": VERMILION, "torchvision": GREEN, "transformers": PURPLE, "vit-pytorch": INK}
STYLES = ("-", "--", ":", "-.")
"""Line styles of a library's candidates, in their order."""
MOST_LINES = 8
"""More lines would hide each other: then only each library's fastest candidate is drawn."""
AXES = {"resolution": "side of the image, pixels", "batch": "images in a batch", "model": "parameters, millions"}


def draw_report(report: BenchmarkReport, path: Path) -> Path:
    """Draw a report as PNG, with an SVG beside it, and return the path."""
    return _draw_growth(report, report.grown, path) if report.grown else _draw_bars(report, path)


def _draw_bars(report: BenchmarkReport, path: Path) -> Path:
    cases = group_by_case(report.rows)
    heights = [0.9 + 0.3 * len(rows) for rows in cases]
    with new_figure(path, 9, sum(heights) + 0.6) as figure:
        places = figure.subplots(len(cases), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, rows in zip(places, cases, strict=True):
            _draw_case(axes, rows)
        set_title(figure, f"{report.machine['device']}: {report.asked['precision']}")
    return path


def _draw_case(axes: Axes, rows: Sequence[SpeedRow]) -> None:
    first = rows[0]
    latency = first.what == "latency"
    values = [row.median_seconds * 1000 if latency else row.images_per_second for row in rows]
    bars = axes.barh([str(row) for row in rows], values, color=[COLOURS.get(row.library, FAINT) for row in rows])
    labels = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
    axes.bar_label(bars, labels, padding=3, color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.grid(axis="y", visible=False)
    axes.set_title(f"{first.name} {first.what}, {first.size} px, batch {first.batch}")
    axes.set_xlabel("milliseconds, less is better" if latency else "images/s")


def _draw_growth(report: BenchmarkReport, axis: str, path: Path) -> Path:
    rows, is_selection = select_lines(report.rows)
    has_memory = any(row.memory_bytes is not None for row in rows)
    first = rows[0]
    with new_figure(path, 12 if has_memory else 7.5, 5.2) as figure:
        speed, *others = figure.subplots(1, 2 if has_memory else 1, squeeze=False)[0]
        _draw_lines(speed, rows, axis, [row.images_per_second for row in rows], "images/s")
        for memory in others:
            known = [row for row in rows if row.memory_bytes is not None]
            _draw_lines(memory, known, axis, [(row.memory_bytes or 0) / 2**30 for row in known], "GiB of memory")
        title = "each library's fastest way" if is_selection else None
        speed.legend(loc="best", fontsize=8, title=title, title_fontsize=8, alignment="left")
        which = first.what.capitalize() if axis == "model" else f"{first.name} {first.what}"
        set_title(figure, f"{which} over {axis}: {report.machine['device']}, {report.asked['precision']}")
    return path


def select_lines(rows: Sequence[SpeedRow]) -> tuple[list[SpeedRow], bool]:
    """Return the rows to draw, and whether some candidates were left out.

    If there are too many, one candidate of each library and precision is kept: the one with the most cases, and among
    those the fastest.
    """
    ways: dict[tuple[str, str], list[SpeedRow]] = {}
    for row in rows:
        ways.setdefault((row.library, row.way), []).append(row)
    if len(ways) <= MOST_LINES:
        return list(rows), False
    best: dict[tuple[str, str], list[SpeedRow]] = {}
    for group in ways.values():
        place = group[0].library, group[0].precision
        best[place] = max(best.get(place, []), group, key=_rank_reach)
    return [row for row in rows if any(row in group for group in best.values())], True


def _rank_reach(rows: Sequence[SpeedRow]) -> tuple[int, float]:
    """Return the number of cases, and the logarithm of the product of the speeds."""
    return len(rows), sum(math.log(row.images_per_second) for row in rows)


def _draw_lines(axes: Axes, rows: Sequence[SpeedRow], axis: str, values: Sequence[float], unit: str) -> None:
    """Draw a line for each candidate, on two logarithmic axes."""
    from matplotlib.ticker import LogLocator

    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row, value in zip(rows, values, strict=True):
        lines.setdefault((row.library, row.way), []).append((_locate_row(row, axis), value))
    line_counts = Counter[str]()
    for (library, way), points in lines.items():
        style = STYLES[line_counts[library] % len(STYLES)]
        line_counts[library] += 1
        axes.plot(
            *zip(*points, strict=True),
            style,
            marker="o",
            markersize=4,
            color=COLOURS.get(library, FAINT),
            label=f"{library} {way}",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = {
        _locate_row(row, axis): f"{row.name}\n{_locate_row(row, axis):,.0f}" if axis == "model" else None
        for row in rows
    }
    axes.set_xticks(list(ticks), [name or f"{place:,.0f}" for place, name in ticks.items()])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.minorticks_off()
    axes.set_xlabel(AXES[axis])
    axes.set_ylabel(unit)


def _locate_row(row: SpeedRow, axis: str) -> float:
    """Return the position of a row on the axis that grew."""
    if axis == "model":
        return row.parameters / 1e6
    return float(row.batch if axis == "batch" else row.size.split("×")[0])
