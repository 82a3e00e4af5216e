"""The section of the report that shows the features of patches as colours beside each image."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitrail.inspection.draw.patches import COLOURS, colour_components
from vitrail.inspection.findings import Absent, Findings, ShownImage
from vitrail.inspection.page.inline import encode_picture, escape_text

QUALITY = 80
"""Of the photos, as JPEG: they are there to compare with."""


def show_patch_colours(findings: Findings) -> str:
    """Return the HTML of all images with the colours of their patches; "" if there is nothing to show."""
    components = findings.components
    if isinstance(components, Absent) or not findings.images:
        return ""
    colours = colour_components(components.values)
    pairs = "".join(_build_pair(image, each) for image, each in zip(findings.images, colours, strict=False))
    shares = [f"{share:.0%}" for share in components.explained[:COLOURS]]
    words = f"Red, green and blue hold {', '.join(shares[:-1])} and {shares[-1]} of the variance."
    words += " The scale of each colour is the same for all images."
    return f'<div class="colours">{pairs}</div><p class="told">{words}</p>'


def _build_pair(image: ShownImage, colours: NDArray[np.uint8]) -> str:
    height, width = image.pixels.shape[:2]
    name = escape_text(image.name)
    shape = f'style="aspect-ratio: {width} / {height}"'
    return (
        f'<figure><img src="{encode_picture(image.pixels, QUALITY)}" alt="{name}" {shape}>'
        f'<img class="patches" src="{encode_picture(colours)}" alt="The features of its patches as colours" {shape}>'
        f'<figcaption dir="auto">{name}</figcaption></figure>'
    )
