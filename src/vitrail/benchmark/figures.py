"""A benchmark as a picture: bars for the ways of each case, or lines over what grew."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.benchmark.case import OURS
from vitrail.benchmark.report import Report, Row, by_case
from vitrail.system.figures import BLUE, FAINT, GREEN, INK, PURPLE, VERMILION, drawn, set_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {OURS: BLUE, "timm": VERMILION, "torchvision": GREEN, "transformers": PURPLE, "vit-pytorch": INK}
STYLES = ("-", "--", ":", "-.")
"""Of a library's ways, in their order."""
MOST_LINES = 8
"""More would hide each other: then each library's fastest way stands for it."""
AXES = {"resolution": "side of the image, pixels", "batch": "images in a batch", "model": "parameters, millions"}


def draw(report: Report, path: Path) -> Path:
    """PNG, and SVG beside it."""
    return _draw_growth(report, report.grown, path) if report.grown else _draw_bars(report, path)


def _draw_bars(report: Report, path: Path) -> Path:
    cases = by_case(report.rows)
    heights = [0.9 + 0.3 * len(rows) for rows in cases]
    with drawn(path, 9, sum(heights) + 0.6) as figure:
        places = figure.subplots(len(cases), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, rows in zip(places, cases, strict=True):
            _bars(axes, rows)
        set_title(figure, f"{report.machine['device']}: {report.asked['precision']}")
    return path


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
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


def _draw_growth(report: Report, axis: str, path: Path) -> Path:
    rows, chosen = shown(report.rows)
    remembers = any(row.memory_bytes is not None for row in rows)
    first = rows[0]
    with drawn(path, 12 if remembers else 7.5, 5.2) as figure:
        speed, *others = figure.subplots(1, 2 if remembers else 1, squeeze=False)[0]
        _lines(speed, rows, axis, [row.images_per_second for row in rows], "images/s")
        for memory in others:
            known = [row for row in rows if row.memory_bytes is not None]
            _lines(memory, known, axis, [(row.memory_bytes or 0) / 2**30 for row in known], "GiB of memory")
        title = "each library's fastest way" if chosen else None
        speed.legend(loc="best", fontsize=8, title=title, title_fontsize=8, alignment="left")
        which = first.what.capitalize() if axis == "model" else f"{first.name} {first.what}"
        set_title(figure, f"{which} over {axis}: {report.machine['device']}, {report.asked['precision']}")
    return path


def shown(rows: Sequence[Row]) -> tuple[list[Row], bool]:
    """The rows of as many ways as can be told apart, and whether some were left out: of each library, and each
    precision that it has, the way that came furthest stays, and of several the fastest."""
    ways: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        ways.setdefault((row.library, row.way), []).append(row)
    if len(ways) <= MOST_LINES:
        return list(rows), False
    best: dict[tuple[str, str], list[Row]] = {}
    for some in ways.values():
        place = some[0].library, some[0].precision
        best[place] = max(best.get(place, []), some, key=_reach)
    return [row for row in rows if any(row in some for some in best.values())], True


def _reach(rows: Sequence[Row]) -> tuple[int, float]:
    """How many cases, and the product of speeds, as its logarithm."""
    return len(rows), sum(math.log(row.images_per_second) for row in rows)


def _lines(axes: Axes, rows: Sequence[Row], axis: str, values: Sequence[float], unit: str) -> None:
    """One for each way; both axes in powers, for everything here grows by factors."""
    from matplotlib.ticker import LogLocator

    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row, value in zip(rows, values, strict=True):
        lines.setdefault((row.library, row.way), []).append((_place(row, axis), value))
    drawn_of = Counter[str]()
    for (library, way), points in lines.items():
        style = STYLES[drawn_of[library] % len(STYLES)]
        drawn_of[library] += 1
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
    ticks = {_place(row, axis): f"{row.name}\n{_place(row, axis):,.0f}" if axis == "model" else None for row in rows}
    axes.set_xticks(list(ticks), [name or f"{place:,.0f}" for place, name in ticks.items()])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.minorticks_off()
    axes.set_xlabel(AXES[axis])
    axes.set_ylabel(unit)


def _place(row: Row, axis: str) -> float:
    """Where a row stands on the axis that grew."""
    if axis == "model":
        return row.parameters / 1e6
    return float(row.batch if axis == "batch" else row.size.split("×")[0])
