"""The built-in digits with the targets of each task."""

from __future__ import annotations

from typing import Any

import numpy as np

from vitrail.data.open import open_data
from vitrail.data.sources.annotated import AnnotatedSource
from vitrail.data.sources.source import Source, Subset
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


def digits_for(kind: str, count: int = 200) -> AnnotatedSource:
    """So many digits, with the targets of a kind of task."""
    images: Source = Subset(open_data("digits"), np.arange(count))
    cells = [describe_digit(int(label)) for label in images.labels(0, count)]
    rows = [{name: row[name] for name in COLUMNS[kind]} for row in cells]
    task = find_task(kind).learn({name: [row[name] for row in rows] for name in COLUMNS[kind]})
    return AnnotatedSource(images, task, rows)
