"""Draw what a model knows of each patch: its principal components as colours, and patches that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitrail.inspection.draw.canvas import (
    ON_DARK,
    SIMILARITY,
    add_bar,
    describe,
    leave_space_below,
    limit_aspect,
    name_figure,
    shorten_text,
    show_map,
    show_picture,
)
from vitrail.inspection.draw.pairs import draw_pairs, enlarge_photo, join_pair
from vitrail.inspection.findings import Array, Components, ShownImage, Tokens
from vitrail.system.figures import VERMILION, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = 3
RANGE = (1, 99)
"""Percentiles of a component, over all patches, that have the least and the most of a colour: a few patches that stand
out from all others would otherwise leave no colours to the rest."""
MOST_LAYERS, MOST_IMAGES = 4, 2
"""Layers and images in the figure of patches that are alike."""
HIGHEST = 12.0
"""Inches of this figure: tall images have fewer rows."""
MARKED = ((0.5, 0.5), (0.25, 0.25), (0.75, 0.75))
"""The patches that this figure marks, in shares of the image: down and across."""


def colour_components(values: Array) -> NDArray[np.uint8]:
    """Return colours, (images, rows, columns, 3) uint8, of components (images, rows, columns, components).

    The first component is red, the second green, the third blue, on one scale for all images. A component that all
    patches share is half of its colour everywhere.
    """
    chosen = values[..., :COLOURS]
    low, high = np.percentile(chosen, RANGE, axis=(0, 1, 2))
    span = np.where(high > low, high - low, 1)
    scaled = np.where(high > low, (chosen - low) / span, 0.5)
    colours = np.full((*values.shape[:3], COLOURS), 0.5)
    colours[..., : scaled.shape[-1]] = scaled
    painted: NDArray[np.uint8] = np.rint(255 * colours.clip(0, 1)).astype(np.uint8)
    return painted


def draw_components(components: Components, images: Sequence[ShownImage], path: Path, name: str) -> None:
    """Draw each image beside the colours of its patches."""
    pairs = []
    for image, colours in zip(images, colour_components(components.values), strict=False):
        photo = enlarge_photo(image)
        pairs.append(join_pair(photo, _cover(colours, photo.shape[:2]) / 255))
    caption = "Right: red, green and blue are the first three principal components, over the patches of all images"
    draw_pairs(images, pairs, path, ("Features of patches", name), caption, guesses=False)


def _cover(colours: NDArray[np.uint8], size: tuple[int, ...]) -> NDArray[np.uint8]:
    """Enlarge a picture with a pixel for each patch to a size, without smoothing."""
    rows, columns = (np.arange(side) * count // side for side, count in zip(size, colours.shape, strict=False))
    return np.asarray(colours[rows][:, columns])


def draw_tokens(tokens: Tokens, images: Sequence[ShownImage], path: Path, name: str) -> None:
    """Draw how similar three patches of each of two images are to all others: a row for each, a column for a layer."""
    images = images[:MOST_IMAGES]
    count = len(tokens.layers)
    chosen = np.linspace(0, count - 1, min(count, MOST_LAYERS)).round().astype(int).tolist()
    finest = max((tokens.similarity[layer].shape[1:3] for layer in chosen), key=lambda grid: grid[0] * grid[1])
    marked = list({_find_patch(place, finest): place for place in MARKED}.values())  # a small grid has fewer
    rows = [(number, place) for number in range(len(images)) for place in marked]
    height, width = images[0].pixels.shape[:2]
    side, letters, above = 1.75, 20, 0.75
    tall = 0.9 * side * limit_aspect(height, width)
    rows = rows[: int((HIGHEST - above) / (tall + 0.25))]
    maps = [[_select_map(tokens.similarity[layer][number], place) for layer in chosen] for number, place in rows]
    lowest = np.floor(10 * min(float(np.nanmin(each, initial=0.9)) for row in maps for each in row)) / 10
    aspect = limit_aspect(height, width) * width / height
    with new_figure(path, side * (len(chosen) + 1) + 1.1, (tall + 0.25) * len(rows) + above) as figure:
        places = figure.subplots(len(rows), len(chosen) + 1, squeeze=False)
        for row, (number, place) in enumerate(rows):
            image = images[number]
            photo = show_picture(places[row, 0], np.broadcast_to(image.pixels, (*image.pixels.shape[:2], 3)), aspect)
            describe(photo, shorten_text(image.name, letters) if place == marked[0] else "", size=8.5)
            _mark_patch(photo, image, place, maps[row][0].shape)
            for axes, layer, each in zip(places[row, 1:], chosen, maps[row], strict=True):
                extent = photo.images[0].get_extent()
                drawn_map = show_map(axes, each, SIMILARITY, lowest, extent=extent, aspect=aspect)
                axes.set_axis_off()
                _mark_patch(axes, image, place, each.shape)
                describe(axes, shorten_text(tokens.layers[layer], letters) if row == 0 else "", size=8.5)
            add_bar(axes, drawn_map, "cosine similarity", (tall, side))
        name_figure(figure, "Patches like the marked one", name)
        leave_space_below(figure, 0.08)  # the lowest number of a bar reaches below its map


def _find_patch(place: tuple[float, float], grid: Sequence[int]) -> tuple[int, int]:
    """Return row and column of the patch at a place of the image, which is given in shares of it."""
    return int(place[0] * grid[0]), int(place[1] * grid[1])


def _select_map(similarity: Array, place: tuple[float, float]) -> Array:
    """Return the map of the patch at a place: (rows, columns, rows, columns) → (rows, columns)."""
    return np.asarray(similarity[_find_patch(place, similarity.shape)])


def _mark_patch(axes: Axes, image: ShownImage, place: tuple[float, float], grid: tuple[int, ...]) -> None:
    """Draw a frame around the patch at a place of an image that a grid lies over."""
    from matplotlib.patches import Rectangle

    height, width = (side / places for side, places in zip(image.pixels.shape, grid, strict=False))
    row, column = _find_patch(place, grid)
    corner = (column * width - 0.5, row * height - 0.5)
    for colour, line in ((ON_DARK, 2.8), (VERMILION, 1.4)):  # seen on anything
        axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=colour, linewidth=line))
