"""Findings that nobody found, of models that do not exist: smooth, of any size, the same every time."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.sources.list_source import ListSource
from vitrail.evaluation.labels import LabelMap
from vitrail.evaluation.predictions import PredictionTable
from vitrail.evaluation.report import EvaluationReport, make_report
from vitrail.inspection.findings import (
    Absent,
    Attention,
    Components,
    Distance,
    Filters,
    Findings,
    Layers,
    Neighbours,
    Positions,
    ScoredPhoto,
    Scores,
    ShownImage,
    Tokens,
)
from vitrail.system.figures import BLUE, INK, new_figure, set_title

Grid = tuple[int, int]
FACTS = (
    ("parameters", "5,717,416"),
    ("size", "12 layers, width 192, MLP 768, 3 heads, 16-pixel patches"),
    ("resize", "to 224, shape kept, then the central 0.9, bicubic"),
    ("mean, deviation", "(0.5, 0.5, 0.5), (0.5, 0.5, 0.5)"),
)
CARD = "---\nlibrary_name: vitrail\n---\n\n# A model\n\nTrained on nothing."
RECORDS = tuple({"kind": "train", "part": "train", "step": step, "loss": 2 / step} for step in range(1, 9))


def vit(
    name: str = "vit",
    *,
    images: Sequence[ShownImage] | int = 2,
    depth: int = 3,
    heads: int = 2,
    grid: Grid = (4, 6),
    prefix: tuple[str, ...] = ("class token", "register 1"),
    embeddings: int = 1,
    seed: int = 0,
    **others: Any,
) -> Findings:
    """With everything that a report can show; `others` are parts of it in place of those made up here."""
    draw = np.random.default_rng(seed)
    shown = made_images(images, (16 * grid[0], 16 * grid[1])) if isinstance(images, int) else tuple(images)
    names = tuple(f"block {number}" for number in range(1, depth + 1))
    parts: dict[str, Any] = {
        "name": name,
        "facts": FACTS,
        "card": CARD,
        "images": shown,
        "images_from": "made up",
        "measured_on": "128 images that are made up",
        "filters": tuple(made_filters(f"patch embedding {number}", draw) for number in range(1, embeddings + 1)),
        "positions": made_positions(grid),
        "distance": Distance(
            tuple(str(number) for number in range(1, depth + 1)),
            np.sort(draw.uniform(10, 90, (depth, heads)), axis=0),
            (16 * grid[0], 16 * grid[1]),
            128,
        ),
        "attention": made_attention(len(shown), depth, heads, grid, prefix, draw),
        "components": made_components(len(shown), grid),
        "tokens": made_tokens(names, len(shown), [grid] * depth, draw),
        "layers": made_layers(names, names),
        "records": RECORDS,
        "scores": made_scores(),
    }
    return Findings(**(parts | others))


def resnet(name: str = "resnet", *, images: Sequence[ShownImage] | int = 2, seed: int = 1, **others: Any) -> Findings:
    """Without attention and positions, of few classes, with grids that get smaller."""
    draw = np.random.default_rng(seed)
    names = ("stage 1, unit 1", "stage 2, unit 1")
    shown = made_images(images, (64, 96)) if isinstance(images, int) else tuple(images)
    parts: dict[str, Any] = {
        "images": shown,
        "filters": (made_filters("root convolution", draw),),
        "positions": Absent("a ResNet has no position embeddings"),
        "distance": Absent("a ResNet does not attend"),
        "attention": Absent("a ResNet does not attend"),
        "components": Absent("a ResNet does not cut images into patches"),
        "tokens": made_tokens(names, len(shown), [(8, 12), (4, 6)], draw),
        "layers": made_layers(names, names),
        "records": (),
        "card": "",
        "scores": None,
    }
    return vit(name, **(parts | others))


def nothing(name: str = "nothing") -> Findings:
    """Of a model that has nothing to show for."""
    why = Absent("nothing of the kind is in it")
    parts = dict.fromkeys(("filters", "positions", "distance", "attention", "components", "tokens", "layers"), why)
    return vit(name, images=(), card="", images_from="", measured_on="", records=(), scores=None, **parts)


def made_report(
    confusion: Sequence[Sequence[int]] = ((7, 2, 0), (1, 8, 1), (3, 0, 2)),
    classes: Sequence[str] = ("disc", "ground", "sky"),
    **others: Any,
) -> EvaluationReport:
    """A real report on images that were confused so often: a row for each label, a column for each guess."""
    pairs = [
        (label, guess) for label, row in enumerate(confusion) for guess, count in enumerate(row) for _ in range(count)
    ]
    labels, guesses = np.array(pairs).T
    confidences = np.linspace(0.95, 0.4, len(pairs))
    table = PredictionTable(
        np.arange(len(pairs)), labels, guesses, confidences, -np.log(confidences), np.where(labels == guesses, 1, 2)
    )
    count = len(classes)
    source = ListSource([(np.zeros((4, 4, 3), np.uint8), classes[label]) for label in labels], classes)
    match = LabelMap(tuple((number,) for number in range(count)), "the same names in the same order")
    return make_report(
        table,
        source,
        match,
        classes,
        count,
        **({"model": "vit", "data": "photos", "part": None, "left_out": 0} | others),
    )


def made_scores(report: EvaluationReport | None = None, doubted: int = 5, **others: Any) -> Scores:
    """Scores with a photo of every mistake."""
    report = report or made_report()
    pixels = [image.pixels for image in made_images(2, (96, 64))]
    mistakes = tuple(
        ScoredPhoto(f"mistake-{place}.jpg", pixels[place % 2], each.label, each.guess, each.confidence)
        for place, each in enumerate(report.mistakes)
    )
    parts: dict[str, Any] = {
        "report": report,
        "remark": f"{report.images} photos that are made up",
        "mistakes": mistakes,
        "doubtful": mistakes[:doubted],
        "all_doubtful": len(mistakes[:doubted]),
    }
    return Scores(**(parts | others))


def made_images(count: int, size: Grid, channels: int = 3) -> tuple[ShownImage, ...]:
    """A disc that wanders over a shaded ground."""
    down, across = np.mgrid[0 : size[0], 0 : size[1]]
    images = []
    for number in range(count):
        ground = np.stack([80 + 120 * across / size[1], 60 + 120 * down / size[0], np.full(size, 110.0)], axis=2)
        middle = (size[0] * (0.3 + 0.1 * number), size[1] * (0.3 + 0.1 * number))
        ground[np.hypot(down - middle[0], across - middle[1]) < size[0] / 5] = (230, 190, 60)
        guesses = ((f"disc {number}", 0.6 + 0.01 * number), ("ground", 0.3), ("a thing with a long name indeed", 0.004))
        images.append(ShownImage(f"image-{number}.png", ground[..., :channels].astype(np.uint8), guesses))
    return tuple(images)


def made_filters(of: str, draw: np.random.Generator) -> Filters:
    components = draw.normal(size=(6, 4, 4, 3))
    return Filters(of, components / np.linalg.norm(components.reshape(6, -1), axis=1)[:, None, None, None],
                   np.array([0.4, 0.2, 0.1, 0.05, 0.05, 0.04]))  # fmt: skip


def made_positions(grid: Grid) -> Positions:
    return Positions("learned-1d", nearness(grid, 3.0), Neighbours(0.8125, -0.05, 0.0001, 9999))


def nearness(grid: Grid, reach: float) -> NDArray[np.float64]:
    """(rows, columns, rows, columns): 1 for a place with itself, less and less with distance."""
    places = np.stack(np.meshgrid(*(np.arange(side) for side in grid), indexing="ij"), axis=-1).reshape(-1, 2)
    apart = np.linalg.norm(places[:, None] - places[None], axis=2)
    return np.exp(-((apart / reach) ** 2)).reshape(*grid, *grid)


def made_attention(
    images: int, layers: int, heads: int, grid: Grid, prefix: tuple[str, ...], draw: np.random.Generator
) -> Attention:
    """Each map a hill, in another place than the one before; with what falls on the prefix it sums to 1."""

    def hills(*shape: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        places = np.resize(draw.permutation(grid[0] * grid[1]), shape)
        maps = nearness(grid, 2.0).reshape(-1, *grid)[places]
        others = draw.uniform(0.1, 0.5, size=(*shape, len(prefix)))
        total = maps.sum(axis=(-2, -1), keepdims=True) + others.sum(axis=-1)[..., None, None]
        return maps / total, others / total[..., 0]

    return Attention(
        tuple(str(number) for number in range(1, layers + 1)),
        *hills(images, layers),
        *hills(images, layers, heads),
        prefix,
        "the class token",
    )


def made_components(images: int, grid: Grid) -> Components:
    """Red from left to right, green downward, blue from image to image."""
    number, down, across = np.mgrid[0:images, 0 : grid[0], 0 : grid[1]]
    values = np.stack([across, down, number], axis=-1).astype(float)
    return Components(values - values.max(initial=0) / 2, np.array([0.5, 0.25, 0.125]))


def made_tokens(names: tuple[str, ...], images: int, grids: Sequence[Grid], draw: np.random.Generator) -> Tokens:
    maps = []
    for grid in grids:
        states = draw.normal(size=(images, *grid, 4)) + np.linspace(0, 3, grid[1])[:, None]
        states /= np.linalg.norm(states, axis=-1, keepdims=True)
        maps.append(np.einsum("nrcd,nxyd->nrcxy", states, states))
    return Tokens(names, tuple(maps))


def made_layers(names: tuple[str, ...], others: tuple[str, ...]) -> Layers:
    down, across = np.mgrid[0 : len(names), 0 : len(others)]
    return Layers(names, others, np.exp(-np.abs(down / len(names) - across / len(others))), 128)


def made_figures(findings: Findings, folder: Path) -> dict[str, Path]:
    """A plain drawing with data beside it for each part that there is, under the names that the report knows."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {
        "positions": findings.positions,
        "distance": findings.distance,
        "rollout": findings.attention,
        "components": findings.components,
        "tokens": findings.tokens,
        "layers": findings.layers,
    }
    names = [] if isinstance(findings.filters, Absent) else [f"filters-{n + 1}" for n in range(len(findings.filters))]
    names += [name for name, part in parts.items() if not isinstance(part, Absent)]
    names += ["curves"] if findings.records else []
    return {name: made_figure(folder / f"{name}.png") for name in names}


def made_figure(path: Path) -> Path:
    """A drawing with its name for a title, as PNG and SVG, with data beside it."""
    for suffix, content in _drawing(path.stem).items():
        path.with_suffix(suffix).write_bytes(content)
    np.savez(path.with_suffix(".npz"), values=np.zeros(3))
    return path


@functools.cache
def _drawing(title: str) -> dict[str, bytes]:
    """With all kinds of things in it: a line that is cut off at the frame, an image, words."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "drawing.png"
        with new_figure(path, 6, 3) as figure:
            left, right = figure.subplots(1, 2)
            left.plot([0, 1, 2], [0, len(title), 1], color=BLUE)
            left.set_ylim(0, 5)
            left.set_xlabel("layer")
            right.imshow(np.linspace(0, 1, 12).reshape(3, 4))
            right.text(0, 0, "words", color=INK)
            set_title(figure, title)
        return {suffix: path.with_suffix(suffix).read_bytes() for suffix in (".png", ".svg")}
