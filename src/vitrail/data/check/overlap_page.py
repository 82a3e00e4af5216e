"""A page of the images that repeat one of another data set, side by side, in a single HTML file."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from vitrail.data.check.overlap import Overlap, pixels_to_image
from vitrail.data.open import WHOLE, Data, name_data
from vitrail.data.sample_names import find_data_folder, shorten_name
from vitrail.data.sources.source import Source
from vitrail.data.transforms.decode import decode_to_pillow
from vitrail.errors import DataError
from vitrail.system.files import hide_folders

MOST_SHOWN = 400
"""The most pairs on a page."""
SIDE = 160
"""The longer side of a picture on the page, in pixels; smaller images are enlarged by the browser."""
PHOTOGRAPH, QUALITY = 96, 85
"""Pictures with a longer side of at least so many pixels are JPEGs of this quality. Smaller ones stay exact."""
STYLE = """
:root { --paper: #fff; --ink: #222; --faint: #666; --edge: #ddd }
@media (prefers-color-scheme: dark) { :root { --paper: #181818; --ink: #eee; --faint: #aaa; --edge: #444 } }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.4rem } p { max-width: 46rem }
main { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(21rem, 1fr)) }
figure { margin: 0; padding: .7rem; border: 1px solid var(--edge); border-radius: .4rem }
figure div { display: grid; grid-template-columns: 1fr 1fr; gap: .5rem }
img { width: 100%; height: 10rem; object-fit: contain }
figcaption { margin-top: .4rem; font-size: .85rem; overflow-wrap: anywhere }
figcaption span { display: block; color: var(--faint) }
"""


def make_page(overlap: Overlap, data: Data, against: Data) -> str:
    """Return the HTML of a page with the pairs, the least similar first: the doubtful ones are among them.

    Args:
        overlap: the pairs.
        data: the first data set. The folders that lead to it do not stand on the page.
        against: the second.
    """
    first, second = (_make_title(*each) for each in ((data, overlap.parts), (against, overlap.others)))
    folders = find_data_folder(data), find_data_folder(against)
    rows = np.argsort(overlap.similarities, kind="stable")
    shown = rows[:MOST_SHOWN].tolist()
    order = "The least similar come first." if len(shown) == len(rows) else f"The {MOST_SHOWN} least similar are shown."
    found = html.escape(" ".join(overlap.lines()).removeprefix("against: "))
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{first} against {second}</title>\n<style>{STYLE}</style>",
            f"<h1>Images of {first} that repeat images of {second}</h1>",
            f"<p>{found[:1].upper()}{found[1:]}. {order if rows.size else ''}</p>",
            *(f"<p>{html.escape(note)}.</p>" for note in overlap.notes),
            "<main>",
            *(figure for row in shown for figure in _draw_pair(overlap, row, folders)),
            "</main>\n</html>\n",
        ]
    )


def _make_title(data: Data, splits: Sequence[tuple[str, Source]]) -> str:
    """Return the name of a data set for a heading, with its split if there is one alone."""
    only = f" ({splits[0][0]})" if len(splits) == 1 and splits[0][0] != WHOLE else ""
    return html.escape(hide_folders(name_data(data)) + only)


def _draw_pair(overlap: Overlap, row: int, folders: tuple[Path | None, Path | None]) -> Iterator[str]:
    """Yield the lines of a figure: the image of the first data set on the left, that of the second on the right."""
    repeat = overlap.describe(row)
    part, index, other, other_index, _ = overlap.pairs[row].tolist()
    sides = ((overlap.parts[part][1], index), (overlap.others[other][1], other_index))
    how = "the same pixels" if repeat.kind == "exact" else f"{repeat.kind}, similarity {repeat.similarity:.2f}"
    splits = ((repeat.name, repeat.split), (repeat.other_name, repeat.other_split))
    names = [f"{shorten_name(name, folder)} ({split})" for (name, split), folder in zip(splits, folders, strict=True)]
    yield "<figure><div>"
    for (source, number), name in zip(sides, names, strict=True):
        yield f'<img src="{_embed(source, number)}" alt="{html.escape(name)}" loading="lazy">'
    yield f"</div><figcaption>{how}"
    yield from (f"<span>{html.escape(name)}</span>" for name in names)
    yield "</figcaption></figure>"


def _embed(source: Source, index: int) -> str:
    """Return a small picture of a sample as a data URI; empty if it cannot be read any more."""
    try:
        content = source.read(index).content
        image = pixels_to_image(content) if isinstance(content, Tensor) else decode_to_pillow(content)
    except DataError:
        return "data:,"
    image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    kind = "jpeg" if max(image.size) >= PHOTOGRAPH else "png"
    image.save(file, kind, **({"quality": QUALITY} if kind == "jpeg" else {}))
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
