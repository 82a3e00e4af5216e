"""Small images that show a digit by their brightness, with the targets of each task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.sources.annotated import AnnotatedSource
from vitrail.data.sources.list_source import ListSource
from vitrail.tasks.registry import find_task

ROUND = (0, 6, 8, 9)


def describe_digit(digit: int) -> dict[str, Any]:
    """The cells of a digit, in columns for every task."""
    tags = [name for name, has in (("even", digit % 2 == 0), ("large", digit > 4), ("round", digit in ROUND)) if has]
    size = ("small", "middle", "large")[digit // 4]
    return {
        "tags": "|".join(tags),
        "value": digit,
        "half": digit / 2,
        "size": size,
        "parity": ("even", "odd")[digit % 2],
    }


COLUMNS = {
    "labels": ("size",),
    "tags": ("tags",),
    "numbers": ("value", "half"),
    "levels": ("value",),
    "attributes": ("size", "parity"),
}


def show_digit(digit: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """16 × 16 pixels: the left half is the brighter the larger the digit is, the right half is bright if it is odd."""
    pixels = np.full((16, 16), 25.0 * digit)
    pixels[:, 8:] = 200 * (digit % 2)
    return (pixels + rng.normal(0, 8, pixels.shape)).clip(0, 255).astype(np.uint8)


def digits_for(kind: str, count: int = 200) -> AnnotatedSource:
    """So many images, with the targets of a kind of task."""
    rng = np.random.default_rng(0)
    digits = rng.integers(10, size=count).tolist()
    rows = [{name: describe_digit(digit)[name] for name in COLUMNS[kind]} for digit in digits]
    task = find_task(kind).learn({name: [row[name] for row in rows] for name in COLUMNS[kind]})
    return AnnotatedSource(ListSource([(show_digit(digit, rng), digit) for digit in digits]), task, rows)


def write_table(folder: Path, kind: str, count: int = 60) -> Path:
    """A CSV with so many images beside it, and the targets of a kind of task."""
    folder.mkdir(parents=True)
    rng, lines = np.random.default_rng(0), [",".join(["image", *COLUMNS[kind]])]
    for number in range(count):
        digit = number % 10
        Image.fromarray(show_digit(digit, rng)).convert("RGB").save(folder / f"{number:03}.png")
        cells = describe_digit(digit)
        lines.append(",".join([f"{number:03}.png", *(str(cells[column]) for column in COLUMNS[kind])]))
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder / "labels.csv"
