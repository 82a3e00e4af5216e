"""Learning curves: a figure of a run's loss, accuracy and learning rate over its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.system.figures import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    PURPLE,
    VERMILION,
    new_figure,
    replace_unprintable,
    set_title,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec, SubplotSpec

Record = Mapping[str, Any]
Array = NDArray[np.float64]

WIDTH, HEIGHT = 12.0, 7.0
"""Of the figure in inches: 1200×700 pixels."""
NARROW_WIDTH, NARROW_HEIGHTS = 3.8, (2.6, 1.5)
"""Of a figure for a phone, in inches, and the heights of its panels: metrics, and the learning rate."""
SMOOTHED_FROM = 20
"""Number of records from which a curve is smoothed."""
MOST_POINTS = 2000
"""Most points of a line: more cannot be seen, and would make the SVG large."""
LAST_STEP, LARGEST = 10**15, 1e30
"""The most steps of a run, and the largest value: larger ones are gaps, like values that are not finite."""
MOST_LETTERS = 30
"""Most letters of a part's name in the legend."""
OUTSIDE = 3.0
"""Losses may leave the frame if the highest is this many times their 90th percentile. Otherwise a high first record,
or a run that went wrong at its end, would press all others flat."""


def draw_curves(records: Sequence[Record], path: Path, title: str, narrow: bool = False) -> bool:
    """Draw the curves of a run as `path` in PNG, and beside it in SVG. The same records give the same bytes.

    A `narrow` figure has its panels one below the other, for a phone; a path that ends in .svg is drawn as SVG alone.

    Values that are not finite are gaps. Records that a run would not write are left out: the file may be a stranger's.

    Returns:
        Whether there was anything to draw. If not, no file is written.
    """
    records = [record for record in records if _is_known(record)]
    if not any("loss" in record for record in records):
        return False
    names = [name for name in ("loss", "accuracy") if any(name in record for record in records)]
    has_rates = bool(len(_line(records, None, "learning_rate")[0]))
    heights = [NARROW_HEIGHTS[0]] * len(names) + [NARROW_HEIGHTS[1]] * has_rates
    width, height = (NARROW_WIDTH, sum(heights) + 0.5) if narrow else (WIDTH, HEIGHT)
    with new_figure(path, width, height) as figure:
        grid = figure.add_gridspec(len(heights), 1, height_ratios=heights) if narrow else None
        _draw(figure, records, names, grid)
        set_title(figure, title)
    return True


def _is_known(record: Any) -> bool:
    """Return whether a record has the fields and types that a run writes."""
    if not isinstance(record, Mapping) or record.get("kind") not in ("train", "evaluation", "fewshot"):
        return False
    step = record.get("step")
    values = [record[name] for name in ("loss", "accuracy", "learning_rate") if record.get(name) is not None]
    return (
        isinstance(step, int)
        and not isinstance(step, bool)
        and 0 <= step <= LAST_STEP
        and (record["kind"] == "train" or isinstance(record.get("part"), str))
        and all(isinstance(value, Real) and not isinstance(value, bool) for value in values)
    )


def _draw(figure: Figure, records: Sequence[Record], names: Sequence[str], column: GridSpec | None) -> None:
    """Draw the metrics side by side with the learning rate below them; or all of them in one column."""
    rates = _line(records, None, "learning_rate")
    rows = 2 if len(rates[0]) else 1
    last = max(1, *(record["step"] for record in records))
    grid = figure.add_gridspec(rows, len(names), height_ratios=[3.2, 1][:rows]) if column is None else column
    for place, name in enumerate(names):
        spot = grid[0, place] if column is None else grid[place, 0]
        axes = _add_axes(figure, spot, name, last)
        if column is not None:
            axes.margins(y=0.25)  # room for the legend
        _draw_metric(axes, records, name)
    if len(rates[0]):
        _draw_rates(_add_axes(figure, grid[-1, :], "learning rate", last), rates)


def _add_axes(figure: Figure, place: SubplotSpec, name: str, last: int) -> Axes:
    """Add axes whose x-axis covers all steps."""
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_subplot(place)
    axes.set_title(name.capitalize())
    axes.set_xlabel("step")
    axes.set_xlim(-0.015 * last, 1.015 * last)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    return axes


def _draw_rates(axes: Axes, rates: tuple[Array, Array]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.plot(*_thin_out(*rates), color=INK, linewidth=1.4, **_markers(rates))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda rate, _: f"{rate:g}")


def _draw_metric(axes: Axes, records: Sequence[Record], name: str) -> None:
    """Draw training values raw and smoothed, and evaluations with a dot each, because they can be rare."""
    training = steps, values = _line(records, None, name)
    measured = [record for record in records if record["kind"] != "train" and name in record]
    # Few-shot accuracies come last: the others have the same colours in all panels.
    parts = dict.fromkeys(record["part"] for record in sorted(measured, key=lambda record: record["kind"] == "fewshot"))
    evaluations = {part: _line(records, part, name) for part in parts}
    everything = np.concatenate([values, *(line[1] for line in evaluations.values())])
    top = _top(everything) if name == "loss" else np.inf
    if len(steps) >= SMOOTHED_FROM:
        axes.plot(*_thin_out(*training), color=BLUE, linewidth=0.8, alpha=0.35)
        training = steps, smooth(np.minimum(values, top))  # values above the frame do not bend the curve inside
    if len(steps):
        axes.plot(*_thin_out(*training), color=BLUE, linewidth=2, label="training", **_markers(training))
    for (part, line), colour in zip(evaluations.items(), (VERMILION, GREEN, PURPLE), strict=False):
        axes.plot(*line, color=colour, linewidth=1.6, marker="o", markersize=4, label=_label(part, line, name))
    _frame(axes, everything[np.isfinite(everything)], name, top)


def _top(losses: Array) -> float:
    """Return the upper end of the frame, or infinity if it holds all losses."""
    losses = losses[np.isfinite(losses)]
    most = np.quantile(losses, 0.9) if len(losses) else 0.0
    return float(2 * most) if most > 0 and losses.max() > OUTSIDE * most else np.inf


def _frame(axes: Axes, values: Array, name: str, top: float) -> None:
    """Set the range of the y-axis. If values lie above `top`, the title says so."""
    from matplotlib.ticker import PercentFormatter

    if not len(values):
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", color=FAINT)
        return
    legend = axes.legend(loc="best")
    legend.set_in_layout(False)  # it lies inside the axes; a long name must not shrink them
    for text in legend.get_texts():
        text.set_parse_math(False)
    if name == "accuracy" and values.min() >= 0 and values.max() <= 1:
        bottom, above = axes.get_ylim()
        axes.set_ylim(max(bottom, -0.02), min(above, 1.02))
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    elif top < np.inf:
        axes.set_ylim(min(0, values.min()), top)
        axes.set_title(f"{axes.get_title('left')} (up to {_short(values.max())}, above the frame)")


def _line(records: Sequence[Record], part: str | None, name: str) -> tuple[Array, Array]:
    """Return steps and values of training (`part` None) or of a part's evaluations; NaN for values not finite."""
    points = [
        (record["step"], record[name] if abs(record[name]) <= LARGEST else np.nan)
        for record in records
        if (None if record["kind"] == "train" else record["part"]) == part and record.get(name) is not None
    ]
    steps, values = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return steps, values


def smooth(values: Array) -> Array:
    """Smooth values by a moving mean, applied twice: (N,) → (N,).

    The window reaches a fortieth of all values to each side, but at the start not further ahead than back: so a curve
    that falls steeply at first is not drawn too low. NaN stays NaN, and its neighbours ignore it.
    """
    there = np.isfinite(values)
    place = np.arange(len(values))
    reach = max(1, len(values) // 40)
    ahead = np.minimum(reach, np.maximum(place, len(values) // 1000))
    start, stop = np.maximum(0, place - reach), np.minimum(len(values), place + ahead + 1)
    counts = np.concatenate([[0], np.cumsum(there)])
    for _ in range(2):
        sums = np.concatenate([[0], np.cumsum(np.where(there, values, 0))])
        means = (sums[stop] - sums[start]) / np.maximum(1, counts[stop] - counts[start])
        values = np.where(there, means, np.nan)
    return values


def _thin_out(steps: Array, values: Array) -> tuple[Array, Array]:
    """Replace very many points by the least and the greatest of neighbouring ones, which looks the same."""
    if len(steps) <= MOST_POINTS:
        return steps, values
    cuts = np.linspace(0, len(steps), MOST_POINTS // 2 + 1).astype(int)
    ends = np.stack([steps[cuts[:-1]], steps[cuts[1:] - 1]], axis=1)
    extremes = np.stack([np.fmin.reduceat(values, cuts[:-1]), np.fmax.reduceat(values, cuts[:-1])], axis=1)
    return ends.ravel(), extremes.ravel()


def _markers(line: tuple[Array, Array]) -> dict[str, Any]:
    """Return a marker for each of few points: a line through a single one would be invisible."""
    return {"marker": "o", "markersize": 4} if len(line[0]) < SMOOTHED_FROM else {}


def _label(part: str, line: tuple[Array, Array], name: str) -> str:
    """Return a part's name and its best value, for the legend."""
    part = replace_unprintable(part if len(part) <= MOST_LETTERS else f"{part[: MOST_LETTERS - 1]}…")
    part = (
        f" {part}" if part.startswith("_") else part or "?"
    )  # matplotlib leaves names with an underscore out of the legend
    steps, values = line
    if not np.isfinite(values).any():
        return part
    best = np.nanargmax(values) if name == "accuracy" else np.nanargmin(values)
    value = f"{values[best]:.1%}" if name == "accuracy" and 0 <= values[best] <= 1 else _short(values[best])
    return f"{part}, best {value} at step {steps[best]:,.0f}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e6 else f"{value:.4g}"
