"""Leave samples out of a pack whose names stand in a list, such as those that repeat images of a test set."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.data.open import Data, name_data, open_splits
from vitrail.data.sample_names import find_data_folder, identify_sample
from vitrail.data.sources.source import Source, Subset, read_small_text
from vitrail.errors import ConfigError, DataError
from vitrail.system.results import format_count

MOST_BYTES = 4 << 30
"""The largest list that is read."""
NAMES_SHOWN = 5
"""How many names an error lists."""


def read_list(path: Path) -> frozenset[str]:
    """Return the names in a list, one per line. Empty lines are ignored.

    Raises:
        DataError: the file cannot be read, or is no UTF-8 text.
    """
    lines = read_small_text(path, MOST_BYTES).replace("\r\n", "\n").split("\n")
    return frozenset(line for line in lines if line)


def hash_list(names: frozenset[str]) -> str:
    """Return what identifies a list in dataset.json, whatever the order of its lines."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


def leave_out(data: Data, sources: dict[str, Source], names: frozenset[str], title: str) -> dict[str, Source]:
    """Return the sources without the samples that a list names.

    A name that the data does not have is an error: the list is then of other data, or of another copy, and what should
    be left out would silently stay. If only one split is packed, names of the others are allowed.

    Args:
        data: the data set.
        sources: its splits that are packed.
        names: the names, as `data check --against` writes them, or as messages show them.
        title: what to call the list in messages.

    Raises:
        ConfigError: the data has no samples of some names.
        DataError: nothing of a split would be left.
    """
    rest, found = {}, set[str]()
    for split, source in sources.items():
        marks, here = _find_names(data, source, names)
        if marks.all() and len(marks):
            raise DataError(f"{title} names all {format_count(len(marks), 'sample')} of {split}: nothing would be left")
        rest[split] = source if not marks.any() else Subset(source, np.flatnonzero(~marks))
        found |= here
    if missing := names - found:
        for split, source in open_splits(data).items():
            if split not in sources:
                missing -= _find_names(data, source, missing)[1]
    if missing:
        shown = ", ".join(sorted(missing)[:NAMES_SHOWN]) + (" …" if len(missing) > NAMES_SHOWN else "")
        raise ConfigError(
            f"{title} has {format_count(len(missing), 'name')} that {name_data(data)} does not have: {shown}; give the "
            "list that `vitrail data check --against` wrote for this data, or delete these lines"
        )
    return rest


def _find_names(data: Data, source: Source, names: frozenset[str]) -> tuple[NDArray[np.bool_], set[str]]:
    """Return (samples,) whether a sample of a split is named, and the names that were found."""
    folder, marks, found = find_data_folder(data), np.zeros(len(source), dtype=bool), set()
    for index in range(len(source)):
        ours = {identify_sample(source, index, folder), source.display_name(index)} & names
        marks[index] = bool(ours)
        found |= ours
    return marks, found
