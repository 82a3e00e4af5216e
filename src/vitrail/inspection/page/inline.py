"""What a page of a single file carries inside: words, drawings, pictures, data.

Names and labels come from anywhere. None can end the element or the script that it stands in.
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
"""A larger drawing is carried as pixels."""
PHOTOGRAPH = 128
"""Pixels of the longer side from which an image is carried as JPEG; smaller ones are enlarged, and stay exact."""
QUALITY = 92
THEME = {INK: "ink", FAINT: "faint", GRID: "grid", "#BBBBBB": "edge", BLUE: "blue"}
"""Colours of a drawing that follow the page's, which may be dark, and the CSS variables that hold them."""
_COLOURS = {colour.lower(): f"var(--{name})" for colour, name in THEME.items()}
_COLOUR = re.compile("|".join(_COLOURS))
_BACKGROUND = "fill: #ffffff"
_REFERENCE = re.compile(r"(?<=url\(#)[^)]+")
_PLACE = re.compile(r"translate\(\S+ (\S+)\)")
BELOW_TITLE = 8.0
"""Points from the line that a title stands on to what is left of the drawing."""
_LEFT_OUT = {"metadata", "style"}
"""Of an SVG: what says who made it, and rules that would hold for the whole page."""


def text(words: str) -> str:
    """As it stands in HTML, in an element or in an attribute between quotation marks."""
    return html.escape(words, quote=True)


def drawing(path: Path, prefix: str, label: str) -> str:
    """A figure by its .png path: the SVG beside it where there is a small one, else the pixels.

    `prefix` keeps the names inside of one SVG apart from those of another.
    """
    vector = path.with_suffix(".svg")
    if vector.is_file() and vector.stat().st_size <= MOST_BYTES_OF_A_VECTOR:
        return _vector(vector, prefix, label)
    return f'<img src="{_uri("png", path.read_bytes())}" alt="{text(label)}">'


def _vector(path: Path, prefix: str, label: str) -> str:
    """An SVG of matplotlib's as an element of HTML, in the colours of the page."""
    root = ElementTree.parse(path).getroot()
    wanted = {name for part in root.iter() for name in _references(part)}
    width, height = (float(root.attrib.pop(side).removesuffix("pt")) for side in ("width", "height"))
    top = _untitled(root)
    for parent in list(root.iter()):
        background = parent.get("id", "").startswith("patch_")
        parent.text = parent.tail = None
        for child in list(parent):
            if _local(child.tag) in _LEFT_OUT:
                parent.remove(child)
            elif background and child.get("style") == _BACKGROUND:
                child.set("style", "fill: var(--paper)")
    for part in root.iter():
        part.tag = _local(part.tag)
        attributes = {_local(name): value for name, value in part.attrib.items()}
        part.attrib.clear()
        for name, value in attributes.items():
            if name != "id" or value in wanted:  # most ids are there for nobody
                part.set(name, _attribute(name, value, prefix))
    sides = {side: f"{points / 0.75:.0f}" for side, points in (("width", width), ("height", height - top))}
    root.attrib.update(sides | {"viewBox": f"0 {top:g} {width:g} {height - top:g}", "role": "img", "aria-label": label})
    root.set("style", f"min-width: min(32rem, {sides['width']}px)")  # below that nobody could read it
    return ElementTree.tostring(root, encoding="unicode")


def _untitled(root: ElementTree.Element) -> float:
    """Takes the title off a drawing (`drawing.set_title`), since the page has said it; points that it took up.

    The outlines of its letters stay, because others may share them.
    """
    title = root.find(f".//{{*}}g[@id='{TITLE}']")
    place = None if title is None else _PLACE.match(next((inner.get("transform", "") for inner in title), ""))
    if title is None or place is None:
        return 0.0
    for parent in list(title.iter()):
        for letter in parent.findall("{*}use"):
            parent.remove(letter)
    return float(place.group(1)) + BELOW_TITLE


def _references(part: ElementTree.Element) -> list[str]:
    """The ids that an element of an SVG refers to."""
    of_uses = [value[1:] for name, value in part.attrib.items() if _local(name) == "href" and value.startswith("#")]
    return of_uses + [found for value in part.attrib.values() for found in _REFERENCE.findall(value)]


def _attribute(name: str, value: str, prefix: str) -> str:
    """Of an element of an SVG, on the page."""
    if name == "id":
        return f"{prefix}-{value}"
    if name == "href":
        return f"#{prefix}-{value[1:]}" if value.startswith("#") else "".join(value.split())
    if name == "style":
        value = _COLOUR.sub(lambda found: _COLOURS[found.group()], value)
    return _REFERENCE.sub(lambda found: f"{prefix}-{found.group()}", value)


def _local(name: str) -> str:
    """Without its namespace: HTML knows where it is."""
    return name.rpartition("}")[2]


def script(value: Any) -> str:
    """JSON that can stand inside a script element: what could end it is written as an escape."""
    written = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return written.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def picture(pixels: NDArray[np.uint8]) -> str:
    """(height, width, 1 or 3) as a data URI."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    kind = "jpeg" if max(image.size) >= PHOTOGRAPH else "png"
    content = io.BytesIO()
    image.save(content, kind, **({"quality": QUALITY} if kind == "jpeg" else {}))
    return _uri(kind, content.getvalue())


def _uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
