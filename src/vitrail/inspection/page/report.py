"""The report: what was found in one model, or in several side by side, as one page that needs nothing but itself.

The page is plain HTML with drawings inside. A small script turns two of them, attention and the similarity of tokens,
into instruments; without it, and on paper, the drawings stand there.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

import numpy as np

from vitrail.inspection.findings import Absent, Array, Distance, Filters, Findings, Layers, Positions
from vitrail.inspection.page.inline import drawing, script, text
from vitrail.inspection.page.instruments import attention_instrument, guesses_alone, numbers, tokens_instrument
from vitrail.system.files import write_whole

TITLES = {
    "card": "The card",
    "rollout": "What it looks at",
    "distance": "Attention distance",
    "filters": "Embedding filters",
    "positions": "Position embeddings",
    "tokens": "Tokens alike",
    "layers": "Layers alike",
    "curves": "Training",
    "files": "Files",
}
LEADS = {
    "card": "What it is, and how an image is prepared before it sees it.",
    "rollout": """Where in an image the answer comes from. Rollout follows attention from the last layer down to the
        image, as in Figures 6 and 14 of the paper; one layer is a single step, and can be seen head by head.""",
    "distance": """How far from a patch lies what it attends to, in pixels of the image: a dot for each head, as in
        Figure 7 (right) of the paper. There some heads reach over the whole image in the lowest layers already while
        others stay near, and with depth all of them reach far.""",
    "filters": """The first principal components of the weights that turn pixels into tokens, as in Figure 7 (left) of
        the paper; grey is zero. After training they look like a basis for what is inside a patch: edges, blobs,
        colours. Before it they are noise.""",
    "positions": """A small map for each patch: how similar its position embedding is to that of every other patch, as
        in Figure 7 (centre) of the paper. Where a model has learned the shape of an image, a patch is most like those
        near it, and like those in its row and its column.""",
    "tokens": """How similar what a layer knows of one patch is to what it knows of the others, by cosine. The paper
        has no such figure. Early layers tend to group by colour and texture, later ones by what belongs together.""",
    "layers": """How alike what two layers know is, by linear CKA: 1 where one is the other turned and scaled, 0 where
        they share nothing. The paper has no such figure. A bright square on the diagonal is a run of layers that
        change little.""",
    "curves": "What the run measured while it trained.",
    "files": "Every figure as PNG and SVG, and the numbers behind it.",
}
INSTRUMENTS = {"rollout": "attention", "tokens": "tokens"}
"""Figures that an instrument takes the place of."""
DATA = (".npz", ".csv")
BESIDE = {"rollout": "guesses", "positions": "neighbours"}
"""Data that have no figure of their own: their stem, by the figure that they belong to."""
PERMITTED = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{}'; "
    "base-uri 'none'; form-action 'none'"
)
"""The page shows what it carries and runs its own script; it can fetch nothing. Drawings have styles inside."""
ICON = "data:image/svg+xml," + quote(
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path fill="#0072B2" d="M1 1h8v6H1z"/>'
    '<path fill="#D55E00" d="M10 1h5v9h-5z"/><path fill="#009E73" d="M1 8h4v7H1z"/>'
    '<path fill="#CC79A7" d="M6 8h3v7H6z"/><path fill="#E69F00" d="M10 11h5v4h-5z"/></svg>'
)
CERTAIN = 0.01
"""The p-value below which neighbours are said to be known."""


@dataclass(frozen=True)
class _Model:
    """One of the models of a report: a column of the page."""

    number: int
    findings: Findings
    figures: Mapping[str, Path]
    """By name, the .png paths."""
    folder: Path
    """Of the report."""

    def figure(self, name: str) -> str:
        """One of its figures, where it was drawn."""
        if name not in self.figures:
            return ""
        label = f"{TITLES[name.partition('-')[0]]}, {self.findings.name}"
        kind = " still" if name in INSTRUMENTS else ""
        return _figure(drawing(self.figures[name], f"m{self.number}-{name}", label), kind)


def write_report(
    findings: Sequence[Findings],
    figures: Sequence[Mapping[str, Path]],
    path: Path,
    between: Layers | Absent | None = None,
    between_figure: Path | None = None,
) -> Path:
    """One HTML file of everything that was found; the same findings give the same bytes.

    `figures` holds for each model the names of its figures with their .png paths; SVG and data lie beside them under
    the same stem, and the page links to all of them relative to its own folder. `between` tells, and its figure shows,
    the layers of the first two models against each other.
    """
    assert len(findings) == len(figures) > 0
    models = [
        _Model(number, found, drawn, path.parent)
        for number, (found, drawn) in enumerate(zip(findings, figures, strict=True))
    ]
    below = {"layers": _between(models, between, between_figure), "files": _files_between(models, between_figure)}
    sections = {
        name: _section(name, [body(model) for model in models], models, below.get(name, ""))
        for name, body in BODIES.items()
        if name != "curves" or any(name in model.figures for model in models)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _page(models, sections).encode("utf-8", "replace"))
    return path


def _page(models: Sequence[_Model], sections: Mapping[str, str]) -> str:
    """All of it, from the sections by name."""
    names = [text(model.findings.name) for model in models]
    parts = files("vitrail.inspection.page")
    code, style = (parts.joinpath(name).read_text("utf-8") for name in ("report.js", "report.css"))
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    contents = "".join(f'<li><a href="#{_anchor(name)}">{TITLES[name]}</a></li>' for name in sections)
    heading = ' <span class="beside">beside</span> '.join(f'<span dir="auto">{name}</span>' for name in names)
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
<script type="application/json" id="findings">{script([numbers(model.findings) for model in models])}</script>
<script>{code}</script>
</body>
</html>
"""


def _section(name: str, bodies: Sequence[str], models: Sequence[_Model], below: str = "") -> str:
    """A heading, a few words, and a column for each model."""
    several = len(models) > 1
    columns = "".join(
        f'<div class="column">{_named(model) if several else ""}{body}</div>'
        for model, body in zip(models, bodies, strict=True)
    )
    link = ""
    if several and name in INSTRUMENTS:
        link = (
            f'<label class="link" hidden><input type="checkbox" data-links="{INSTRUMENTS[name]}" autocomplete="off"> '
            "link controls</label>"
        )
    lead = " ".join(LEADS[name].split())
    return f"""<section id="{_anchor(name)}" aria-labelledby="{_anchor(name)}-title">
<div class="lead"><h2 id="{_anchor(name)}-title">{TITLES[name]}</h2><p>{lead}</p>{link}</div>
<div class="body"><div class="columns">{columns}</div>{below}</div>
</section>
"""


def _named(model: _Model) -> str:
    return f'<h3 dir="auto">{text(model.findings.name)}</h3>'


def _anchor(name: str) -> str:
    return INSTRUMENTS.get(name, name)


def _card(model: _Model) -> str:
    found = model.findings
    images = [("images shown", found.images_from), ("measured on", found.measured_on)]
    rows = "".join(
        f'<tr><th scope="row">{text(name)}</th><td dir="auto">{text(value)}</td></tr>'
        for name, value in [*found.facts, *images]
        if value
    )
    card = f"<details><summary>Model card</summary><pre>{text(found.card)}</pre></details>" if found.card else ""
    return f'<table class="facts"><tbody>{rows}</tbody></table>{card}'


def _attention(model: _Model) -> str:
    if isinstance(model.findings.attention, Absent):
        return _absent(model.findings.attention) + guesses_alone(model.findings)
    return attention_instrument(model.number, model.findings) + model.figure("rollout")


def _distance(model: _Model) -> str:
    found = model.findings.distance
    return _absent(found) if isinstance(found, Absent) else model.figure("distance") + _told(_reach(found))


def _reach(found: Distance) -> str:
    """How far the heads of the first and of the last layer reach, in words."""
    height, width = found.image_size
    words = f"Averaged over {_count(found.images, 'image')} of {width}×{height} pixels."
    first, last = (layer[np.isfinite(layer)] for layer in (found.pixels[0], found.pixels[-1]))
    if not len(first) or not len(last):
        return words
    words += f" The heads of the first layer reach {_span(first)} pixels"
    return f"{words}." if len(found.pixels) == 1 else f"{words}, those of the last {_span(last)}."


def _filters(model: _Model) -> str:
    found = model.findings.filters
    if isinstance(found, Absent):
        return _absent(found)
    return "".join(
        model.figure(f"filters-{number}") + _told(_variance(filters)) for number, filters in enumerate(found, start=1)
    )


def _variance(filters: Filters) -> str:
    components = _count(len(filters.components), "component")
    hold = "holds" if len(filters.components) == 1 else "hold"
    return f"{components} of the {filters.of} {hold} {filters.explained.sum():.0%} of the variance."


def _positions(model: _Model) -> str:
    found = model.findings.positions
    return _absent(found) if isinstance(found, Absent) else model.figure("positions") + _told(_neighbourly(found))


def _neighbourly(found: Positions) -> str:
    """The kind of table, and whether patches that touch are more alike in it than others."""
    rows, columns = found.similarity.shape[:2]
    words = f"Position embeddings of the kind {found.kind}, {rows} by {columns} patches."
    if (test := found.neighbours) is None:
        return f"{words} There are too few to test whether neighbours are alike."
    words += f" Patches that touch have a mean similarity of {_signed(test.near)}, all others of {_signed(test.far)}"
    if not found.learned:
        return f"{words}; in this kind neighbours are alike by construction, whatever was learned."
    known = "they tell neighbours from others" if test.p_value < CERTAIN else "that can be chance"
    return f"{words}; with the patches placed at random {test.permutations:,} times, p = {test.p_value:.2g}: {known}."


def _tokens(model: _Model) -> str:
    if isinstance(model.findings.tokens, Absent):
        return _absent(model.findings.tokens)
    return tokens_instrument(model.number, model.findings) + model.figure("tokens")


def _layers(model: _Model) -> str:
    found = model.findings.layers
    if isinstance(found, Absent):
        return _absent(found)
    return model.figure("layers") + _told(_measured(found))


def _measured(found: Layers) -> str:
    return f"Measured on {_count(found.images, 'image')}."


def _between(models: Sequence[_Model], found: Layers | Absent | None, figure: Path | None) -> str:
    """The layers of two models against each other, below those of each."""
    if found is None:
        return ""
    one, other = (text(model.findings.name) for model in models[:2])
    heading = f'<h3 dir="auto">{one} <span class="beside">against</span> {other}</h3>'
    if isinstance(found, Absent):
        return f'<div class="between">{heading}{_absent(found)}</div>'
    shown = _figure(drawing(figure, "between", "Layers of both models against each other")) if figure else ""
    return f'<div class="between">{heading}{shown}{_told(_measured(found))}</div>'


def _curves(model: _Model) -> str:
    return model.figure("curves") or _absent(Absent("no record of a training is kept with these weights"))


def _files(model: _Model) -> str:
    return _links(model.figures, model.folder)


def _files_between(models: Sequence[_Model], figure: Path | None) -> str:
    if figure is None:
        return ""
    return f'<div class="between"><h3>Both</h3>{_links({"layers": figure}, models[0].folder)}</div>'


def _links(figures: Mapping[str, Path], folder: Path) -> str:
    """A row for each figure: its files, as they are called."""
    rows = ""
    for name, path in sorted(figures.items(), key=lambda figure: _place(figure[0])):
        links = " ".join(_link(file, folder) for file in _kept(name, path))
        rows += f'<tr><th scope="row">{_called(name)}</th><td>{links}</td></tr>'
    return f'<table class="files"><tbody>{rows}</tbody></table>' if rows else _absent(Absent("nothing was drawn"))


def _called(figure: str) -> str:
    """The title of a figure's section, with its number where there are several."""
    name, _, number = figure.partition("-")
    return f"{TITLES[name]} {number}".strip()


def _place(figure: str) -> tuple[int, str]:
    """In the order of the sections."""
    return list(TITLES).index(figure.partition("-")[0]), figure


def _kept(name: str, path: Path) -> list[Path]:
    """A figure and what lies beside it."""
    stems = [path.with_suffix("")] + ([path.with_name(BESIDE[name])] if name in BESIDE else [])
    places = [stem.with_name(stem.name + suffix) for stem in stems for suffix in (".png", ".svg", *DATA)]
    return [place for place in places if place.is_file()]


def _link(file: Path, folder: Path) -> str:
    relative = Path(os.path.relpath(file.absolute(), folder.absolute())).as_posix()
    return f'<a href="{quote(os.fsencode(relative))}">{text(file.name)}</a>'


def _figure(inside: str, kind: str = "") -> str:
    return f'<figure class="drawing{kind}">{inside}</figure>'


def _told(words: str) -> str:
    return f'<p class="told">{text(words)}</p>'


def _absent(part: Absent) -> str:
    """Why there is nothing to see, as a sentence. timm is written small everywhere."""
    why = part.why if part.why.startswith("timm") else part.why[:1].upper() + part.why[1:]
    return f'<p class="absent">{text(why)}.</p>'


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _span(values: Array) -> str:
    low, high = f"{values.min():.0f}", f"{values.max():.0f}"
    return low if low == high else f"{low} to {high}"


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


BODIES: dict[str, Callable[[_Model], str]] = {
    "card": _card,
    "rollout": _attention,
    "distance": _distance,
    "filters": _filters,
    "positions": _positions,
    "tokens": _tokens,
    "layers": _layers,
    "curves": _curves,
    "files": _files,
}
"""Of each section, in their order, what stands in the column of a model."""
