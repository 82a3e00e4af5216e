"""Draw findings in the manner of the paper's Figures 6, 7 and 14, each as PNG and SVG."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from vitrail.data.sources.source import make_printable
from vitrail.inspection.draw.canvas import (
    MOST_TICKS,
    NARROW,
    OVERLAY,
    SIMILARITY,
    add_bar,
    describe,
    join_tiles,
    limit_aspect,
    make_gaps_transparent,
    name_figure,
    set_ticks,
    shorten_text,
    show_map,
    show_picture,
)
from vitrail.inspection.draw.charts import draw_distance, draw_layers, find_uniform
from vitrail.inspection.draw.pairs import draw_pairs, enlarge_photo, join_pair
from vitrail.inspection.draw.patches import draw_components, draw_tokens
from vitrail.inspection.findings import (
    Absent,
    Array,
    Attention,
    Components,
    Distance,
    Filters,
    Findings,
    Layers,
    Positions,
    ShownImage,
    Tokens,
)
from vitrail.system.figures import new_figure
from vitrail.training.curves import draw_curves

if TYPE_CHECKING:
    pass

ACROSS = 7
"""Filters in a row: 28 are a grid of 4×7, as in the paper."""
MOST_SMALL_MAPS, THINNED_FROM = 14, 16
"""A grid with a side longer than the second number is thinned to about the first number of maps a side."""
MOST_IMAGES = 8
"""Images in the figures of rollouts and of components."""
LONGEST = 4
"""How many times as long as wide the picture of all position embeddings may be; else the shorter side is stretched."""
LEAST_SIDE, MOST_SIDE = 24, 700
"""Pixels: smaller maps of positions are enlarged to the first; a picture of all of them goes into an SVG unchanged up
to the second."""
HEAT, AROUND_ZERO = "inferno", "RdBu_r"
"""Colour maps."""


def draw_findings(findings: Findings, folder: Path, top: float | None = None, narrow: bool = False) -> dict[str, Path]:
    """Draw all figures of a model into a folder.

    Args:
        findings: what was measured; absent parts have no figure.
        folder: created if it does not exist.
        top: the end of the distance axis, in pixels, so that several models can be compared.
        narrow: draw for the width of a phone, as SVG alone, and leave out what an instrument shows.

    Returns:
        The .png path of each figure by its name. An .svg lies beside each. Of narrow figures the .svg path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name, images = findings.name, findings.images
    paths: dict[str, Path] = {}

    def path(figure: str) -> Path:
        return paths.setdefault(figure, folder / f"{figure}.{'svg' if narrow else 'png'}")

    if not isinstance(findings.filters, Absent):
        for number, filters in enumerate(findings.filters, start=1):
            _draw_filters(filters, path(f"filters-{number}"), name, narrow)
    if isinstance(findings.positions, Positions):
        _draw_positions(findings.positions, path("positions"), name, narrow)
    if isinstance(findings.distance, Distance):
        draw_distance(findings.distance, path("distance"), name, find_uniform(findings), top, narrow)
    if isinstance(findings.attention, Attention) and images and not narrow:
        _draw_rollout(findings.attention, images[:MOST_IMAGES], path("rollout"), name)
    if isinstance(findings.components, Components) and images and not narrow:
        draw_components(findings.components, images[:MOST_IMAGES], path("components"), name)
    if isinstance(findings.tokens, Tokens) and images and not narrow:
        draw_tokens(findings.tokens, images, path("tokens"), name)
    if isinstance(findings.layers, Layers):
        draw_layers(findings.layers, path("layers"), name, narrow=narrow)
    curves = folder / ("curves.svg" if narrow else "curves.png")
    if draw_curves(findings.records, curves, shorten_text(name, 80), narrow):
        paths["curves"] = curves
    return paths


def draw_between(layers: Layers, path: Path, across: str, down: str, narrow: bool = False) -> Path:
    """Draw how alike the layers of two models are and return the path; `down` and `across` are the models' names."""
    draw_layers(layers, path, "", across, down, narrow)
    return path


# Filters


def _draw_filters(filters: Filters, path: Path, name: str, narrow: bool) -> None:
    largest = np.abs(filters.components).max(axis=(1, 2, 3), keepdims=True)
    scaled = filters.components / np.where(largest > 0, largest, 1)
    count, height, width, channels = scaled.shape
    what = f"{count} principal components of the filters, {filters.explained.sum():.1%} of their variance"
    if channels not in (1, 3):
        return _draw_strip(scaled.reshape(count, height * width, channels), path, filters.of, name, what, narrow)
    down = -(-count // ACROSS)
    tiles = np.full((down * ACROSS, height, width, 3), np.nan)
    tiles[:count] = 0.5 + 0.5 * scaled  # zero is grey
    picture = join_tiles(tiles.reshape(down, ACROSS, height, width, 3), max(1, round(width / 8)))
    aspect = limit_aspect(height, width) * width / height
    inches = NARROW if narrow else 8
    tall = min((inches - 0.3) * aspect * picture.shape[0] / picture.shape[1], 9)
    with new_figure(path, inches, tall + (0.55 if narrow else 0.95)) as figure:
        axes = show_picture(figure.add_subplot(), make_gaps_transparent(picture), aspect)
        describe(axes, "" if narrow else what)
        name_figure(figure, filters.of, name)
    return None


def _draw_strip(strip: Array, path: Path, of: str, name: str, what: str, narrow: bool) -> None:
    """Draw components down and channels across, for filters whose channels are not colours."""
    height = min(max(0.7 + 0.1 * len(strip), 1), 7)
    with new_figure(path, NARROW if narrow else 8, height + 1) as figure:
        axes = figure.add_subplot()
        flat = strip.reshape(len(strip), -1)
        image = show_map(axes, flat, AROUND_ZERO, -1, aspect="auto")
        axes.set(xlabel="channel" if strip.shape[1] == 1 else "channel, place after place", ylabel="component")
        set_ticks(axes.yaxis, [str(number + 1) for number in range(len(strip))], most=6)
        add_bar(axes, image, "of the largest", (height, NARROW - 1 if narrow else 7), [-1, 0, 1])
        describe(axes, "" if narrow else what)
        name_figure(figure, of, name)


# Position embeddings


def _draw_positions(positions: Positions, path: Path, name: str, narrow: bool) -> None:
    rows, columns = positions.similarity.shape[:2]
    down, across = _choose_shown(rows), _choose_shown(columns)
    maps = positions.similarity[down][:, across]
    times = -(-LEAST_SIDE // max(rows, columns))  # small maps enlarged, so that the gaps are narrow
    gap = max(1, round(max(rows, columns) * times / 10))
    sides = maps.shape[0] * rows, maps.shape[1] * columns
    stretched = [math.ceil(times * max(1, max(sides) / (LONGEST * side))) for side in sides]
    maps = np.kron(maps, np.ones(stretched))
    height, width = maps.shape[2:]
    picture = join_tiles(maps, gap)
    most = NARROW - 1.4 if narrow else 6.2
    inches = max(min(most, 1 + 0.9 * max(maps.shape[:2])) / max(picture.shape), min(1.4, most) / min(picture.shape))
    tall, wide = (inches * side for side in picture.shape)
    across_all = NARROW if narrow else max(wide + 1.5, 4.6)
    with new_figure(path, across_all, tall + 1.3) as figure:
        axes = figure.add_subplot(anchor="W")
        smooth = {"interpolation": None} if max(picture.shape) > MOST_SIDE else {}
        image = show_map(axes, picture, SIMILARITY, -1, **smooth)
        axes.set(xlabel="column of the patch", ylabel="row of the patch")
        for axis, places, side in (
            (axes.xaxis, range(columns)[across], width),
            (axes.yaxis, range(rows)[down], height),
        ):
            middles = [(side + gap) * number + (side - 1) / 2 for number in range(len(places))]
            set_ticks(axis, [str(place + 1) for place in places], middles, most=8 if narrow else MOST_TICKS)
        add_bar(axes, image, "cosine similarity", (tall, wide), [-1, -0.5, 0, 0.5, 1])
        caption = f"{shorten_text(positions.kind, 30)}; each small map: one patch's similarity to every patch"
        describe(axes, textwrap.fill(caption, int(13 * across_all) - 14) + _describe_skipped(down.step, across.step))
        name_figure(figure, "Position embeddings", name)


def _choose_shown(side: int) -> slice:
    """Choose which rows or columns of a large grid are shown, the same distance from both ends."""
    step = 1 if side <= THINNED_FROM else -(-side // MOST_SMALL_MAPS)
    return slice((side - 1) % step // 2, None, step)


def _describe_skipped(down: int, across: int) -> str:
    words = {1: "every", 2: "every second", 3: "every third"}
    one, other = (words.get(step, f"every {step}th") for step in (down, across))
    if down == across:
        return "" if down == 1 else f";\n{one} row and column is shown"
    return f";\n{one} row and {other} column is shown"


# Rollout


def _draw_rollout(attention: Attention, images: Sequence[ShownImage], path: Path, name: str) -> None:
    pairs = [_join_heat(image, maps[-1]) for image, maps in zip(images, attention.rollout, strict=False)]
    reader = make_printable(attention.reads)
    caption = f"Right: what {reader} would gather from each patch after all layers, the most in yellow"
    draw_pairs(images, pairs, path, ("Attention rollout", name), caption)


def _join_heat(image: ShownImage, heat: Array) -> NDArray[np.floating[Any]]:
    """Return an image beside the same image under its map."""
    photo = enlarge_photo(image)
    return join_pair(photo, _overlay_heat(photo, heat))


def _overlay_heat(photo: Array, heat: Array) -> Array:
    """Lay the colours of a map, smoothly enlarged to its size, over a photo that stays recognisable."""
    from matplotlib import colormaps

    scaled = torch.from_numpy(np.asarray(heat, np.float64) / (np.nanmax(heat, initial=0) or 1.0))
    smooth = F.interpolate(scaled[None, None], photo.shape[:2], mode="bilinear")[0, 0].nan_to_num().numpy()
    mixed: Array = (1 - OVERLAY) * photo + OVERLAY * colormaps[HEAT](smooth)[..., :3]
    return mixed
