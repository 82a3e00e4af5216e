"""The report: one self-contained page about one model, or about several side by side.

The page is plain HTML with drawings inside. A small script turns two drawings, attention and the similarity of tokens,
into interactive instruments. Without the script, and on paper, the drawings stay.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

import numpy as np

from vitrail.inspection.findings import (
    Absent,
    Array,
    Distance,
    Filters,
    Findings,
    Layers,
    Positions,
    Scores,
    TaskScores,
)
from vitrail.inspection.page.file_table import build_file_table
from vitrail.inspection.page.inline import embed_drawing, encode_json, escape_text
from vitrail.inspection.page.instruments import (
    build_attention_instrument,
    build_tokens_instrument,
    collect_numbers,
    list_guesses,
)
from vitrail.inspection.page.patch_colours import show_patch_colours
from vitrail.inspection.page.scores import (
    show_accuracy,
    show_classes,
    show_confusions,
    show_doubtful,
    show_mistakes,
)
from vitrail.inspection.page.task_scores import show_measures, show_tables, show_worst
from vitrail.inspection.page.words import LEADS, TITLES
from vitrail.system.files import write_whole
from vitrail.system.results import format_count

INSTRUMENTS = {"rollout": "attention", "tokens": "tokens"}
"""Figures that an instrument replaces, with the instrument's name."""
PERMITTED = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{}'; "
    "base-uri 'none'; form-action 'none'"
)
"""The page may show what it contains and run its own script, and may load nothing. Drawings contain styles."""
ICON = "data:image/svg+xml," + quote(
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path fill="#0072B2" d="M1 1h8v6H1z"/>'
    '<path fill="#D55E00" d="M10 1h5v9h-5z"/><path fill="#009E73" d="M1 8h4v7H1z"/>'
    '<path fill="#CC79A7" d="M6 8h3v7H6z"/><path fill="#E69F00" d="M10 11h5v4h-5z"/></svg>'
)
ABSENT = '<p class="absent">'
"""The beginning of a sentence in place of a figure."""
CERTAIN = 0.01
"""The report says that a model knows neighbours if the p-value is below this."""


SCORE_SECTIONS: dict[str, Callable[[Scores], str]] = {
    "accuracy": show_accuracy,
    "mistakes": show_mistakes,
    "doubtful": show_doubtful,
    "confusions": show_confusions,
    "classes": show_classes,
}
"""The sections about a model that was scored, which stand before all others."""
TASK_SECTIONS: dict[str, Callable[[TaskScores], str]] = {
    "measures": show_measures,
    "worst": show_worst,
    "tables": show_tables,
}
"""The same for a model with another task than one label."""
NOT_SCORED = Absent("this model was not scored on images with labels")
NO_TASK_SCORES = Absent("this model was not scored on a task with such measures")


@dataclass(frozen=True)
class _Model:
    """One model of the report: a column of the page."""

    number: int
    findings: Findings
    figures: Mapping[str, Path]
    """The .png paths by the name of the figure."""
    folder: Path
    """The folder of the report."""
    narrow: Mapping[str, Path]
    """The SVGs of the same figures for a phone."""

    def show_figure(self, name: str) -> str:
        """Return the HTML of a figure; "" if it was not drawn."""
        if name not in self.figures:
            return ""
        label = f"{TITLES[name.partition('-')[0]]}, {self.findings.name}"
        kind = " still" if name in INSTRUMENTS else ""
        drawing = embed_drawing(self.figures[name], f"m{self.number}-{name}", label, self.narrow.get(name))
        return _wrap_figure(drawing, kind)


def write_report(
    findings: Sequence[Findings],
    figures: Sequence[Mapping[str, Path]],
    path: Path,
    between: Layers | Absent | None = None,
    between_figure: Path | None = None,
    narrow: Sequence[Mapping[str, Path]] | None = None,
    between_narrow: Path | None = None,
) -> Path:
    """Write one HTML file about all findings and return its path. The same findings give the same bytes.

    Args:
        findings: the findings of each model.
        figures: for each model, the .png paths by the name of the figure, and the tables that have no figure. SVG and
            data files lie beside them under the same stem; the page links to all of them, relative to its own folder.
        path: the file to write.
        between: the similarity between the layers of the first two models.
        between_figure: the .png path of its figure.
        narrow: for each model, the SVGs of the same figures for a phone.
        between_narrow: the SVG of the figure between two models for a phone.
    """
    assert len(findings) == len(figures) > 0
    models = [
        _Model(number, each, drawings, path.parent, small)
        for number, (each, drawings, small) in enumerate(
            zip(findings, figures, narrow or [{}] * len(findings), strict=True)
        )
    ]
    below = {
        "layers": _show_between(models, between, between_figure, between_narrow),
        "files": _list_files_between(models, between_figure),
    }
    sections = {
        name: _build_section(name, [body(model) for model in models], models, below.get(name, ""))
        for name, body in BODIES.items()
        if _has_section(name, models)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _build_page(models, sections).encode("utf-8", "replace"))
    return path


def _has_section(name: str, models: Sequence[_Model]) -> bool:
    """Return whether a section has something to say about one of the models."""
    found = [model.findings.scores for model in models]
    if name in TASK_SECTIONS:
        return any(isinstance(each, TaskScores) for each in found)
    scores = [each for each in found if isinstance(each, Scores)]
    if name == "doubtful":
        return any(each.all_doubtful for each in scores)
    if name in SCORE_SECTIONS:
        return bool(scores)
    return name != "curves" or any(name in model.figures for model in models)


def _build_page(models: Sequence[_Model], sections: Mapping[str, str]) -> str:
    """Return the whole page; `sections` are the HTML of each section by name."""
    names = [escape_text(model.findings.name) for model in models]
    parts = files("vitrail.inspection.page")
    code, style = (parts.joinpath(name).read_text("utf-8") for name in ("report.js", "report.css"))
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    contents = "".join(f'<li><a href="#{_choose_anchor(name)}">{TITLES[name]}</a></li>' for name in sections)
    heading = ' <span class="beside">beside</span> '.join(f'<span dir="auto">{name}</span>' for name in names)
    data = encode_json([collect_numbers(model.findings) for model in models])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{PERMITTED.format(digest)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="vitrail">
<title>Inside {", ".join(names)}</title>
<link rel="icon" href="{ICON}">
<style>{style}</style>
</head>
<body class="{"one" if len(models) == 1 else "several"}" style="--models: {len(models)}">
<header class="top">
<p class="mark"><span class="panes" aria-hidden="true"><i></i><i></i><i></i><i></i><i></i></span>vitrail</p>
<h1><span class="inside">Inside</span> {heading}</h1>
<nav aria-label="Contents"><ol>{contents}</ol></nav>
</header>
<main>
{"".join(sections.values())}</main>
<script type="application/json" id="findings">{data}</script>
<script>{code}</script>
</body>
</html>
"""


def _build_section(name: str, bodies: Sequence[str], models: Sequence[_Model], below: str = "") -> str:
    """Return a section: a heading, a few words, and a column for each model."""
    several = len(models) > 1
    columns = "".join(
        f'<div class="column">{_build_heading(model) if several else ""}{body}</div>'
        for model, body in zip(models, bodies, strict=True)
    )
    link = ""
    if several and name in INSTRUMENTS:
        link = (
            f'<label class="link" hidden><input type="checkbox" data-links="{INSTRUMENTS[name]}" autocomplete="off"> '
            "link controls</label>"
        )
    # What no model has needs no explanation.
    lead = "" if all(body.startswith(ABSENT) for body in bodies) else f"<p>{' '.join(LEADS[name].split())}</p>"
    return f"""<section id="{_choose_anchor(name)}" aria-labelledby="{_choose_anchor(name)}-title">
<div class="lead"><h2 id="{_choose_anchor(name)}-title">{TITLES[name]}</h2>{lead}{link}</div>
<div class="body"><div class="columns">{columns}</div>{below}</div>
</section>
"""


def _build_heading(model: _Model) -> str:
    return f'<h3 dir="auto">{escape_text(model.findings.name)}</h3>'


def _choose_anchor(name: str) -> str:
    return INSTRUMENTS.get(name, name)


def _show_card(model: _Model) -> str:
    findings = model.findings
    images = [("images shown", findings.images_from), ("measured on", findings.measured_on)]
    rows = "".join(
        f'<tr><th scope="row">{escape_text(name)}</th><td dir="auto">{escape_text(value)}</td></tr>'
        for name, value in [*findings.facts, *images]
        if value
    )
    card = (
        f"<details><summary>Model card</summary><pre>{escape_text(findings.card)}</pre></details>"
        if findings.card
        else ""
    )
    return f'<table class="facts"><tbody>{rows}</tbody></table>{card}'


def _show_attention(model: _Model) -> str:
    if isinstance(model.findings.attention, Absent):
        return _explain_absence(model.findings.attention) + list_guesses(model.findings)
    return build_attention_instrument(model.number, model.findings) + model.show_figure("rollout")


def _show_components(model: _Model) -> str:
    if isinstance(model.findings.components, Absent):
        return _explain_absence(model.findings.components)
    return show_patch_colours(model.findings)


def _show_tokens(model: _Model) -> str:
    if isinstance(model.findings.tokens, Absent):
        return _explain_absence(model.findings.tokens)
    return build_tokens_instrument(model.number, model.findings) + model.show_figure("tokens")


def _show_distance(model: _Model) -> str:
    distance = model.findings.distance
    return (
        _explain_absence(distance)
        if isinstance(distance, Absent)
        else model.show_figure("distance") + _wrap_text(_describe_reach(distance))
    )


def _describe_reach(distance: Distance) -> str:
    """Say how far the heads of the first and of the last layer reach."""
    height, width = distance.image_size
    words = f"Averaged over {format_count(distance.images, 'image')} of {width}×{height} pixels."
    first, last = (layer[np.isfinite(layer)] for layer in (distance.pixels[0], distance.pixels[-1]))
    if not len(first) or not len(last):
        return words
    words += f" The heads of the first layer reach {_format_range(first)} pixels"
    return f"{words}." if len(distance.pixels) == 1 else f"{words}, those of the last {_format_range(last)}."


def _show_filters(model: _Model) -> str:
    filters = model.findings.filters
    if isinstance(filters, Absent):
        return _explain_absence(filters)
    return "".join(
        model.show_figure(f"filters-{number}") + _wrap_text(_describe_variance(each))
        for number, each in enumerate(filters, start=1)
    )


def _describe_variance(filters: Filters) -> str:
    components = format_count(len(filters.components), "component")
    hold = "holds" if len(filters.components) == 1 else "hold"
    return f"{components} of the {filters.of} {hold} {filters.explained.sum():.0%} of the variance."


def _show_positions(model: _Model) -> str:
    positions = model.findings.positions
    return (
        _explain_absence(positions)
        if isinstance(positions, Absent)
        else model.show_figure("positions") + _wrap_text(_describe_neighbours(positions))
    )


def _describe_neighbours(positions: Positions) -> str:
    """Say which kind of table it is, and whether patches that touch are more alike in it than others."""
    rows, columns = positions.similarity.shape[:2]
    words = f"Position embeddings of the kind {positions.kind}, {rows} by {columns} patches."
    if (test := positions.neighbours) is None:
        return f"{words} There are too few to test whether neighbours are alike."
    near, far = _format_signed(test.near), _format_signed(test.far)
    words += f" Patches that touch have a mean similarity of {near}, all others of {far}"
    if not positions.learned:
        return f"{words}; in this kind neighbours are alike by construction, whatever was learned."
    known = "they tell neighbours from others" if test.p_value < CERTAIN else "that can be chance"
    return f"{words}; with the patches placed at random {test.permutations:,} times, p = {test.p_value:.2g}: {known}."


def _show_layers(model: _Model) -> str:
    layers = model.findings.layers
    if isinstance(layers, Absent):
        return _explain_absence(layers)
    return model.show_figure("layers") + _wrap_text(_describe_images(layers))


def _describe_images(layers: Layers) -> str:
    return f"Measured on {format_count(layers.images, 'image')}."


def _show_between(
    models: Sequence[_Model], layers: Layers | Absent | None, figure: Path | None, narrow: Path | None
) -> str:
    """Return the part about the layers of two models against each other."""
    if layers is None:
        return ""
    one, other = (escape_text(model.findings.name) for model in models[:2])
    heading = f'<h3 dir="auto">{one} <span class="beside">against</span> {other}</h3>'
    if isinstance(layers, Absent):
        return f'<div class="between">{heading}{_explain_absence(layers)}</div>'
    label = "Layers of both models against each other"
    shown = "" if figure is None else _wrap_figure(embed_drawing(figure, "between", label, narrow))
    return f'<div class="between">{heading}{shown}{_wrap_text(_describe_images(layers))}</div>'


def _show_curves(model: _Model) -> str:
    return model.show_figure("curves") or _explain_absence(Absent("no record of a training is kept with these weights"))


def _list_files(model: _Model) -> str:
    return build_file_table(model.figures, model.folder) or _explain_absence(Absent("nothing was drawn"))


def _list_files_between(models: Sequence[_Model], figure: Path | None) -> str:
    if figure is None:
        return ""
    return f'<div class="between"><h3>Both</h3>{build_file_table({"layers": figure}, models[0].folder)}</div>'


def _wrap_figure(inside: str, kind: str = "") -> str:
    return f'<figure class="drawing{kind}">{inside}</figure>'


def _wrap_text(words: str) -> str:
    return f'<p class="told">{escape_text(words)}</p>'


def _explain_absence(part: Absent) -> str:
    """Say why a part is absent, as a sentence. The name timm keeps its small letter."""
    why = part.why if part.why.startswith("timm") else part.why[:1].upper() + part.why[1:]
    return f"{ABSENT}{escape_text(why)}.</p>"


def _format_range(values: Array) -> str:
    low, high = f"{values.min():.0f}", f"{values.max():.0f}"
    return low if low == high else f"{low} to {high}"


def _format_signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _show_scores(name: str, model: _Model) -> str:
    scores = model.findings.scores
    return SCORE_SECTIONS[name](scores) if isinstance(scores, Scores) else _explain_absence(NOT_SCORED)


def _show_task_scores(name: str, model: _Model) -> str:
    scores = model.findings.scores
    return TASK_SECTIONS[name](scores) if isinstance(scores, TaskScores) else _explain_absence(NO_TASK_SCORES)


BODIES: dict[str, Callable[[_Model], str]] = {
    **{name: partial(_show_scores, name) for name in SCORE_SECTIONS},
    **{name: partial(_show_task_scores, name) for name in TASK_SECTIONS},
    "rollout": _show_attention,
    "components": _show_components,
    "tokens": _show_tokens,
    "curves": _show_curves,
    "card": _show_card,
    "distance": _show_distance,
    "filters": _show_filters,
    "positions": _show_positions,
    "layers": _show_layers,
    "files": _list_files,
}
"""What makes the column of a model in each section, in the order of the sections."""
