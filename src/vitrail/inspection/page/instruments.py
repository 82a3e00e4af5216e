"""The two instruments of the report, attention and tokens alike: their controls, and the numbers that they show.

`page/report.js` makes them work. Until it does they are hidden, and drawings stand in their place.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.inspection.findings import Absent, Array, Attention, Findings, Shown, Tokens
from vitrail.inspection.page.inline import picture, text

OVERLAY = 60
"""Per cent: how much of a map covers the image at first."""
GUESSES_ALONE = 3
"""Beside a small image."""


def attention_instrument(number: int, findings: Findings) -> str:
    """Of the model of that number on the page: which image, which layer, which head; empty where nothing is shown."""
    found = findings.attention
    if isinstance(found, Absent) or not findings.images:
        return ""
    heads = '<option value="-1">mean of all</option>'
    heads += "".join(f'<option value="{head}">{head + 1}</option>' for head in range(found.heads.shape[2]))
    modes = "".join(
        f'<label><input type="radio" name="mode-{number}" data-sets="mode" value="{mode}"{checked}> {words}</label>'
        for mode, words, checked in (("rollout", "rollout", " checked"), ("layer", "one layer", ""))
    )
    controls = f"""
<fieldset><legend>Show</legend>{modes}</fieldset>
{_range("layer", "Layer", len(found.layers) - 1, len(found.layers) - 1)}
<label class="line"><span>Head</span><select data-sets="head" autocomplete="off">{heads}</select></label>
{_range("strength", "Overlay", 100, OVERLAY)}
<label class="line tick"><input type="checkbox" data-sets="patches"> <span>patches, not smoothed</span></label>"""
    return f"""<div class="instrument" data-instrument="attention" data-model="{number}" hidden>
<div class="thumbnails" role="group" aria-label="Image"></div>
<div class="stage"><canvas role="img"></canvas>{_legend()}</div>
<div class="side"><ol class="guesses" aria-label="The model's guesses"></ol><div class="controls">{controls}</div></div>
<p class="told" role="status" aria-live="polite"></p>
</div>"""


def tokens_instrument(number: int, findings: Findings) -> str:
    """Of the model of that number on the page: which image, which layer, which patch; empty where nothing is shown."""
    found = findings.tokens
    if isinstance(found, Absent) or not findings.images:
        return ""
    chooser = f"""role="application" tabindex="0" aria-describedby="told-tokens-{number}"
 aria-label="The image. Arrow keys choose another patch" """
    return f"""<div class="instrument" data-instrument="tokens" data-model="{number}" hidden>
<div class="thumbnails" role="group" aria-label="Image"></div>
<div class="pair"><canvas class="photograph" {chooser}></canvas><canvas class="map" role="img"></canvas></div>
{_legend()}
<div class="controls">{_range("layer", "Layer", len(found.layers) - 1, len(found.layers) - 1)}</div>
<p class="told" role="status" aria-live="polite" id="told-tokens-{number}"></p>
</div>"""


def guesses_alone(findings: Findings) -> str:
    """The images and what they are taken for, of a model whose attention cannot be shown."""
    images = "".join(
        f'<figure><img src="{picture(shown.pixels)}" alt=""><figcaption dir="auto">{text(shown.name)}</figcaption>'
        f'<ol class="guesses" aria-label="The model\'s guesses">{_guesses(shown)}</ol></figure>'
        for shown in findings.images
        if shown.guesses
    )
    return f'<div class="seen">{images}</div>' if images else ""


def _guesses(shown: Shown) -> str:
    """The first of them, in the form that the script gives to all of an image."""
    return "".join(
        f'<li><span dir="auto">{text(label)}</span><b>{share:.1%}</b><i style="--share: {share:.4f}"></i></li>'
        for label, share in shown.guesses[:GUESSES_ALONE]
    )


def _range(sets: str, label: str, last: int, value: int) -> str:
    """A slider with its label, and the place of its value in words. One that cannot move is not shown."""
    hidden = "" if last else " hidden"
    limits = f'min="0" max="{last}" step="1" value="{value}"'
    slider = f'<input type="range" data-sets="{sets}" {limits} aria-label="{text(label)}" autocomplete="off">'
    return f'<label class="line"{hidden}><span>{text(label)}</span>{slider}<output aria-live="off"></output></label>'


def _legend() -> str:
    ramp = '<canvas class="ramp" width="128" height="1" aria-hidden="true"></canvas>'
    return f'<div class="legend"><span class="low"></span>{ramp}<span class="high"></span></div>'


def numbers(findings: Findings) -> dict[str, Any]:
    """What the page's two instruments show of a model, for JSON."""
    return {
        "images": [_image(shown) for shown in findings.images],
        "attention": None if isinstance(findings.attention, Absent) else _attention(findings.attention),
        "tokens": None if isinstance(findings.tokens, Absent) else _tokens(findings.tokens),
    }


def _image(shown: Shown) -> dict[str, Any]:
    height, width = shown.pixels.shape[:2]
    guesses = [[label, _rounded(share)] for label, share in shown.guesses]
    return {"name": shown.name, "height": height, "width": width, "source": picture(shown.pixels), "guesses": guesses}


def _attention(found: Attention) -> dict[str, Any]:
    rows, columns = found.rollout.shape[2:]
    return {
        "layers": found.layers,
        "prefix": found.prefix,
        "reads": found.reads,
        "rows": rows,
        "columns": columns,
        "rollout": _to_own_peak(found.rollout, found.rollout_prefix),
        "heads": _to_own_peak(found.heads, found.heads_prefix),
    }


def _to_own_peak(maps: Array, prefix: Array) -> dict[str, Any]:
    """Maps (…, rows, columns) as one byte for each value, scaled so that the largest of each map is 255."""
    maps = np.clip(np.nan_to_num(maps), 0, None)
    peaks = maps.max(axis=(-2, -1))
    scaled = maps / np.where(peaks > 0, peaks, 1)[..., None, None]
    return {"maps": _bytes(scaled), "peaks": _rounded(peaks.tolist()), "prefix": _rounded(prefix.tolist())}


def _tokens(found: Tokens) -> dict[str, Any]:
    """For each layer and image the scale goes from the least of all similarities to 1."""
    layers = []
    for similarity in found.similarity:
        lows = np.nan_to_num(similarity, nan=1).min(axis=(1, 2, 3, 4))
        low = lows[:, None, None, None, None]
        scaled = (np.nan_to_num(similarity, nan=-1) - low) / np.maximum(1 - low, 1e-6)
        rows, columns = similarity.shape[1:3]
        layers.append({"rows": rows, "columns": columns, "lows": _rounded(lows.tolist()), "maps": _bytes(scaled)})
    return {"layers": found.layers, "maps": layers}


def _bytes(shares: Array) -> str:
    """Values from 0 to 1 as base64 of one byte each."""
    return base64.b64encode(np.rint(255 * np.clip(shares, 0, 1)).astype(np.uint8).tobytes()).decode()


def _rounded(values: Any) -> Any:
    """Numbers, in lists of any depth, with four digits: more is nowhere told. What is no number becomes null."""
    if isinstance(values, Sequence):
        return [_rounded(value) for value in values]
    return float(f"{values:.4g}") if math.isfinite(values) else None
