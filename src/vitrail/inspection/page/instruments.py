"""The two interactive instruments of the report, attention and tokens alike: their controls and their numbers.

`report.js` runs them. Until it starts they are hidden, and drawings stand in their place.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.inspection.draw.canvas import OVERLAY
from vitrail.inspection.findings import Absent, Array, Attention, Findings, ShownImage, Tokens
from vitrail.inspection.page.inline import encode_picture, escape_text
from vitrail.tasks.task import AnswerLine

GUESSES_ALONE = 3
"""Guesses beside a small image."""


def build_attention_instrument(number: int, findings: Findings) -> str:
    """Return the HTML that lets a reader choose image, layer and head; "" if there is nothing to show."""
    attention = findings.attention
    if isinstance(attention, Absent) or not findings.images:
        return ""
    heads = '<option value="-1">mean of all</option>'
    heads += "".join(f'<option value="{head}">{head + 1}</option>' for head in range(attention.heads.shape[2]))
    modes = "".join(
        f'<label><input type="radio" name="mode-{number}" data-sets="mode" value="{mode}"{checked}> {words}</label>'
        for mode, words, checked in (("rollout", "rollout", " checked"), ("layer", "one layer", ""))
    )
    controls = f"""
<fieldset><legend>Show</legend>{modes}</fieldset>
{_build_slider("layer", "Layer", len(attention.layers) - 1, len(attention.layers) - 1)}
<label class="line"><span>Head</span><select data-sets="head" autocomplete="off">{heads}</select></label>
{_build_slider("strength", "Overlay", 100, round(100 * OVERLAY))}
<label class="line tick"><input type="checkbox" data-sets="patches"> <span>patches, not smoothed</span></label>"""
    return f"""<div class="instrument" data-instrument="attention" data-model="{number}" hidden>
<div class="thumbnails" role="group" aria-label="Image"></div>
<div class="stage"><canvas role="img"></canvas>{_build_legend()}</div>
<div class="side"><ol class="guesses" aria-label="The model's guesses"></ol><div class="controls">{controls}</div></div>
<p class="told" role="status" aria-live="polite"></p>
</div>"""


def build_tokens_instrument(number: int, findings: Findings) -> str:
    """Return the HTML that lets a reader choose image, layer and patch; "" if there is nothing to show."""
    tokens = findings.tokens
    if isinstance(tokens, Absent) or not findings.images:
        return ""
    chooser = f"""role="application" tabindex="0" aria-describedby="told-tokens-{number}"
 aria-label="The image. Arrow keys choose another patch" """
    return f"""<div class="instrument" data-instrument="tokens" data-model="{number}" hidden>
<div class="thumbnails" role="group" aria-label="Image"></div>
<div class="pair"><canvas class="photograph" {chooser}></canvas><canvas class="map" role="img"></canvas></div>
{_build_legend()}
<div class="controls">{_build_slider("layer", "Layer", len(tokens.layers) - 1, len(tokens.layers) - 1)}</div>
<p class="told" role="status" aria-live="polite" id="told-tokens-{number}"></p>
</div>"""


def list_guesses(findings: Findings) -> str:
    """Return the HTML of images and guesses, for a model whose attention cannot be shown."""
    images = "".join(
        f'<figure><img src="{encode_picture(shown.pixels)}" alt="">'
        f'<figcaption dir="auto">{escape_text(shown.name)}</figcaption>'
        f'<ol class="guesses" aria-label="The model\'s guesses">{_format_guesses(shown)}</ol></figure>'
        for shown in findings.images
        if shown.guesses or shown.answer
    )
    return f'<div class="seen">{images}</div>' if images else ""


def _format_guesses(shown: ShownImage) -> str:
    """Return the best guesses in the form that the script gives to all guesses of an image."""
    if shown.answer:
        return format_answer(shown.answer)
    return "".join(
        f'<li><span dir="auto">{escape_text(label)}</span><b>{share:.1%}</b><i style="--share: {share:.4f}"></i></li>'
        for label, share in shown.guesses[:GUESSES_ALONE]
    )


def format_answer(lines: Sequence[AnswerLine]) -> str:
    """Return the lines of an answer, in the same form; what was chosen stands out."""
    return "".join(
        f'<li class="{"chosen" if line.is_chosen else "other"}"><span dir="auto">{escape_text(line.name)}</span>'
        f"<b>{escape_text(line.text)}</b>{_draw_share(line.share)}</li>"
        for line in lines
    )


def _draw_share(share: float | None) -> str:
    return "" if share is None or not math.isfinite(share) else f'<i style="--share: {share:.4f}"></i>'


def _build_slider(sets: str, label: str, last: int, value: int) -> str:
    """Return a slider with its label and its value in words; hidden if it cannot move."""
    hidden = "" if last else " hidden"
    limits = f'min="0" max="{last}" step="1" value="{value}"'
    label = escape_text(label)
    slider = f'<input type="range" data-sets="{sets}" {limits} aria-label="{label}" autocomplete="off">'
    return f'<label class="line"{hidden}><span>{label}</span>{slider}<output aria-live="off"></output></label>'


def _build_legend() -> str:
    ramp = '<canvas class="ramp" width="128" height="1" aria-hidden="true"></canvas>'
    return f'<div class="legend"><span class="low"></span>{ramp}<span class="high"></span></div>'


def collect_numbers(findings: Findings) -> dict[str, Any]:
    """Return what the two instruments show of a model, ready for JSON."""
    return {
        "images": [_collect_image(shown) for shown in findings.images],
        "attention": None if isinstance(findings.attention, Absent) else _collect_attention(findings.attention),
        "tokens": None if isinstance(findings.tokens, Absent) else _collect_tokens(findings.tokens),
    }


def _collect_image(shown: ShownImage) -> dict[str, Any]:
    height, width = shown.pixels.shape[:2]
    guesses: list[Any] = [[label, _round_numbers(share)] for label, share in shown.guesses]
    guesses += [
        [line.name, None if line.share is None else _round_numbers(line.share), line.text, line.is_chosen]
        for line in shown.answer
    ]
    return {
        "name": shown.name,
        "height": height,
        "width": width,
        "source": encode_picture(shown.pixels),
        "guesses": guesses,
    }


def _collect_attention(attention: Attention) -> dict[str, Any]:
    rows, columns = attention.rollout.shape[2:]
    return {
        "layers": attention.layers,
        "prefix": attention.prefix,
        "reads": attention.reads,
        "rows": rows,
        "columns": columns,
        "rollout": _scale_to_peak(attention.rollout, attention.rollout_prefix),
        "heads": _scale_to_peak(attention.heads, attention.heads_prefix),
    }


def _scale_to_peak(maps: Array, prefix: Array) -> dict[str, Any]:
    """Return maps (…, rows, columns) with one byte for each value; the largest value of each map becomes 255."""
    maps = np.clip(np.nan_to_num(maps), 0, None)
    peaks = maps.max(axis=(-2, -1))
    scaled = maps / np.where(peaks > 0, peaks, 1)[..., None, None]
    return {
        "maps": _encode_bytes(scaled),
        "peaks": _round_numbers(peaks.tolist()),
        "prefix": _round_numbers(prefix.tolist()),
    }


def _collect_tokens(tokens: Tokens) -> dict[str, Any]:
    """Return similarities in bytes; for each layer and image the scale goes from the least similarity to 1."""
    layers = []
    for similarity in tokens.similarity:
        lows = np.nan_to_num(similarity, nan=1).min(axis=(1, 2, 3, 4))
        low = lows[:, None, None, None, None]
        scaled = (np.nan_to_num(similarity, nan=-1) - low) / np.maximum(1 - low, 1e-6)
        rows, columns = similarity.shape[1:3]
        layers.append(
            {"rows": rows, "columns": columns, "lows": _round_numbers(lows.tolist()), "maps": _encode_bytes(scaled)}
        )
    return {"layers": tokens.layers, "maps": layers}


def _encode_bytes(shares: Array) -> str:
    """Encode values from 0 to 1 as base64 of one byte each."""
    return base64.b64encode(np.rint(255 * np.clip(shares, 0, 1)).astype(np.uint8).tobytes()).decode()


def _round_numbers(values: Any) -> Any:
    """Round numbers in lists of any depth to four digits, the most that the page shows; NaN becomes null."""
    if isinstance(values, Sequence):
        return [_round_numbers(value) for value in values]
    return float(f"{values:.4g}") if math.isfinite(values) else None
