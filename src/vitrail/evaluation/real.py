"""ReaL labels: what people see in ImageNet's validation images (Beyer et al., "Are we done with ImageNet?").

An image has any number of labels. A guess is right if it is one of them. Images without labels are not counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.data.sources.source import make_printable, read_small_text
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.labels import JsonPairs

IMAGES = 50_000
"""Images in ImageNet's validation part."""
CLASSES = 1000
MOST_BYTES = 16_000_000
"""Largest file of labels that is read; the published file has 0.4 million bytes."""
_NUMBER = re.compile(r"ILSVRC2012_val_([0-9]{8})(?![0-9])", re.IGNORECASE)


@dataclass(frozen=True)
class RealLabels:
    """The labels of the images, by the number in the image's name."""

    labels: dict[int, tuple[int, ...]]

    def find(self, name: str) -> tuple[int, ...] | None:
        """Return the labels of an image by its name or path; None if the name has no number or it is unknown."""
        number = parse_image_number(name)
        return None if number is None else self.labels.get(number)


def read_real_labels(path: str | Path) -> RealLabels:
    """Read a JSON file: one list per image, in the order of the 50,000 names, or an object from names to lists.

    Raises:
        DataError: the file cannot be read or does not hold such labels.
    """
    file = Path(path)
    try:
        content = json.loads(read_small_text(file, MOST_BYTES), object_pairs_hook=JsonPairs)
    except (ValueError, RecursionError):
        raise DataError(f"{make_printable(file)} is no JSON: give the file real.json of the authors") from None
    if isinstance(content, JsonPairs):
        return RealLabels(_read_named_labels(file, content))
    if not isinstance(content, list) or len(content) != IMAGES:
        kind = f"a list of {len(content):,}" if isinstance(content, list) else "no list"
        raise DataError(
            f"{make_printable(file)} holds {kind}: ReaL labels are a list of {IMAGES:,} lists, or an object from image "
            "names to lists"
        )
    return RealLabels({number: _check_labels(file, number, labels) for number, labels in enumerate(content, start=1)})


def parse_image_number(name: str) -> int | None:
    """Return 293 for …/ILSVRC2012_val_00000293.JPEG; None if the last part of the name has no such number, or two."""
    numbers = set(_NUMBER.findall(re.split(r"[/\\:]", name)[-1]))
    return int(numbers.pop()) if len(numbers) == 1 else None


def count_real_hits(real: RealLabels, names: Iterable[str], guesses: Iterable[int | None]) -> tuple[int, int, int]:
    """Count right guesses.

    Args:
        real: the labels.
        names: the images' names or paths.
        guesses: for each name, a class number of ImageNet; None for a guess that is no class of ImageNet.

    Returns:
        The number of right guesses, of images with labels, and of images without labels, which are not counted.
    """
    hits = counted = empty = 0
    for name, prediction in zip(names, guesses, strict=True):
        labels, guess = real.find(name), None if prediction is None else int(prediction)
        if labels is None:
            raise DataError(
                f"{name} has no ReaL labels: they are found by names such as ILSVRC2012_val_00000293.JPEG, so use "
                "ImageNet's validation images under their own names"
            )
        if guess is not None and not 0 <= guess < CLASSES:
            raise ConfigError(f"class {guess} is not one of ImageNet's {CLASSES}: ReaL labels know only these")
        hits += guess in labels
        counted += bool(labels)
        empty += not labels
    return hits, counted, empty


def _read_named_labels(file: Path, pairs: JsonPairs) -> dict[int, tuple[int, ...]]:
    where, labels_by_number = make_printable(file), dict[int, tuple[int, ...]]()
    for name, labels in pairs:
        number = parse_image_number(name)
        if number is None or not 1 <= number <= IMAGES:
            raise DataError(f"{where}: {make_printable(name[:100])!r} is no name like ILSVRC2012_val_00000293.JPEG")
        if number in labels_by_number:
            raise DataError(f"{where}: image {number} is there twice")
        labels_by_number[number] = _check_labels(file, number, labels)
    return labels_by_number


def _check_labels(file: Path, number: int, labels: Any) -> tuple[int, ...]:
    if type(labels) is not list or not all(type(label) is int and 0 <= label < CLASSES for label in labels):
        raise DataError(f"{make_printable(file)}: image {number} has no list of classes from 0 to {CLASSES - 1}")
    return tuple(labels)
