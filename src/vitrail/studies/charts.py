"""The two figures that studies draw: dots with intervals for each arm, and lines over a number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.studies.results import StudyResults
from vitrail.system.figures import BLUE, FAINT, GREEN, INK, PURPLE, VERMILION, new_figure
from vitrail.system.intervals import Estimate

WIDTH = 6.0
"""Inches: narrow, so that words can still be read in a card on the page of all claims."""
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, "#E69F00", "#56B4E9", INK)
MARKS = ("o", "s", "^", "D", "v", "P", "X")
"""Colour is not all that tells lines apart."""


@dataclass(frozen=True)
class Series:
    """A line of a figure."""

    name: str
    points: Sequence[tuple[float, Estimate]]
    fitted: Sequence[tuple[float, float]] = ()
    """A curve that is drawn instead of the line between the points."""


def draw_dots(results: StudyResults, path: Path) -> None:
    """Draw one line for each arm: a dot for every seed, and the mean with its interval."""
    arms = results.arms
    with new_figure(path, WIDTH, 1.0 + 0.36 * len(arms)) as figure:
        axes = figure.subplots()
        for place, arm in enumerate(arms):
            value, low, high = results.estimate(arm)
            values = results.list_values(arm)
            if math.isfinite(low):
                axes.plot([low, high], [place, place], color=BLUE, linewidth=2.5, alpha=0.45, solid_capstyle="round")
            axes.plot(values, [place] * len(values), "o", color=FAINT, markersize=3.5, alpha=0.7)
            axes.plot([value], [place], "o", color=BLUE, markersize=8)
        axes.set_yticks(range(len(arms)), arms)
        axes.set_ylim(len(arms) - 0.5, -0.5)  # the first arm on top, and none on the frame
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(results.study.unit)


def draw_lines(
    path: Path,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    logarithmic: bool = False,
    percent: bool = False,
) -> None:
    """Draw lines with intervals.

    Args:
        path: The file; PNG and SVG are written.
        series: The lines.
        x_label: What stands below.
        y_label: What stands on the left.
        logarithmic: Whether the horizontal axis is.
        percent: Whether the numbers on it are shares.
    """
    with new_figure(path, WIDTH, 3.7) as figure:
        axes = figure.subplots()
        for number, line in enumerate(series):
            colour, mark = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
            x = [point for point, _ in line.points]
            y = [estimate.value for _, estimate in line.points]
            _draw_intervals(axes, line, colour)
            if line.fitted:
                axes.plot(*zip(*line.fitted, strict=True), color=colour, linewidth=1.6)
                axes.plot(x, y, mark, color=colour, markersize=6, label=line.name)
            else:
                axes.plot(x, y, marker=mark, color=colour, markersize=6, linewidth=1.6, label=line.name)
        if logarithmic:
            axes.set_xscale("log")
            _set_ticks(axes, sorted({x for line in series for x, _ in line.points}), percent)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.legend(loc="best")


def _draw_intervals(axes: Any, line: Series, colour: str) -> None:
    for x, (_, low, high) in line.points:
        if math.isfinite(low) and math.isfinite(high):
            axes.plot([x, x], [low, high], color=colour, linewidth=2.5, alpha=0.35, solid_capstyle="round")


MOST_TICKS = 6


def _set_ticks(axes: Any, values: Sequence[float], percent: bool) -> None:
    """Put numbers below a logarithmic axis: at the values themselves, if they are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    def write(value: float, _: int = 0) -> str:
        return f"{100 * value:g}%" if percent else f"{value:g}"

    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(write))
    if len(values) <= MOST_TICKS:
        axes.set_xticks(values)
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
