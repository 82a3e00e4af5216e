"""Figures that tasks draw of an evaluation: a bar for each tag, predicted against true numbers, confusions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.system.figures import BLUE, FAINT, INK, VERMILION, new_figure, replace_unprintable, set_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS = 60
"""Bars in one figure: those of the lowest shares."""
MOST_POINTS = 20_000
"""Points in one scatter plot: more are thinned out evenly."""
MOST_PANELS, ACROSS = 12, 3
"""Scatter plots in one figure, and beside each other."""
MOST_NAMED, MOST_NUMBERED = 100, 12
"""A confusion matrix with more rows shows no names, or no counts."""
NAME_LETTERS = 24
"""Longer names are cut."""


def draw_share_bars(
    path: Path, title: str, names: Sequence[str], shares: NDArray[Any], counts: NDArray[Any]
) -> list[Path]:
    """Draw a horizontal bar for each name, the lowest share first; names without a share are left out.

    Args:
        path: the .png file; an .svg is written beside it.
        title: of the figure.
        names: K names.
        shares: (K,) from 0 to 1, or NaN.
        counts: (K,) images behind each share.

    Returns:
        The file, or nothing if no name has a share.
    """
    order = [int(k) for k in np.argsort(shares, kind="stable") if np.isfinite(shares[k])]
    if not order:
        return []
    if len(order) > MOST_BARS:
        title, order = f"{title}: the lowest {MOST_BARS} of {len(order):,}", order[:MOST_BARS]
    with new_figure(path, 8, 1.4 + 0.26 * len(order)) as figure:
        axes = figure.add_subplot()
        places = np.arange(len(order))
        axes.barh(places, [shares[k] for k in order], 0.72, color=BLUE)
        for place, k in enumerate(order):
            axes.text(1.01, place, f"{shares[k]:.1%} of {counts[k]:,}", va="center", fontsize=8.5, color=FAINT)
        axes.set(xlim=(0, 1), ylim=(len(order) - 0.5, -0.5))
        axes.grid(axis="y", visible=False)
        axes.set_yticks(places, [shorten_name(names[k]) for k in order])
        _write_names_literally(axes)
        set_title(figure, title)
    return [path]


def draw_scatter(
    path: Path, title: str, names: Sequence[str], truth: NDArray[Any], predicted: NDArray[Any]
) -> list[Path]:
    """Draw predicted against true numbers, a plot for each name; numbers that are not known are left out.

    Args:
        path: the .png file; an .svg is written beside it.
        title: of the figure.
        names: K names, with units.
        truth: (N, K), NaN where a number is not known.
        predicted: (N, K).

    Returns:
        The file, or nothing if no number is known.
    """
    panels = [k for k in range(len(names)) if np.isfinite(truth[:, k]).any()][:MOST_PANELS]
    if not panels:
        return []
    across = min(len(panels), ACROSS)
    down = -(-len(panels) // across)
    with new_figure(path, 0.6 + 4.2 * across, 0.6 + 4.1 * down) as figure:
        for place, axes in enumerate(np.atleast_1d(figure.subplots(down, across)).flat):
            if place >= len(panels):
                axes.set_axis_off()
                continue
            k = panels[place]
            known = np.flatnonzero(np.isfinite(truth[:, k]) & np.isfinite(predicted[:, k]))
            known = known[:: -(-len(known) // MOST_POINTS)] if len(known) else known
            x, y = truth[known, k], predicted[known, k]
            ends = [float(min(x.min(), y.min())), float(max(x.max(), y.max()))] if len(known) else [0.0, 1.0]
            room = 0.04 * (ends[1] - ends[0]) or 1.0
            axes.plot(ends, ends, color=VERMILION, linewidth=1, linestyle=":")
            opacity = float(np.clip(200 / max(len(known), 1), 0.08, 0.7))
            axes.plot(x, y, "o", color=BLUE, markersize=3.5, markeredgewidth=0, alpha=opacity, rasterized=True)
            limits = (ends[0] - room, ends[1] + room)
            axes.set(xlim=limits, ylim=limits, aspect="equal", xlabel="true", ylabel="predicted")
            axes.set_title(shorten_name(names[k]), parse_math=False)
        set_title(figure, title)
    return [path]


def draw_confusion_matrix(
    path: Path, title: str, names: Sequence[str], truth: NDArray[np.int64], answers: NDArray[np.int64]
) -> list[Path]:
    """Draw how often what is true is taken for what: a row for each truth, a column for each answer.

    Args:
        path: the .png file; an .svg is written beside it.
        title: of the figure.
        names: K names. Those that are neither true of an image nor an answer are left out.
        truth: (N,) numbers of names.
        answers: (N,) numbers of names.

    Returns:
        The file, or nothing if there are no images.
    """
    present = np.union1d(truth, answers)
    if not len(present):
        return []
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, (truth, answers), 1)
    side = float(np.clip(3.5 + 0.32 * len(present), 6, 18))
    with new_figure(path, side + 1, side) as figure:
        axes = figure.add_subplot()
        shown = [names[k] for k in present]
        paint_confusions(figure, axes, shown, shown, counts[np.ix_(present, present)])
        axes.set(xlabel="answer", ylabel="truth")
        set_title(figure, title)
    return [path]


def paint_confusions(
    figure: Figure,
    axes: Axes,
    down: Sequence[str],
    across: Sequence[str],
    counts: NDArray[np.int64],
    label: str = "share of the row",
) -> None:
    """Paint (rows, columns) counts as colours by share of the row, with names and counts if there are few."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    axes.grid(False)
    if len(down) <= MOST_NAMED:
        size = float(np.clip(11 - len(down) / 12, 4.5, 10))
        names = [shorten_name(name) for name in across]
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor", fontsize=size)
        axes.set_yticks(range(len(down)), [shorten_name(name) for name in down], fontsize=size)
        _write_names_literally(axes)
    if len(down) <= MOST_NUMBERED:
        for (row, column), count in np.ndenumerate(counts):
            colour = "white" if shares[row, column] > 0.5 else INK if count else "#BBBBBB"
            axes.text(column, row, str(count), ha="center", va="center", color=colour, fontsize=9)
    figure.colorbar(image, ax=axes, label=label, shrink=0.8)


def shorten_name(name: str) -> str:
    """Return a name that fits beside an axis."""
    name = replace_unprintable(name)
    return name if len(name) <= NAME_LETTERS else f"{name[: NAME_LETTERS - 1]}…"


def _write_names_literally(axes: Axes) -> None:
    """Keep the dollar signs of names: between two of them, matplotlib would read a formula."""
    for text in [*axes.get_xticklabels(), *axes.get_yticklabels()]:
        text.set_parse_math(False)
