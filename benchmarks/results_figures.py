"""Draw the figures of docs/results.md and docs/small-data.md: curves in panels side by side, and bars.

results_page.py makes the data of a figure. The SVG contains a digest of that data, so a figure that is out of date is
found without drawing it again.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from results_raw import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""The colours of vitrail.system.figures, which colour-blind readers can tell apart."""


@dataclass(frozen=True)
class Line:
    """A run as a line with a dot for each evaluation; dashed if the run was cut off."""

    label: str
    points: list[Point]
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot with lines. Values are in per cent, or losses if `percent` is False."""

    title: str
    across: str
    lines: list[Line]
    lowest: float | None = None
    start: float = 0.0
    percent: bool = True


@dataclass(frozen=True)
class Curves:
    """A figure of panels side by side."""

    title: str
    panels: list[Panel]
    width: float = 9.0
    height: float = 3.8

    def draw(self, figure: Figure) -> None:
        """Draw all panels in one row."""
        for place, panel in enumerate(self.panels):
            draw_panel(figure.add_subplot(1, len(self.panels), place + 1), panel)


@dataclass(frozen=True)
class Bars:
    """A bar chart of named values in per cent, compared with the value named `base`."""

    title: str
    across: str
    values: list[tuple[str, float]]
    base: str
    width: float = 9.0
    height: float = 4.6

    def draw(self, figure: Figure) -> None:
        """Draw values above the base, the base itself and values below it in three colours."""
        from vitrail.system.figures import FAINT, INK

        axes = figure.add_subplot()
        names = [name for name, _ in self.values]
        numbers = [value for _, value in self.values]
        middle = dict(self.values)[self.base]
        colours = [FAINT if name == self.base else COLOURS[0 if value > middle else 1] for name, value in self.values]
        axes.barh(names, numbers, color=colours, height=0.66)
        axes.axvline(middle, color=INK, linewidth=1, linestyle=(0, (3, 3)), zorder=0)
        for place, value in enumerate(numbers):
            axes.text(value - 0.6, place, tenths(value), ha="right", va="center", fontsize=9, color="white")
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, 1.05 * max(numbers))
        axes.set_xlabel(self.across)
        axes.tick_params(axis="y", labelcolor=INK)


Shown = Curves | Bars


def tenths(value: float) -> str:
    """Format with one decimal, and round a five up."""
    return f"{value + 1e-9:.1f}"


def draw_panel(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title)
    axes.set_xlabel(panel.across)
    for line in panel.lines:
        style: dict[str, Any] = {"linestyle": (0, (4, 3)), "markerfacecolor": "white"} if line.dashed else {}
        colour = COLOURS[line.colour]
        axes.plot(*zip(*line.points, strict=True), label=line.label, color=colour, marker="o", markersize=4, **style)
    axes.set_xlim(left=panel.start)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if panel.lowest is not None:
        axes.set_ylim(bottom=panel.lowest)
    if panel.percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    if len(panel.lines) > 1:
        axes.legend(loc="lower right" if panel.percent else "upper right", fontsize=9)


def digest(shown: Shown) -> str:
    return hashlib.sha256(json.dumps(asdict(shown)).encode()).hexdigest()[:16]


def mark(shown: Shown) -> str:
    """Return the description in the SVG, which also holds the digest."""
    return f"<desc>{shown.title}. Drawn from raw results with the digest {digest(shown)}.</desc>"


def write(shown: Shown, path: Path) -> None:
    """Write the figure as SVG."""
    with canvas(shown, path) as figure:
        shown.draw(figure)


@contextmanager
def canvas(shown: Shown, path: Path) -> Iterator[Figure]:
    from vitrail.system.figures import new_figure, set_title

    with tempfile.TemporaryDirectory() as folder:
        drawing = Path(folder) / path.name
        with new_figure(drawing, shown.width, shown.height) as figure:
            yield figure
            set_title(figure, shown.title)
        start, rest = drawing.read_text(encoding="utf-8").split("<metadata>", 1)
        path.write_text(f"{start}{mark(shown)}\n <metadata>{rest}", encoding="utf-8")
