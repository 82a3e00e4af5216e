"""What the figures of this room are put together from: pictures, maps with their bars, ticks, words."""

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
TALLEST, WIDEST = 2.0, 3.0
"""How many times as high as wide, or as wide as high, something is drawn; what is longer still is pressed together."""
INCHES_PER_LETTER = 0.063
"""Of the label of a bar."""
FEW_PIXELS = 200
"""Of a picture that is put into an SVG as it is."""


def mosaic(tiles: Array, gap: int) -> Array:
    """(down, across, height, width, …) → one picture (height, width, …), with gaps of what is not a number."""
    down, across, height, width, *rest = tiles.shape
    wider = np.full((down, across, height + gap, width + gap, *rest), np.nan)
    wider[:, :, :height, :width] = tiles
    joined = wider.swapaxes(1, 2).reshape(down * (height + gap), across * (width + gap), *rest)
    return joined[:-gap, :-gap]


def with_gaps(picture: Array) -> Array:
    """(…, 3) → (…, 4): nothing where it is not a number, so that gaps have the colour of the page."""
    there = ~np.isnan(picture).any(axis=2, keepdims=True)
    return np.concatenate([np.where(there, picture, 1), there], axis=2).clip(0, 1)


def seen_shape(height: float, width: float) -> float:
    """Height over width to draw something with: its own, unless it would be a hairline or a tower."""
    return min(max(height / width, 1 / WIDEST), TALLEST)


def show_picture(axes: Axes, picture: NDArray[Any], aspect: float = 1) -> Axes:
    """Pixels as they are where they are few, so that an SVG is sharp; else as many as can be seen.

    `aspect`: how many times as high as wide each is.
    """
    axes.imshow(picture, interpolation="none" if max(picture.shape) < FEW_PIXELS else None, aspect=aspect)
    axes.set_axis_off()
    return axes


def add_bar(
    axes: Axes, image: AxesImage, label: str, inches: tuple[float, float], ticks: list[float] | None = None
) -> None:
    """What its colours mean, beside a map of so many inches up and across; in words if they are no longer than it."""
    height, width = inches
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((1 + 0.1 / width, 0, 0.16 / width, 1)), ticks=ticks)
    bar.outline.set_visible(False)
    bar.set_label(label if len(label) * INCHES_PER_LETTER < height else "", fontsize=9)
    bar.ax.tick_params(labelsize=8.5)


def show_map(axes: Axes, values: Array, colours: str, low: float, **options: Any) -> AxesImage:
    """Values from `low` to 1 in colours, as squares that stay sharp in an SVG."""
    image = axes.imshow(values, cmap=colours, vmin=low, vmax=1, **{"interpolation": "none", **options})
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return image


def set_ticks(
    axis: Axis, labels: Sequence[str], at: Sequence[float] | None = None, turned: bool = False, most: int = MOST_TICKS
) -> None:
    """As many labels as there is room for, the first among them."""
    step = -(-len(labels) // most)
    places = range(len(labels)) if at is None else at
    axis.set_ticks(places[::step], [make_printable(label) for label in labels[::step]])
    for text in axis.get_ticklabels():
        text.set(parse_math=False, fontsize=8.5)
        if turned:
            text.set(rotation=50, ha="right", rotation_mode="anchor")


def describe(axes: Axes, words: str, size: float = 9.5) -> None:
    """A quiet line above a part of a figure."""
    axes.set_title(words, fontsize=size, color=FAINT, parse_math=False)


def name_figure(figure: Figure, what: str, name: str) -> None:
    """What is shown, and of which model; of a name that is too long, the end tells most."""
    room = int(figure.get_figwidth() * LETTERS_PER_INCH) - len(what) - 4
    what = make_printable(what[:1].upper() + what[1:])
    set_title(figure, f"{what}: {cut(name, max(room, 8))}" if name else what)


def cut(words: str, most: int, end: bool = False) -> str:
    """On one line; where it is too long, without its beginning, or its end."""
    words = make_printable(words)
    if len(words) <= most:
        return words
    return f"{words[: most - 1]}…" if end else f"…{words[1 - most :]}"
