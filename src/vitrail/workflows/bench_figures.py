"""A benchmark as a picture: bars for the ways of each case, or lines over what grew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.drawing import BLUE, FAINT, GREEN, INK, PURPLE, VERMILION, drawn, set_title
from vitrail.workflows.bench_report import Report, Row, by_case
from vitrail.workflows.bench_ways import OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {OURS: BLUE, "timm": VERMILION, "torchvision": GREEN, "transformers": PURPLE, "vit-pytorch": INK}
STYLES = {"eager": "-", "compiled": "--", "packed": ":"}
UNITS = {"inference": "images/s", "training": "images/s", "latency": "milliseconds, less is better"}
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
    bars = axes.barh(
        [f"{row.library} {row.way}" for row in rows], values, color=[COLOURS.get(row.library, FAINT) for row in rows]
    )
    axes.bar_label(bars, [f"{value:,.2f}" if latency else f"{value:,.0f}" for value in values], padding=3, color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.grid(axis="y", visible=False)
    axes.set_title(f"{first.name} {first.what}, {first.size} px, batch {first.batch}")
    axes.set_xlabel(UNITS[first.what])


def _draw_growth(report: Report, axis: str, path: Path) -> Path:
    remembers = any(row.memory_bytes is not None for row in report.rows)
    first = report.rows[0]
    with drawn(path, 12 if remembers else 7.5, 5.2) as figure:
        speed, *others = figure.subplots(1, 2 if remembers else 1, squeeze=False)[0]
        _lines(speed, report.rows, axis, [row.images_per_second for row in report.rows], "images/s")
        for memory in others:
            _lines(memory, report.rows, axis, [(row.memory_bytes or 0) / 2**30 for row in report.rows], "GiB")
        speed.legend(loc="best", fontsize=8)
        which = first.what.capitalize() if axis == "model" else f"{first.name} {first.what}"
        set_title(figure, f"{which} over {axis}: {report.machine['device']}, {first.precision}")
    return path


def _lines(axes: Axes, rows: Sequence[Row], axis: str, values: Sequence[float], unit: str) -> None:
    """One for each way; both axes in powers, for everything here grows by factors."""
    from matplotlib.ticker import LogLocator

    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row, value in zip(rows, values, strict=True):
        lines.setdefault((row.library, row.way), []).append((_place(row, axis), value))
    for (library, way), points in lines.items():
        axes.plot(
            *zip(*points, strict=True),
            STYLES.get(way, "-."),
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
