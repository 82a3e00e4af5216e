"""Photos in pairs: an image, and beside it what a model makes of its parts."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.inspection.draw.canvas import (
    describe,
    join_tiles,
    limit_aspect,
    make_gaps_transparent,
    name_figure,
    shorten_text,
    show_picture,
)
from vitrail.inspection.findings import Array, ShownImage
from vitrail.system.figures import FAINT, INK, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GUESSES = 3
SIDE = 256
"""Pixels: smaller images are enlarged to it, so that a map over them is smooth."""


def draw_pairs(
    images: Sequence[ShownImage],
    pairs: Sequence[NDArray[np.floating[Any]]],
    path: Path,
    title: tuple[str, str],
    caption: str,
    guesses: bool = True,
) -> None:
    """Draw pairs in two to four columns, with names above, and guesses below if wanted.

    Args:
        images: the images behind the pairs.
        pairs: from `join_pair`.
        path: the .png to write.
        title: what the figure shows, and the model's name.
        caption: a sentence below everything.
        guesses: whether the model's guesses stand below each pair.
    """
    across = min(len(pairs), 2 if len(pairs) <= 2 else 3 if len(pairs) <= 6 else 4)
    down = -(-len(pairs) // across)
    width = 11 if across > 1 else 6
    each = (width / across - 0.25) * pairs[0].shape[0] / pairs[0].shape[1]
    with new_figure(path, width, (each + (0.95 if guesses else 0.4)) * down + 0.6) as figure:
        places = np.atleast_1d(figure.subplots(down, across)).ravel()
        letters = int(12 * width / across) - 8
        for axes, image, pair in itertools.zip_longest(places, images[: len(pairs)], pairs):
            axes.set_axis_off()
            if pair is not None:
                show_picture(axes, pair)
                describe(axes, shorten_text(image.name, letters), size=8.5)
                if guesses:
                    _draw_guesses(axes, image, letters)
        caption = textwrap.fill(caption, int(13 * width))
        figure.supxlabel(caption, fontsize=8.5, color=FAINT, x=0.012, ha="left", parse_math=False)
        name_figure(figure, *title)


def enlarge_photo(image: ShownImage) -> Array:
    """Return the pixels of an image from 0 to 1, (height, width, 3), enlarged if small, compressed if too long."""
    height, width = image.pixels.shape[:2]
    times, stretch = -(-SIDE // max(height, width)), limit_aspect(height, width) * width / height
    down, across = round(times * max(stretch, 1)), round(times * max(1 / stretch, 1))
    photo = np.kron(image.pixels, np.ones((down, across, 1), np.uint8)) / 255
    return np.broadcast_to(photo, (*photo.shape[:2], 3))


def join_pair(photo: Array, other: Array) -> NDArray[np.floating[Any]]:
    """Return two pictures of the same size, (height, width, 3), side by side: (height, 2 widths and a gap, 4)."""
    return make_gaps_transparent(join_tiles(np.stack([photo, other])[None], max(2, photo.shape[1] // 40)))


def _draw_guesses(axes: Axes, image: ShownImage, letters: int) -> None:
    """Write the best guesses below an image."""
    found = [(label, f"{share:.1%}") for label, share in image.guesses]
    found = found or [(line.name, line.text) for line in image.answer]
    lines = [f"{shorten_text(label, letters, end=True)}  {text}" for label, text in found[:GUESSES]]
    for text, colour, below in (("\n".join(lines[:1]), INK, 4), ("\n".join(lines[1:]), FAINT, 15)):
        axes.annotate(text, (0, 0), (0, -below), xycoords="axes fraction", textcoords="offset points", va="top",
                      color=colour, fontsize=8.5, parse_math=False)  # fmt: skip
