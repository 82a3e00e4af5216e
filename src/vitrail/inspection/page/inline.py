"""Embed text, drawings, pictures and data in a single HTML file.

Names and labels come from strangers: none can break out of its element or script.
"""

from __future__ import annotations

import base64
import html
import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.system.figures import BLUE, FAINT, GRID, INK, TITLE

MOST_BYTES_OF_A_VECTOR = 1_500_000
"""A larger drawing is embedded as pixels."""
PHOTOGRAPH = 128
"""Images with a longer side of at least so many pixels are embedded as JPEG. Smaller ones stay exact."""
QUALITY = 92
THEME = {INK: "ink", FAINT: "faint", GRID: "grid", "#BBBBBB": "edge", BLUE: "blue"}
"""Colours of a drawing that follow the page's theme, which may be dark, and their CSS variables."""
_COLOURS = {colour.lower(): f"var(--{name})" for colour, name in THEME.items()}
_COLOUR = re.compile("|".join(_COLOURS))
_BACKGROUND = "fill: #ffffff"
_REFERENCE = re.compile(r"(?<=url\(#)[^)]+")
_PLACE = re.compile(r"translate\(\S+ (\S+)\)")
BELOW_TITLE = 8.0
"""Points between the baseline of a title and the rest of the drawing."""
_LEFT_OUT = {"metadata", "style"}
"""Elements of an SVG that are dropped: its metadata, and style rules that would apply to the whole page."""


def escape_text(words: str) -> str:
    """Escape text for an HTML element or a quoted attribute."""
    return html.escape(words, quote=True)


def embed_drawing(path: Path, prefix: str, label: str, narrow: Path | None = None) -> str:
    """Return the HTML of a figure: the SVG beside the .png path if it is small enough, else the pixels.

    `prefix` makes the ids of this drawing unique on the page. `narrow` is the SVG of the same for a phone; CSS chooses.
    """
    if narrow is not None and narrow.stat().st_size <= MOST_BYTES_OF_A_VECTOR:
        wide = embed_drawing(path, prefix, label)
        return (
            f'<div class="wide">{wide}</div><div class="narrow">{_embed_svg(narrow, f"{prefix}-narrow", label)}</div>'
        )
    vector = path.with_suffix(".svg")
    if vector.is_file() and vector.stat().st_size <= MOST_BYTES_OF_A_VECTOR:
        return _embed_svg(vector, prefix, label)
    return f'<img src="{_make_data_uri("png", path.read_bytes())}" alt="{escape_text(label)}">'


def _embed_svg(path: Path, prefix: str, label: str) -> str:
    """Return an SVG by matplotlib as an HTML element in the colours of the page."""
    root = ElementTree.parse(path).getroot()
    referenced = {name for part in root.iter() for name in _list_references(part)}
    width, height = (float(root.attrib.pop(side).removesuffix("pt")) for side in ("width", "height"))
    top = _remove_title(root)
    for parent in list(root.iter()):
        background = parent.get("id", "").startswith("patch_")
        parent.text = parent.tail = None
        for child in list(parent):
            if _strip_namespace(child.tag) in _LEFT_OUT:
                parent.remove(child)
            elif background and child.get("style") == _BACKGROUND:
                child.set("style", "fill: var(--paper)")
    for part in root.iter():
        part.tag = _strip_namespace(part.tag)
        attributes = {_strip_namespace(name): value for name, value in part.attrib.items()}
        part.attrib.clear()
        for name, value in attributes.items():
            if name != "id" or value in referenced:  # most ids are never used
                part.set(name, _rewrite_attribute(name, value, prefix))
    sides = {side: f"{points / 0.75:.0f}" for side, points in (("width", width), ("height", height - top))}
    root.attrib.update(sides | {"viewBox": f"0 {top:g} {width:g} {height - top:g}", "role": "img", "aria-label": label})
    return ElementTree.tostring(root, encoding="unicode")


def _remove_title(root: ElementTree.Element) -> float:
    """Remove the title, which the page shows already, and return its height in points.

    The outlines of its letters stay, because other words may share them.
    """
    title = root.find(f".//{{*}}g[@id='{TITLE}']")
    place = None if title is None else _PLACE.match(next((inner.get("transform", "") for inner in title), ""))
    if title is None or place is None:
        return 0.0
    for parent in list(title.iter()):
        for letter in parent.findall("{*}use"):
            parent.remove(letter)
    return float(place.group(1)) + BELOW_TITLE


def _list_references(part: ElementTree.Element) -> list[str]:
    """Return the ids that an SVG element refers to."""
    of_uses = [
        value[1:] for key, value in part.attrib.items() if _strip_namespace(key) == "href" and value.startswith("#")
    ]
    return of_uses + [name for value in part.attrib.values() for name in _REFERENCE.findall(value)]


def _rewrite_attribute(name: str, value: str, prefix: str) -> str:
    """Return the value of an SVG attribute with unique ids and the colours of the page."""
    if name == "id":
        return f"{prefix}-{value}"
    if name == "href":
        return f"#{prefix}-{value[1:]}" if value.startswith("#") else "".join(value.split())
    if name == "style":
        value = _COLOUR.sub(lambda match: _COLOURS[match.group()], value)
    return _REFERENCE.sub(lambda match: f"{prefix}-{match.group()}", value)


def _strip_namespace(name: str) -> str:
    """Remove the XML namespace, which HTML does not use."""
    return name.rpartition("}")[2]


def encode_json(value: Any) -> str:
    """Return JSON for a script element; characters that could end the element are escaped."""
    written = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return written.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def encode_picture(pixels: NDArray[np.uint8], quality: int = QUALITY) -> str:
    """Return pixels, (height, width, 1 or 3), as a data URI; `quality` is that of a JPEG."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    kind = "jpeg" if max(image.size) >= PHOTOGRAPH else "png"
    content = io.BytesIO()
    image.save(content, kind, **({"quality": quality} if kind == "jpeg" else {}))
    return _make_data_uri(kind, content.getvalue())


def _make_data_uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
