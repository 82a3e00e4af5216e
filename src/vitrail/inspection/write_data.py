"""Write the numbers behind every figure: arrays as .npz, small tables as CSV. Same findings, same bytes.

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
from vitrail.evaluation.report import EvaluationReport
from vitrail.evaluation.task_report import TaskReport
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
    Scores,
    ShownImage,
    Tokens,
)
from vitrail.system.files import write_whole

Arrays = dict[str, Any]
"""Arrays, numbers and words, by name."""
SCORE_TABLES = ("mistakes", "confusions", "classes")
TASK_TABLES = ("measures", "worst", "tables")
"""Stems of the tables about a model that was scored, by its task: one label, or another."""
FIRST = ("step", "kind", "part", "loss", "accuracy")
"""The first columns of the curves, in this order; all others follow."""


def write_data(findings: Findings, folder: Path) -> list[Path]:
    """Write the data of every figure of one model into a folder and return the files.

    mistakes.csv, confusions.csv, classes.csv, or of another task than one label measures.csv, worst.csv and
    tables-1.csv, …; filters-1.npz, filters-2.npz, positions.npz, neighbours.csv, distance.npz, distance.csv,
    rollout.npz, components.npz, tokens.npz, layers.npz, layers.csv, guesses.csv and curves.csv, as far as there is
    something to write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [image.name for image in findings.images]
    files: list[Path] = []
    if isinstance(findings.scores, Scores):
        files = _write_scores(findings.scores.report, folder)
    elif findings.scores is not None:
        files = _write_task_scores(findings.scores.report, folder)
    if not isinstance(findings.filters, Absent):
        files += [_write_filters(each, folder, number) for number, each in enumerate(findings.filters, start=1)]
    if isinstance(findings.positions, Positions):
        files += _write_positions(findings.positions, folder)
    if isinstance(findings.distance, Distance):
        files += _write_distance(findings.distance, folder)
    if isinstance(findings.attention, Attention):
        files.append(_write_attention(findings.attention, names, folder))
    if isinstance(findings.components, Components):
        files.append(_write_components(findings.components, names, folder))
    if isinstance(findings.tokens, Tokens):
        files.append(_write_tokens(findings.tokens, names, folder))
    if isinstance(findings.layers, Layers):
        files += write_layers(findings.layers, folder)
    files += _write_guesses(findings.images, folder)
    return [*files, *_write_curves(findings.records, folder)]


def write_layers(layers: Layers, folder: Path, name: str = "layers") -> list[Path]:
    """Write the CKA of the layers of one model, or of two, to `name`.npz and `name`.csv, and return the files."""
    arrays = {"cka": layers.cka, "names": _to_string_array(layers.names), "others": _to_string_array(layers.others)}
    rows = ([layer, *values] for layer, values in zip(layers.names, layers.cka.tolist(), strict=True))
    return [
        _write_arrays(folder / f"{name}.npz", {**arrays, "images": layers.images}),
        _write_table(folder / f"{name}.csv", ["layer", *layers.others], rows),
    ]


def _write_scores(report: EvaluationReport, folder: Path) -> list[Path]:
    """Write the surest mistakes, all confusions and all classes. Images have their names, without folders."""
    mistakes = [[each.image.rsplit("/", 1)[-1], each.label, each.guess, each.confidence] for each in report.mistakes]
    classes = [[each.name, each.images, each.hits, *each.accuracy] for each in report.classes if each.images]
    tables: list[tuple[list[str], Sequence[Sequence[Any]]]] = [
        (["image", "label", "guess", "probability"], mistakes),
        (["label", "guess", "images"], report.confusions),
        (["class", "images", "right", "accuracy", "low", "high"], classes),
    ]
    named = zip(SCORE_TABLES, tables, strict=True)
    return [_write_table(folder / f"{name}.csv", columns, rows) for name, (columns, rows) in named if rows]


def _write_task_scores(report: TaskReport, folder: Path) -> list[Path]:
    """Write the measures and the worst images of a task. Images have their names, without folders."""
    measures = [[name, *estimate] for name, estimate, _ in report.measures()]
    worst = [[each.image.rsplit("/", 1)[-1], each.words, each.truth, each.error] for each in report.worst]
    tables: list[tuple[list[str], Sequence[Sequence[Any]]]] = [
        (["measure", "value", "low", "high"], measures),
        (["image", "answer", "truth", "error"], worst),
    ]
    named = zip(TASK_TABLES, tables, strict=False)
    files = [_write_table(folder / f"{name}.csv", columns, rows) for name, (columns, rows) in named if rows]
    for number, (head, *rows) in enumerate(report.measured.tables.values(), start=1):
        files.append(_write_table(folder / f"tables-{number}.csv", [str(cell) for cell in head], rows))
    return files


def _write_filters(filters: Filters, folder: Path, number: int) -> Path:
    arrays = {"components": filters.components, "explained": filters.explained, "of": _to_string_array(filters.of)}
    return _write_arrays(folder / f"filters-{number}.npz", arrays)


def _write_positions(positions: Positions, folder: Path) -> list[Path]:
    test = {} if positions.neighbours is None else _list_fields(positions.neighbours)
    arrays: Arrays = {"similarity": _to_float32(positions.similarity), "kind": _to_string_array(positions.kind), **test}
    files = [_write_arrays(folder / "positions.npz", arrays)]
    return [*files, _write_table(folder / "neighbours.csv", list(test), [list(test.values())])] if test else files


def _list_fields(neighbours: Neighbours) -> dict[str, float]:
    names = ("near", "far", "p_value", "permutations")
    return {name: getattr(neighbours, name) for name in names}


def _write_distance(distance: Distance, folder: Path) -> list[Path]:
    arrays: Arrays = {
        "layers": _to_string_array(distance.layers),
        "pixels": distance.pixels,
        "image_size": distance.image_size,
    }
    rows = [
        [layer, head, pixels]
        for layer, heads in zip(distance.layers, distance.pixels.tolist(), strict=True)
        for head, pixels in enumerate(heads, start=1)
    ]
    return [
        _write_arrays(folder / "distance.npz", {**arrays, "images": distance.images}),
        _write_table(folder / "distance.csv", ["layer", "head", "pixels"], rows),
    ]


def _write_attention(attention: Attention, images: Sequence[str], folder: Path) -> Path:
    large = ("rollout", "rollout_prefix", "heads", "heads_prefix")
    arrays: Arrays = {name: _to_float32(getattr(attention, name)) for name in large}
    for name, words in (("layers", attention.layers), ("prefix", attention.prefix), ("images", images)):
        arrays[name] = _to_string_array(words)
    return _write_arrays(folder / "rollout.npz", {**arrays, "reads": _to_string_array(attention.reads)})


def _write_components(components: Components, images: Sequence[str], folder: Path) -> Path:
    arrays: Arrays = {"values": _to_float32(components.values), "explained": components.explained}
    return _write_arrays(folder / "components.npz", {**arrays, "images": _to_string_array(images)})


def _write_tokens(tokens: Tokens, images: Sequence[str], folder: Path) -> Path:
    """Write `similarity_1`, `similarity_2`, … for the layers in turn: their grids may differ."""
    arrays = {f"similarity_{number}": _to_float32(each) for number, each in enumerate(tokens.similarity, start=1)}
    return _write_arrays(
        folder / "tokens.npz", {**arrays, "layers": _to_string_array(tokens.layers), "images": _to_string_array(images)}
    )


def _write_guesses(images: Sequence[ShownImage], folder: Path) -> list[Path]:
    rows = [
        [image.name, place, label, probability]
        for image in images
        for place, (label, probability) in enumerate(image.guesses, start=1)
    ]
    if rows:
        return [_write_table(folder / "guesses.csv", ["image", "place", "label", "probability"], rows)]
    answers = [[image.name, line.name, line.text, int(line.is_chosen)] for image in images for line in image.answer]
    return [_write_table(folder / "guesses.csv", ["image", "name", "value", "chosen"], answers)] if answers else []


def _write_curves(records: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write a row for each record. Nested fields become columns like `clock.seconds`; missing ones stay empty."""
    flat = [_flatten(record) for record in records]
    names = dict.fromkeys(name for row in flat for name in row)
    columns = [*(name for name in FIRST if name in names), *(name for name in names if name not in FIRST)]
    rows = ([row.get(name, "") for name in columns] for row in flat)
    return [_write_table(folder / "curves.csv", columns, rows)] if flat else []


def _flatten(record: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= _flatten(value, f"{within}{name}.") if isinstance(value, Mapping) else {f"{within}{name}": value}
    return flat


def _to_float32(values: ArrayLike) -> NDArray[np.float32]:
    """Halve the size of large arrays: seven digits suffice for shares and cosines."""
    return np.asarray(values, np.float32)


def _to_string_array(words: str | Sequence[str]) -> NDArray[np.str_]:
    return np.array(
        make_printable(words) if isinstance(words, str) else [make_printable(word) for word in words], dtype=np.str_
    )


def _write_arrays(path: Path, arrays: Arrays) -> Path:
    """Write arrays to one file. NumPy dates its entries to 1980, so the bytes depend on the arrays alone."""
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
