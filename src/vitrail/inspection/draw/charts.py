"""Draw the two charts with axes: mean attention distance, and how alike layers are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitrail.config import show_size
from vitrail.inspection.draw.canvas import (
    MOST_TICKS,
    NARROW,
    ON_DARK,
    ON_LIGHT,
    add_bar,
    name_figure,
    set_ticks,
    shorten_text,
    show_map,
)
from vitrail.inspection.findings import Attention, Distance, Findings, Layers, Positions
from vitrail.system.figures import BLUE, FAINT, VERMILION, new_figure

NUMBERED, NUMBERED_NARROW = 12, 7
"""A similarity map of at most so many layers shows its numbers."""
ALIKE = "magma"
"""Colour map."""


# Attention distance


def find_farthest(findings: Findings) -> float:
    """Return the largest distance to draw, in pixels, uniform attention included; 0 if there is none.

    The largest of several models is the `top` of `draw_findings` for all of them.
    """
    if not isinstance(findings.distance, Distance):
        return 0.0
    pixels = findings.distance.pixels
    return max(float(pixels[np.isfinite(pixels)].max(initial=0)), find_uniform(findings) or 0.0)


def draw_distance(
    distance: Distance, path: Path, name: str, uniform: float | None, top: float | None, narrow: bool = False
) -> None:
    """Draw a dot for each head of each layer, and their mean; `uniform` is the distance of uniform attention."""
    pixels = np.where(np.isfinite(distance.pixels), distance.pixels, np.nan)
    layers, heads = pixels.shape
    numbers = list(range(1, layers + 1))
    apart = np.linspace(-0.16, 0.16, heads) if heads > 1 else np.zeros(1)
    counts = np.isfinite(pixels).sum(axis=1)
    means = np.where(counts > 0, np.nansum(pixels, axis=1) / np.maximum(counts, 1), np.nan)
    if top is None or not (np.isfinite(top) and top > 0):
        top = 1.06 * max(float(np.nanmax(pixels, initial=0)), uniform or 0.0) or 1.0
    with new_figure(path, *((NARROW, 3.6) if narrow else (7.5, 4.8))) as figure:
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
        turned = not _has_plain_numbers(distance)
        set_ticks(
            axes.xaxis, distance.layers, at=numbers, turned=turned, most=MOST_TICKS // 2 if narrow else MOST_TICKS
        )
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="lower left", bbox_to_anchor=(-0.012, 1.0),
                    ncols=2 if narrow else 3, fontsize=9 if narrow else None,
                    borderaxespad=0.2, handlelength=1.6, columnspacing=1.6)  # fmt: skip
        name_figure(figure, "Mean attention distance", name)


def _has_plain_numbers(distance: Distance) -> bool:
    """Return whether each layer attends over the whole image. Layers over rows or columns have names, not numbers."""
    return all(layer.isdecimal() for layer in distance.layers)


def find_uniform(findings: Findings) -> float | None:
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


# Layers


def draw_layers(layers: Layers, path: Path, name: str, across: str = "", down: str = "", narrow: bool = False) -> None:
    """Draw the first layer at the bottom left; `across` and `down` are the names of two models, if there are two."""
    rows, columns = layers.cka.shape
    longer = max(rows, columns)
    largest = min(NARROW - 1.4 if narrow else 4.6, 1.4 + 0.6 * longer)
    width, height = (largest * max(side / longer, 0.6) for side in (columns, rows))
    with new_figure(path, width + (1.4 if narrow else 1.9), height + 1.5) as figure:
        axes = figure.add_subplot()
        image = show_map(axes, layers.cka, ALIKE, 0, origin="lower", aspect="auto")
        for axis, names, model in ((axes.xaxis, layers.others, across), (axes.yaxis, layers.names, down)):
            kind, short = _split_shared_word(names)
            set_ticks(
                axis, short, turned=not kind and axis is axes.xaxis, most=MOST_TICKS // 2 if narrow else MOST_TICKS
            )
            axis.set_label_text(f"{kind or 'layer'} of {shorten_text(model, 30)}" if model else kind, parse_math=False)
        size = 7 if narrow else 8 if longer > 8 else 9
        if longer <= (NUMBERED_NARROW if narrow else NUMBERED):
            for row, column in np.argwhere(np.isfinite(layers.cka)).tolist():
                value = layers.cka[row, column]
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=size,
                          color=ON_DARK if value < 0.65 else ON_LIGHT)  # fmt: skip
        add_bar(axes, image, "linear CKA", (height, width), [0, 0.25, 0.5, 0.75, 1])
        name_figure(figure, "Layers alike", name)


def _split_shared_word(names: Sequence[str]) -> tuple[str, list[str]]:
    """Split "block 1", "block 2", … into "block" and ["1", "2", …]; other names stay whole, and the word is ""."""
    words = {name.rpartition(" ")[0] for name in names}
    if len(words) == 1 and all(name.rpartition(" ")[2].isdecimal() for name in names):
        return words.pop() or "layer", [name.rpartition(" ")[2] for name in names]
    return "", [shorten_text(name, 24) for name in names]
