"""How the figures of docs/results.md and docs/small-data.md are drawn: curves in panels side by side, and bars.

What a figure shows is data, made by results_page.py. Its digest stands in the SVG, so that a figure that was drawn from
other numbers is found without drawing it again.
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
"""Those of vitrail.drawing, in which figures are also told apart by people who see fewer colours."""


@dataclass(frozen=True)
class Line:
    """One run: a dot for each evaluation, dashed where the run was cut off."""

    label: str
    points: list[Point]
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Axes with lines in them. Values are in per cent unless the panel is of losses."""

    title: str
    across: str
    lines: list[Line]
    lowest: float | None = None
    start: float = 0.0
    percent: bool = True


@dataclass(frozen=True)
class Curves:
    """Panels side by side."""

    title: str
    panels: list[Panel]
    width: float = 9.0
    height: float = 3.8

    def draw(self, figure: Figure) -> None:
        """All panels in one row."""
        for place, panel in enumerate(self.panels):
            draw_panel(figure.add_subplot(1, len(self.panels), place + 1), panel)


@dataclass(frozen=True)
class Bars:
    """Named values in per cent, from the top down, and one of them that the others are compared with."""

    title: str
    across: str
    values: list[tuple[str, float]]
    base: str
    width: float = 9.0
    height: float = 4.6

    def draw(self, figure: Figure) -> None:
        """Those above the base, the base and those below it in three colours."""
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
    """Rounded as people do: counts of 10,000 images often end in a five."""
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
    """What the SVG says of itself, to screen readers too."""
    return f"<desc>{shown.title}. Drawn from raw results with the digest {digest(shown)}.</desc>"


def write(shown: Shown, path: Path) -> None:
    """As SVG alone: the pages show no other."""
    with canvas(shown, path) as figure:
        shown.draw(figure)


@contextmanager
def canvas(shown: Shown, path: Path) -> Iterator[Figure]:
    from vitrail.system.figures import drawn, set_title

    with tempfile.TemporaryDirectory() as folder:
        drawing = Path(folder) / path.name
        with drawn(drawing, shown.width, shown.height) as figure:
            yield figure
            set_title(figure, shown.title)
        start, rest = drawing.read_text(encoding="utf-8").split("<metadata>", 1)
        path.write_text(f"{start}{mark(shown)}\n <metadata>{rest}", encoding="utf-8")
