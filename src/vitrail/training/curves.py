"""Learning curves: loss, accuracy and learning rate of a run over its steps, as a picture for people and documents."""

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
    from matplotlib.gridspec import SubplotSpec

Record = Mapping[str, Any]
Array = NDArray[np.float64]

WIDTH, HEIGHT = 12.0, 7.0
"""Inches: 1200×700 pixels."""
SMOOTHED_FROM = 20
"""Records; fewer are shown as they are."""
MOST_POINTS = 2000
"""Of a line: more cannot be seen, and would make the SVG large."""
LAST_STEP, LARGEST = 10**15, 1e30
"""No run has more steps than the first; values beyond the second are gaps, as those that are not finite."""
MOST_LETTERS = 30
"""Of the name of a part."""
OUTSIDE = 3.0
"""Losses leave the frame where the highest is so many times what nine of ten stay below: else a first record, or the
end of a run that went wrong, would press all others flat."""


def draw_curves(records: Sequence[Record], path: Path, title: str) -> bool:
    """The curves of a run, as `path` in PNG and beside it in SVG; the same records give the same bytes.

    Values that are not finite are gaps, and records of another shape than a run's are left out: they may be a
    stranger's. Without records no file is written, and the answer is False.
    """
    records = [record for record in records if _is_known(record)]
    if not any("loss" in record for record in records):
        return False
    with new_figure(path, WIDTH, HEIGHT) as figure:
        _draw(figure, records, title)
    return True


def _is_known(record: Any) -> bool:
    """Whether it has the shape of what a run writes."""
    if not isinstance(record, Mapping) or record.get("kind") not in ("train", "evaluation"):
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


def _draw(figure: Figure, records: Sequence[Record], title: str) -> None:
    """Loss, beside it accuracy where there is one, below them the learning rate."""
    names = [name for name in ("loss", "accuracy") if any(name in record for record in records)]
    rates = _line(records, None, "learning_rate")
    rows = 2 if len(rates[0]) else 1
    last = max(1, *(record["step"] for record in records))
    grid = figure.add_gridspec(rows, len(names), height_ratios=[3.2, 1][:rows])
    for column, name in enumerate(names):
        _draw_metric(_axes(figure, grid[0, column], name, last), records, name)
    if len(rates[0]):
        _draw_rates(_axes(figure, grid[1, :], "learning rate", last), rates)
    set_title(figure, title)


def _axes(figure: Figure, place: SubplotSpec, name: str, last: int) -> Axes:
    """Over all steps."""
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

    axes.plot(*_thinned(*rates), color=INK, linewidth=1.4, **_markers(rates))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda rate, _: f"{rate:g}")


def _draw_metric(axes: Axes, records: Sequence[Record], name: str) -> None:
    """Training as it was and smoothed; evaluations with a dot for each, because few can be far between."""
    training = steps, values = _line(records, None, name)
    parts = dict.fromkeys(record["part"] for record in records if record["kind"] == "evaluation")
    evaluations = {part: _line(records, part, name) for part in parts}
    everything = np.concatenate([values, *(line[1] for line in evaluations.values())])
    top = _top(everything) if name == "loss" else np.inf
    if len(steps) >= SMOOTHED_FROM:
        axes.plot(*_thinned(*training), color=BLUE, linewidth=0.8, alpha=0.35)
        training = steps, smooth(np.minimum(values, top))  # what cannot be seen does not bend what can
    if len(steps):
        axes.plot(*_thinned(*training), color=BLUE, linewidth=2, label="training", **_markers(training))
    for (part, line), colour in zip(evaluations.items(), (VERMILION, GREEN, PURPLE), strict=False):
        axes.plot(*line, color=colour, linewidth=1.6, marker="o", markersize=4, label=_label(part, line, name))
    _frame(axes, everything[np.isfinite(everything)], name, top)


def _top(losses: Array) -> float:
    """Where the frame ends, if not above all of them."""
    losses = losses[np.isfinite(losses)]
    most = np.quantile(losses, 0.9) if len(losses) else 0.0
    return float(2 * most) if most > 0 and losses.max() > OUTSIDE * most else np.inf


def _frame(axes: Axes, values: Array, name: str, top: float) -> None:
    """The range that is shown. What lies above `top` is out of sight, and said to be."""
    from matplotlib.ticker import PercentFormatter

    if not len(values):
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", color=FAINT)
        return
    legend = axes.legend(loc="best")
    legend.set_in_layout(False)  # it lies inside; a long name must not push the frame together
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
    """Steps and values of training, or of the evaluations of a part; not a number where a value is not finite."""
    found = [
        (record["step"], record[name] if abs(record[name]) <= LARGEST else np.nan)
        for record in records
        if (None if record["kind"] == "train" else record["part"]) == part and record.get(name) is not None
    ]
    steps, values = np.array(found, dtype=np.float64).reshape(-1, 2).T
    return steps, values


def smooth(values: Array) -> Array:
    """The mean over a window around each value, and once more: (N,) → (N,).

    The window reaches a fortieth of all to each side, but at the start not further ahead than back: a curve that falls
    steeply at first is not drawn lower than it was. What is not a number stays so, and is left out around it.
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


def _thinned(steps: Array, values: Array) -> tuple[Array, Array]:
    """Of very many, the least and the greatest of so many neighbours: they look the same."""
    if len(steps) <= MOST_POINTS:
        return steps, values
    cuts = np.linspace(0, len(steps), MOST_POINTS // 2 + 1).astype(int)
    ends = np.stack([steps[cuts[:-1]], steps[cuts[1:] - 1]], axis=1)
    extremes = np.stack([np.fmin.reduceat(values, cuts[:-1]), np.fmax.reduceat(values, cuts[:-1])], axis=1)
    return ends.ravel(), extremes.ravel()


def _markers(line: tuple[Array, Array]) -> dict[str, Any]:
    """A dot for each of a few: a line through one is nothing to see."""
    return {"marker": "o", "markersize": 4} if len(line[0]) < SMOOTHED_FROM else {}


def _label(part: str, line: tuple[Array, Array], name: str) -> str:
    """A part, and its best value."""
    part = replace_unprintable(part if len(part) <= MOST_LETTERS else f"{part[: MOST_LETTERS - 1]}…")
    part = f" {part}" if part.startswith("_") else part or "?"  # else it would be kept out of the legend
    steps, values = line
    if not np.isfinite(values).any():
        return part
    best = np.nanargmax(values) if name == "accuracy" else np.nanargmin(values)
    value = f"{values[best]:.1%}" if name == "accuracy" and 0 <= values[best] <= 1 else _short(values[best])
    return f"{part}, best {value} at step {steps[best]:,.0f}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e6 else f"{value:.4g}"
