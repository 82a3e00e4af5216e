"""The building blocks of the figures: pictures, maps with colour bars, ticks, titles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.source import make_printable
from vitrail.inspection.findings import Array
from vitrail.system.figures import FAINT, LETTERS_PER_INCH, set_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MOST_TICKS = 24
NARROW = 3.8
"""Width in inches of a figure that fits a phone."""
OVERLAY = 0.35
"""Opacity of a map over a photo: the photo stays recognisable."""
ON_DARK, ON_LIGHT = "#FEFEFE", "#111111"
"""Colours of marks and numbers on pictures. A page in dark mode changes all other colours, but not these."""
SIMILARITY = "viridis"
"""The colour map of similarities."""
TALLEST, WIDEST = 2.0, 3.0
"""The largest height over width, and width over height, of a drawn picture; longer ones are compressed."""
INCHES_PER_LETTER = 0.063
"""Width of a letter in the label of a colour bar."""
FEW_PIXELS = 200
"""Pictures with a smaller side go into an SVG unchanged."""


def join_tiles(tiles: Array, gap: int) -> Array:
    """Join tiles, (down, across, height, width, …), into one picture (height, width, …) with gaps of NaN."""
    down, across, height, width, *rest = tiles.shape
    wider = np.full((down, across, height + gap, width + gap, *rest), np.nan)
    wider[:, :, :height, :width] = tiles
    joined = wider.swapaxes(1, 2).reshape(down * (height + gap), across * (width + gap), *rest)
    return joined[:-gap, :-gap]


def make_gaps_transparent(picture: Array) -> Array:
    """Add an alpha channel, (…, 3) → (…, 4), that is 0 where the picture is NaN: gaps take the page's colour."""
    there = ~np.isnan(picture).any(axis=2, keepdims=True)
    return np.concatenate([np.where(there, picture, 1), there], axis=2).clip(0, 1)


def limit_aspect(height: float, width: float) -> float:
    """Return height over width, limited so that nothing is drawn too narrow or too tall."""
    return min(max(height / width, 1 / WIDEST), TALLEST)


def show_picture(axes: Axes, picture: NDArray[Any], aspect: float = 1) -> Axes:
    """Show a picture without axes. Small pictures stay sharp in an SVG. `aspect` is height over width of a pixel."""
    axes.imshow(picture, interpolation="none" if max(picture.shape) < FEW_PIXELS else None, aspect=aspect)
    axes.set_axis_off()
    return axes


def add_bar(
    axes: Axes, image: AxesImage, label: str, inches: tuple[float, float], ticks: list[float] | None = None
) -> None:
    """Add a colour bar to a map; `inches` are the map's height and width. A label that is too long is left out."""
    height, width = inches
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((1 + 0.1 / width, 0, 0.16 / width, 1)), ticks=ticks)
    bar.outline.set_visible(False)
    bar.set_label(label if len(label) * INCHES_PER_LETTER < height else "", fontsize=9)
    bar.ax.tick_params(labelsize=8.5)


def leave_space_below(figure: Figure, inches: float) -> None:
    """Keep the lowest `inches` of a figure free of axes."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    engine, share = figure.get_layout_engine(), inches / figure.get_figheight()
    assert isinstance(engine, ConstrainedLayoutEngine)  # what `new_figure` sets
    engine.set(rect=(0, share, 1, 1 - share))


def show_map(axes: Axes, values: Array, colours: str, low: float, **options: Any) -> AxesImage:
    """Show values from `low` to 1 in colours, as squares that stay sharp in an SVG."""
    image = axes.imshow(values, cmap=colours, vmin=low, vmax=1, **{"interpolation": "none", **options})
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return image


def set_ticks(
    axis: Axis, labels: Sequence[str], at: Sequence[float] | None = None, turned: bool = False, most: int = MOST_TICKS
) -> None:
    """Set at most `most` labels, evenly spread and with the first."""
    step = -(-len(labels) // most)
    places = range(len(labels)) if at is None else at
    axis.set_ticks(places[::step], [make_printable(label) for label in labels[::step]])
    for text in axis.get_ticklabels():
        text.set(parse_math=False, fontsize=8.5)
        if turned:
            text.set(rotation=50, ha="right", rotation_mode="anchor")


def describe(axes: Axes, words: str, size: float = 9.5) -> None:
    """Write a grey line above a part of a figure."""
    axes.set_title(words, fontsize=size, color=FAINT, parse_math=False)


def name_figure(figure: Figure, what: str, name: str) -> None:
    """Set the title: what the figure shows and the model's name, of which the end is kept if it is too long."""
    room = int(figure.get_figwidth() * LETTERS_PER_INCH) - len(what) - 4
    what = make_printable(what[:1].upper() + what[1:])
    set_title(figure, f"{what}: {shorten_text(name, max(room, 8))}" if name else what)


def shorten_text(words: str, most: int, end: bool = False) -> str:
    """Return text on one line, without its beginning (or its end) if it is longer than `most` letters."""
    words = make_printable(words)
    if len(words) <= most:
        return words
    return f"{words[: most - 1]}…" if end else f"…{words[1 - most :]}"
