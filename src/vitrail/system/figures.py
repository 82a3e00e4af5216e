"""The style of every figure, and how it is written: as PNG and as SVG; the same data give the same bytes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.system.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 100
# The palette by Okabe and Ito, which people with colour blindness can tell apart.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
INK, FAINT, GRID = "#333333", "#666666", "#E6E6E6"
STYLE = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "axes.edgecolor": "#BBBBBB",
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture everywhere
    "font.size": 10,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "svg.hashsalt": "vitrail",  # otherwise ids inside the file would be random
}

LETTERS_PER_INCH = 9
"""Letters of a title that fit."""
TITLE = "title"


@contextmanager
def new_figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure, `width` × `height` inches, and write it as PNG and SVG if the block succeeds.

    A `path` that ends in .svg is written as SVG alone.
    """
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a title may be in any script
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)  # inches
        figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout=layout)
        FigureCanvasAgg(figure)
        yield figure
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
            if suffix == ".png" and path.suffix == ".svg":
                continue
            content = io.BytesIO()
            figure.savefig(content, format=suffix[1:], metadata=metadata)
            write_whole(path.with_suffix(suffix), content.getvalue())


def set_title(figure: Figure, title: str) -> None:
    """Set the title above the whole figure, shortened to fit; in an SVG it is the group with the id `TITLE`."""
    title = replace_unprintable(title)
    letters = int(figure.get_figwidth() * LETTERS_PER_INCH)
    title = title if len(title) <= letters else f"{title[: letters - 1]}…"
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK, parse_math=False, gid=TITLE)


def replace_unprintable(words: str) -> str:
    """Replace line breaks and other characters that cannot be drawn by a mark."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in words)
