"""The numbers behind every figure, as files: arrays as .npz, small tables also as CSV; the same findings, same bytes.

The arrays have the names of the fields in `findings`; `np.load(path, allow_pickle=False)` reads them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrail.data.sources.source import make_printable
from vitrail.inspection.findings import (
    Absent,
    Attention,
    Distance,
    Filters,
    Findings,
    Layers,
    Neighbours,
    Positions,
    Shown,
    Tokens,
)
from vitrail.system.files import write_whole

Arrays = dict[str, Any]
"""Arrays, numbers and words, by name."""
FIRST = ("step", "kind", "part", "loss", "accuracy")
"""Columns of the curves that people look for, in this order; then whatever else there is."""


def keep(findings: Findings, folder: Path) -> list[Path]:
    """Write the data of every figure of one model into a folder: the files.

    filters-1.npz, filters-2.npz, positions.npz, neighbours.csv, distance.npz, distance.csv, rollout.npz, tokens.npz,
    layers.npz, layers.csv, guesses.csv and curves.csv, as far as there is something to keep.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [image.name for image in findings.images]
    files: list[Path] = []
    if not isinstance(findings.filters, Absent):
        files += [_keep_filters(each, folder, number) for number, each in enumerate(findings.filters, start=1)]
    if isinstance(findings.positions, Positions):
        files += _keep_positions(findings.positions, folder)
    if isinstance(findings.distance, Distance):
        files += _keep_distance(findings.distance, folder)
    if isinstance(findings.attention, Attention):
        files.append(_keep_attention(findings.attention, names, folder))
    if isinstance(findings.tokens, Tokens):
        files.append(_keep_tokens(findings.tokens, names, folder))
    if isinstance(findings.layers, Layers):
        files += keep_layers(findings.layers, folder)
    files += _keep_guesses(findings.images, folder)
    return [*files, *_keep_curves(findings.records, folder)]


def keep_layers(layers: Layers, folder: Path, name: str = "layers") -> list[Path]:
    """CKA of the layers of one model, or of two: `name`.npz and `name`.csv."""
    arrays = {"cka": layers.cka, "names": _words(layers.names), "others": _words(layers.others)}
    rows = ([layer, *values] for layer, values in zip(layers.names, layers.cka.tolist(), strict=True))
    return [
        _write_arrays(folder / f"{name}.npz", {**arrays, "images": layers.images}),
        _write_table(folder / f"{name}.csv", ["layer", *layers.others], rows),
    ]


def _keep_filters(filters: Filters, folder: Path, number: int) -> Path:
    arrays = {"components": filters.components, "explained": filters.explained, "of": _words(filters.of)}
    return _write_arrays(folder / f"filters-{number}.npz", arrays)


def _keep_positions(positions: Positions, folder: Path) -> list[Path]:
    told = {} if positions.neighbours is None else _fields(positions.neighbours)
    arrays: Arrays = {"similarity": _single(positions.similarity), "kind": _words(positions.kind), **told}
    files = [_write_arrays(folder / "positions.npz", arrays)]
    return [*files, _write_table(folder / "neighbours.csv", list(told), [list(told.values())])] if told else files


def _fields(neighbours: Neighbours) -> dict[str, float]:
    names = ("near", "far", "p_value", "permutations")
    return {name: getattr(neighbours, name) for name in names}


def _keep_distance(distance: Distance, folder: Path) -> list[Path]:
    arrays: Arrays = {"layers": _words(distance.layers), "pixels": distance.pixels, "image_size": distance.image_size}
    rows = [
        [layer, head, pixels]
        for layer, heads in zip(distance.layers, distance.pixels.tolist(), strict=True)
        for head, pixels in enumerate(heads, start=1)
    ]
    return [
        _write_arrays(folder / "distance.npz", {**arrays, "images": distance.images}),
        _write_table(folder / "distance.csv", ["layer", "head", "pixels"], rows),
    ]


def _keep_attention(attention: Attention, images: Sequence[str], folder: Path) -> Path:
    large = ("rollout", "rollout_prefix", "heads", "heads_prefix")
    arrays: Arrays = {name: _single(getattr(attention, name)) for name in large}
    for name, words in (("layers", attention.layers), ("prefix", attention.prefix), ("images", images)):
        arrays[name] = _words(words)
    return _write_arrays(folder / "rollout.npz", {**arrays, "reads": _words(attention.reads)})


def _keep_tokens(tokens: Tokens, images: Sequence[str], folder: Path) -> Path:
    """`similarity_1`, `similarity_2`, … for the layers in turn, whose grids may differ."""
    arrays = {f"similarity_{number}": _single(each) for number, each in enumerate(tokens.similarity, start=1)}
    return _write_arrays(folder / "tokens.npz", {**arrays, "layers": _words(tokens.layers), "images": _words(images)})


def _keep_guesses(images: Sequence[Shown], folder: Path) -> list[Path]:
    rows = [
        [image.name, place, label, probability]
        for image in images
        for place, (label, probability) in enumerate(image.guesses, start=1)
    ]
    columns = ["image", "place", "label", "probability"]
    return [_write_table(folder / "guesses.csv", columns, rows)] if rows else []


def _keep_curves(records: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """A row for each record, with what lies within a field as `clock.seconds`; empty where a record has no such."""
    flat = [_flat(record) for record in records]
    found = dict.fromkeys(name for row in flat for name in row)
    columns = [*(name for name in FIRST if name in found), *(name for name in found if name not in FIRST)]
    rows = ([row.get(name, "") for name in columns] for row in flat)
    return [_write_table(folder / "curves.csv", columns, rows)] if flat else []


def _flat(record: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in record.items():
        found |= _flat(value, f"{within}{name}.") if isinstance(value, Mapping) else {f"{within}{name}": value}
    return found


def _single(values: ArrayLike) -> NDArray[np.float32]:
    """Large arrays at half the size: all of them are shares or cosines, which seven digits suffice for."""
    return np.asarray(values, np.float32)


def _words(words: str | Sequence[str]) -> NDArray[np.str_]:
    return np.array(make_printable(words) if isinstance(words, str) else [make_printable(word) for word in words], dtype=np.str_)


def _write_arrays(path: Path, arrays: Arrays) -> Path:
    """As one file. NumPy dates what is inside to 1980, so that the bytes tell only of the arrays."""
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_whole(path, content.getvalue())
    return path


def _write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    for row in ([*columns], *rows):
        writer.writerow([make_printable(cell) if isinstance(cell, str) else cell for cell in row])
    write_whole(path, content.getvalue().encode())
    return path
