"""ReaL labels: what people see in ImageNet's validation images, after Beyer and others, "Are we done with ImageNet?".

An image has any number of labels. A first guess is right if it is one of them; images without any are not counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.data.sources.source import shown
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.labels import Pairs, small_text

IMAGES = 50_000
"""Of ImageNet's validation part."""
CLASSES = 1000
MOST_BYTES = 16_000_000
"""Of a file of labels; the published one has 0.4 million."""
_NUMBER = re.compile(r"ILSVRC2012_val_([0-9]{8})(?![0-9])", re.IGNORECASE)


@dataclass(frozen=True)
class Real:
    """The labels of images by the numbers in their names."""

    labels: dict[int, tuple[int, ...]]

    def of(self, name: str) -> tuple[int, ...] | None:
        """The labels of an image by its name or path, in a shard or not; None where the name does not tell them."""
        number = image_number(name)
        return None if number is None else self.labels.get(number)


def read_real(path: str | Path) -> Real:
    """From JSON: a list for each of the 50,000 images in the order of their names, or an object of names and lists."""
    file = Path(path)
    try:
        read = json.loads(small_text(file, MOST_BYTES), object_pairs_hook=Pairs)
    except (ValueError, RecursionError):
        raise DataError(f"{shown(file)} is no JSON: ReaL labels are the file real.json of their authors") from None
    if isinstance(read, Pairs):
        return Real(_by_name(file, read))
    if not isinstance(read, list) or len(read) != IMAGES:
        told = f"a list of {len(read):,}" if isinstance(read, list) else "no list"
        raise DataError(
            f"{shown(file)} holds {told}: ReaL labels are a list of {IMAGES:,} lists, or an object from image names to "
            "lists"
        )
    return Real({number: _checked(file, number, labels) for number, labels in enumerate(read, start=1)})


def image_number(name: str) -> int | None:
    """293 of …/ILSVRC2012_val_00000293.JPEG; None where the last part of a name has no such number, or two."""
    found = set(_NUMBER.findall(re.split(r"[/\\:]", name)[-1]))
    return int(found.pop()) if len(found) == 1 else None


def score(real: Real, names: Iterable[str], predictions: Iterable[int | None]) -> tuple[int, int, int]:
    """How many first guesses are right, of how many images, and how many images were left out, having no labels.

    `predictions`: numbers of ImageNet's classes, one for each name; None for a guess that is none of them.
    """
    hits = counted = empty = 0
    for name, prediction in zip(names, predictions, strict=True):
        labels, guess = real.of(name), None if prediction is None else int(prediction)
        if labels is None:
            raise DataError(
                f"{name} has no ReaL labels: they are found by names such as ILSVRC2012_val_00000293.JPEG, so use "
                "ImageNet's validation images under their own names"
            )
        if guess is not None and not 0 <= guess < CLASSES:
            raise ConfigError(f"class {guess} is not one of ImageNet's {CLASSES}, which ReaL labels are made of")
        hits += guess in labels
        counted += bool(labels)
        empty += not labels
    return hits, counted, empty


def _by_name(file: Path, pairs: Pairs) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for name, labels in pairs:
        number = image_number(name)
        if number is None or not 1 <= number <= IMAGES:
            raise DataError(f"{shown(file)}: {shown(name[:100])!r} is no name such as ILSVRC2012_val_00000293.JPEG")
        if number in found:
            raise DataError(f"{shown(file)}: image {number} is there twice")
        found[number] = _checked(file, number, labels)
    return found


def _checked(file: Path, number: int, labels: Any) -> tuple[int, ...]:
    if type(labels) is not list or not all(type(label) is int and 0 <= label < CLASSES for label in labels):
        raise DataError(
            f"{shown(file)}: what it holds for image {number} is not a list of class numbers from 0 to {CLASSES - 1}"
        )
    return tuple(labels)
