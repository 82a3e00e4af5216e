"""Draw findings in the manner of the paper's Figures 6, 7 and 14, each as PNG and SVG."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from vitrail.config import show_size
from vitrail.data.sources.source import make_printable
from vitrail.inspection.draw.canvas import (
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
from vitrail.inspection.findings import (
    Absent,
    Array,
    Attention,
    Distance,
    Filters,
    Findings,
    Layers,
    Positions,
    ShownImage,
    Tokens,
)
from vitrail.system.figures import BLUE, FAINT, INK, VERMILION, new_figure
from vitrail.training.curves import draw_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACROSS = 7
"""Filters in a row: 28 are a grid of 4×7, as in the paper."""
MOST_SMALL_MAPS, THINNED_FROM = 14, 16
"""A grid with a side longer than the second number is thinned to about the first number of maps a side."""
MOST_IMAGES, MOST_LAYERS, MOST_CHOSEN = 8, 4, 2
"""Images in the figure of rollouts; layers and images in the figure of tokens."""
NUMBERED = 12
"""A similarity map of at most so many layers shows its numbers."""
LONGEST = 4
"""How many times as long as wide the picture of all position embeddings may be; else the shorter side is stretched."""
GUESSES = 3
SIDE, LEAST_SIDE, MOST_SIDE = 256, 24, 700
"""Pixels: smaller images are enlarged to the first, so that a map over them is smooth; small maps of positions to the
second; a picture of all these maps goes into an SVG unchanged up to the third."""
SIMILARITY, HEAT, ALIKE, AROUND_ZERO = "viridis", "inferno", "magma", "RdBu_r"
"""Colour maps."""
ON_DARK, ON_LIGHT = "#FEFEFE", "#111111"
"""Colours of numbers on a colour map. A page in dark mode changes all other colours, but not these."""


def draw_findings(findings: Findings, folder: Path, top: float | None = None) -> dict[str, Path]:
    """Draw all figures of a model into a folder.

    Args:
        findings: what was measured; absent parts have no figure.
        folder: created if it does not exist.
        top: the end of the distance axis, in pixels, so that several models can be compared.

    Returns:
        The .png path of each figure by its name. An .svg lies beside each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name, images = findings.name, findings.images
    paths: dict[str, Path] = {}

    def path(figure: str) -> Path:
        return paths.setdefault(figure, folder / f"{figure}.png")

    if not isinstance(findings.filters, Absent):
        for number, filters in enumerate(findings.filters, start=1):
            _draw_filters(filters, path(f"filters-{number}"), name)
    if isinstance(findings.positions, Positions):
        _draw_positions(findings.positions, path("positions"), name)
    if isinstance(findings.distance, Distance):
        _draw_distance(findings.distance, path("distance"), name, _find_uniform(findings), top)
    if isinstance(findings.attention, Attention) and images:
        _draw_rollout(findings.attention, images[:MOST_IMAGES], path("rollout"), name)
    if isinstance(findings.tokens, Tokens) and images:
        _draw_tokens(findings.tokens, images[:MOST_CHOSEN], path("tokens"), name)
    if isinstance(findings.layers, Layers):
        _draw_layers(findings.layers, path("layers"), name)
    if draw_curves(findings.records, folder / "curves.png", shorten_text(name, 80)):
        path("curves")
    return paths


def draw_between(layers: Layers, path: Path, across: str, down: str) -> Path:
    """Draw how alike the layers of two models are and return the path; `down` and `across` are the models' names."""
    _draw_layers(layers, path, "", across, down)
    return path


# Filters


def _draw_filters(filters: Filters, path: Path, name: str) -> None:
    largest = np.abs(filters.components).max(axis=(1, 2, 3), keepdims=True)
    scaled = filters.components / np.where(largest > 0, largest, 1)
    count, height, width, channels = scaled.shape
    what = f"{count} principal components of the filters, {filters.explained.sum():.1%} of their variance"
    if channels not in (1, 3):
        return _draw_strip(scaled.reshape(count, height * width, channels), path, filters.of, name, what)
    down = -(-count // ACROSS)
    tiles = np.full((down * ACROSS, height, width, 3), np.nan)
    tiles[:count] = 0.5 + 0.5 * scaled  # zero is grey
    picture = join_tiles(tiles.reshape(down, ACROSS, height, width, 3), max(1, round(width / 8)))
    aspect = limit_aspect(height, width) * width / height
    with new_figure(path, 8, min(7.7 * aspect * picture.shape[0] / picture.shape[1], 9) + 0.95) as figure:
        axes = show_picture(figure.add_subplot(), make_gaps_transparent(picture), aspect)
        describe(axes, what)
        name_figure(figure, filters.of, name)
    return None


def _draw_strip(strip: Array, path: Path, of: str, name: str, what: str) -> None:
    """Draw components down and channels across, for filters whose channels are not colours."""
    height = min(max(0.7 + 0.1 * len(strip), 1), 7)
    with new_figure(path, 8, height + 1) as figure:
        axes = figure.add_subplot()
        flat = strip.reshape(len(strip), -1)
        image = show_map(axes, flat, AROUND_ZERO, -1, aspect="auto")
        axes.set(xlabel="channel" if strip.shape[1] == 1 else "channel, place after place", ylabel="component")
        set_ticks(axes.yaxis, [str(number + 1) for number in range(len(strip))], most=6)
        add_bar(axes, image, "of the largest", (height, 7), [-1, 0, 1])
        describe(axes, what)
        name_figure(figure, of, name)


# Position embeddings


def _draw_positions(positions: Positions, path: Path, name: str) -> None:
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
    inches = max(min(6.2, 1 + 0.9 * max(maps.shape[:2])) / max(picture.shape), 1.4 / min(picture.shape))
    tall, wide = (inches * side for side in picture.shape)
    across_all = max(wide + 1.5, 4.6)
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
            set_ticks(axis, [str(place + 1) for place in places], middles)
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


# Attention distance


def find_farthest(findings: Findings) -> float:
    """Return the largest distance to draw, in pixels, uniform attention included; 0 if there is none.

    The largest of several models is the `top` of `draw_findings` for all of them.
    """
    if not isinstance(findings.distance, Distance):
        return 0.0
    pixels = findings.distance.pixels
    return max(float(pixels[np.isfinite(pixels)].max(initial=0)), _find_uniform(findings) or 0.0)


def _draw_distance(distance: Distance, path: Path, name: str, uniform: float | None, top: float | None) -> None:
    pixels = np.where(np.isfinite(distance.pixels), distance.pixels, np.nan)
    layers, heads = pixels.shape
    numbers = list(range(1, layers + 1))
    apart = np.linspace(-0.16, 0.16, heads) if heads > 1 else np.zeros(1)
    counts = np.isfinite(pixels).sum(axis=1)
    means = np.where(counts > 0, np.nansum(pixels, axis=1) / np.maximum(counts, 1), np.nan)
    if top is None or not (np.isfinite(top) and top > 0):
        top = 1.06 * max(float(np.nanmax(pixels, initial=0)), uniform or 0.0) or 1.0
    with new_figure(path, 7.5, 4.8) as figure:
        axes = figure.add_subplot()
        if uniform is not None and uniform <= top:
            axes.axhline(uniform, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), label="uniform attention")
        axes.plot(numbers, means, color=VERMILION, linewidth=1.6, label="mean of the heads", zorder=3,
                  marker="_" if layers == 1 else None, markersize=24)  # fmt: skip
        where = np.add.outer(numbers, apart).ravel()
        axes.scatter(where, pixels.ravel(), 26, BLUE, alpha=0.6, linewidths=0, label="a head", zorder=4)
        axes.set_ylim(0, top)
        axes.set_xlim(0.4, layers + 0.6)
        axes.set(xlabel="layer", ylabel=f"pixels of {show_size(distance.image_size)}")
        axes.grid(False, axis="x")
        set_ticks(axes.xaxis, distance.layers, at=numbers, turned=not _has_plain_numbers(distance))
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="lower left", bbox_to_anchor=(-0.012, 1.0), ncols=3,
                    borderaxespad=0.2, handlelength=1.6, columnspacing=1.6)  # fmt: skip
        name_figure(figure, "Mean attention distance", name)


def _has_plain_numbers(distance: Distance) -> bool:
    """Return whether each layer attends over the whole image. Layers over rows or columns have names, not numbers."""
    return all(layer.isdecimal() for layer in distance.layers)


def _find_uniform(findings: Findings) -> float | None:
    """Return the distance of uniform attention, if it is known."""
    distance, grid = findings.distance, _find_grid(findings)
    if grid is None or not isinstance(distance, Distance) or not _has_plain_numbers(distance):
        return None
    return _compute_uniform_distance(distance.image_size, grid)


def _compute_uniform_distance(image_size: tuple[int, int], grid: tuple[int, int]) -> float:
    """Return the mean distance over all pairs of patches, in pixels: the distance of uniform attention."""
    offsets = [np.arange(places) * (side / places) for places, side in zip(grid, image_size, strict=True)]
    shares = [np.where(np.arange(n) > 0, 2, 1) * np.arange(n, 0, -1) / n**2 for n in grid]
    return float(shares[0] @ np.hypot(offsets[0][:, None], offsets[1]) @ shares[1])


def _find_grid(findings: Findings) -> tuple[int, int] | None:
    """Return rows and columns of the patches, if a finding has them."""
    if isinstance(findings.attention, Attention):
        rows, columns = findings.attention.rollout.shape[2:]
    elif isinstance(findings.positions, Positions):
        rows, columns = findings.positions.similarity.shape[:2]
    else:
        return None
    return int(rows), int(columns)


# Rollout


def _draw_rollout(attention: Attention, images: Sequence[ShownImage], path: Path, name: str) -> None:
    pairs = [_join_pair(image, maps[-1]) for image, maps in zip(images, attention.rollout, strict=False)]
    across = min(len(pairs), 2 if len(pairs) <= 2 else 3 if len(pairs) <= 6 else 4)
    down = -(-len(pairs) // across)
    width = 11 if across > 1 else 6
    each = (width / across - 0.25) * pairs[0].shape[0] / pairs[0].shape[1]
    with new_figure(path, width, (each + 0.95) * down + 0.6) as figure:
        places = np.atleast_1d(figure.subplots(down, across)).ravel()
        letters = int(12 * width / across) - 8
        for axes, image, pair in itertools.zip_longest(places, images[: len(pairs)], pairs):
            axes.set_axis_off()
            if pair is not None:
                show_picture(axes, pair)
                describe(axes, shorten_text(image.name, letters), size=8.5)
                _draw_guesses(axes, image, letters)
        reader = make_printable(attention.reads)
        caption = f"Right: what {reader} would gather from each patch after all layers, the most in yellow"
        caption = textwrap.fill(caption, int(13 * width))
        figure.supxlabel(caption, fontsize=8.5, color=FAINT, x=0.012, ha="left", parse_math=False)
        name_figure(figure, "Attention rollout", name)


def _join_pair(image: ShownImage, heat: Array) -> NDArray[np.floating[Any]]:
    """Return an image beside the same image under its map: (height, 2 widths and a gap, 4)."""
    height, width = image.pixels.shape[:2]
    times, stretch = -(-SIDE // max(height, width)), limit_aspect(height, width) * width / height
    down, across = round(times * max(stretch, 1)), round(times * max(1 / stretch, 1))
    photo = np.kron(image.pixels, np.ones((down, across, 1), np.uint8)) / 255
    photo = np.broadcast_to(photo, (*photo.shape[:2], 3))
    return make_gaps_transparent(
        join_tiles(np.stack([photo, _overlay_heat(photo, heat)])[None], max(2, photo.shape[1] // 40))
    )


def _overlay_heat(photo: Array, heat: Array) -> Array:
    """Mix a grey photo with the colours of a map that is smoothly enlarged to its size."""
    from matplotlib import colormaps

    scaled = torch.from_numpy(np.asarray(heat, np.float64) / (np.nanmax(heat, initial=0) or 1.0))
    smooth = F.interpolate(scaled[None, None], photo.shape[:2], mode="bilinear")[0, 0].nan_to_num().numpy()
    grey = np.repeat(photo.mean(axis=2, keepdims=True), 3, axis=2)
    strength = 0.5 + 0.3 * smooth[..., None]
    mixed: Array = (1 - strength) * grey + strength * colormaps[HEAT](smooth)[..., :3]
    return mixed


def _draw_guesses(axes: Axes, image: ShownImage, letters: int) -> None:
    """Write the best guesses below an image."""
    lines = [f"{shorten_text(label, letters, end=True)}  {share:.1%}" for label, share in image.guesses[:GUESSES]]
    for text, colour, below in (("\n".join(lines[:1]), INK, 4), ("\n".join(lines[1:]), FAINT, 15)):
        axes.annotate(text, (0, 0), (0, -below), xycoords="axes fraction", textcoords="offset points", va="top",
                      color=colour, fontsize=8.5, parse_math=False)  # fmt: skip


# Tokens


def _draw_tokens(tokens: Tokens, images: Sequence[ShownImage], path: Path, name: str) -> None:
    count = len(tokens.layers)
    chosen = np.linspace(0, count - 1, min(count, MOST_LAYERS)).round().astype(int).tolist()
    maps = [[_select_centre(tokens.similarity[layer][row]) for layer in chosen] for row in range(len(images))]
    lowest = np.floor(10 * min(float(np.nanmin(each, initial=0.9)) for row in maps for each in row)) / 10
    height, width = images[0].pixels.shape[:2]
    side, letters = 1.85, 22
    tall = 0.9 * side * limit_aspect(height, width)
    aspect = limit_aspect(height, width) * width / height
    with new_figure(path, side * (len(chosen) + 1) + 1.1, (tall + 0.35) * len(images) + 0.65) as figure:
        places = figure.subplots(len(images), len(chosen) + 1, squeeze=False)
        for row, image in enumerate(images):
            photo = show_picture(places[row, 0], np.broadcast_to(image.pixels, (*image.pixels.shape[:2], 3)), aspect)
            describe(photo, shorten_text(image.name, letters), size=8.5)
            _mark(photo, image, maps[row][0].shape)
            for axes, layer, each in zip(places[row, 1:], chosen, maps[row], strict=True):
                extent = photo.images[0].get_extent()
                drawn_map = show_map(axes, each, SIMILARITY, lowest, extent=extent, aspect=aspect)
                axes.set_axis_off()
                _mark(axes, image, each.shape)
                describe(axes, shorten_text(tokens.layers[layer], letters) if row == 0 else "", size=8.5)
            add_bar(axes, drawn_map, "cosine similarity", (tall, side))
        name_figure(figure, "Patches like the marked one", name)


def _select_centre(similarity: Array) -> Array:
    rows, columns, *_ = similarity.shape
    return np.asarray(similarity[rows // 2, columns // 2])


def _mark(axes: Axes, image: ShownImage, grid: tuple[int, ...]) -> None:
    """A frame around the patch in the middle of a grid that lies over an image."""
    from matplotlib.patches import Rectangle

    height, width = (side / places for side, places in zip(image.pixels.shape, grid, strict=False))
    corner = (grid[1] // 2 * width - 0.5, grid[0] // 2 * height - 0.5)
    for colour, line in ((ON_DARK, 2.8), (VERMILION, 1.4)):  # seen on anything
        axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=colour, linewidth=line))


# Layers


def _draw_layers(layers: Layers, path: Path, name: str, across: str = "", down: str = "") -> None:
    """Draw the first layer at the bottom left; `across` and `down` are the names of two models, if there are two."""
    rows, columns = layers.cka.shape
    longer = max(rows, columns)
    width, height = (min(4.6, 1.4 + 0.6 * longer) * max(side / longer, 0.6) for side in (columns, rows))
    with new_figure(path, width + 1.9, height + 1.5) as figure:
        axes = figure.add_subplot()
        image = show_map(axes, layers.cka, ALIKE, 0, origin="lower", aspect="auto")
        for axis, names, model in ((axes.xaxis, layers.others, across), (axes.yaxis, layers.names, down)):
            kind, short = _split_shared_word(names)
            set_ticks(axis, short, turned=not kind and axis is axes.xaxis)
            axis.set_label_text(f"{kind or 'layer'} of {shorten_text(model, 30)}" if model else kind, parse_math=False)
        if longer <= NUMBERED:
            for row, column in np.argwhere(np.isfinite(layers.cka)).tolist():
                value = layers.cka[row, column]
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8 if longer > 8 else 9,
                          color=ON_DARK if value < 0.65 else ON_LIGHT)  # fmt: skip
        add_bar(axes, image, "linear CKA", (height, width), [0, 0.25, 0.5, 0.75, 1])
        name_figure(figure, "Layers alike", name)


def _split_shared_word(names: Sequence[str]) -> tuple[str, list[str]]:
    """Split "block 1", "block 2", … into "block" and ["1", "2", …]; other names stay whole, and the word is ""."""
    words = {name.rpartition(" ")[0] for name in names}
    if len(words) == 1 and all(name.rpartition(" ")[2].isdecimal() for name in names):
        return words.pop() or "layer", [name.rpartition(" ")[2] for name in names]
    return "", [shorten_text(name, 24) for name in names]
