"""Find columns that tell splits and are not called split, so that images to test on are not trained on in silence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from vitrail.data.sources.source import SPLITS
from vitrail.errors import DataError

_SPLIT_OF_WORD = {word: split for split, words in SPLITS.items() for word in words}


class SplitColumnFinder:
    """Finds the columns whose filled cells are all names of splits, and of at least two different ones."""

    def __init__(self) -> None:
        self._words: dict[str, dict[str, str]] = {}
        """For each column that may tell splits, how it writes each of them."""
        self._others: set[str] = set()
        """The columns that hold something else."""

    def add(self, row: Mapping[str, object]) -> None:
        """Look at the cells of a row, by column."""
        for column, cell in row.items():
            if column in self._others:
                continue
            word = cell.strip() if isinstance(cell, str) else cell
            if word is None or word == "":
                continue
            split = _SPLIT_OF_WORD.get(word.lower()) if isinstance(word, str) else None
            if split is None:
                self._others.add(column)
            else:
                self._words.setdefault(column, {}).setdefault(split, str(word))

    def has_excluded(self, columns: Collection[str]) -> bool:
        """Return whether all these columns hold something else, so that no further row needs to be read."""
        return self._others.issuperset(columns)

    def find(self) -> dict[str, list[str]]:
        """Return how each column that tells splits writes them."""
        return {
            column: [words[split] for split in SPLITS if split in words]
            for column, words in self._words.items()
            if column not in self._others and len(words) > 1
        }


def refuse_split_columns(title: str, found: Mapping[str, Sequence[str]], learned: Collection[str]) -> None:
    """Raise a DataError if a column that is not learned tells splits, and is not called split.

    Args:
        title: the name of the table.
        found: how each such column writes the splits.
        learned: the columns to learn, which may hold any names.
    """
    for column, words in found.items():
        if column not in learned:
            holds = f"{', '.join(words[:-1])} and {words[-1]}"
            raise DataError(f"{title}: the column {column!r} holds {holds}: call it split, or leave it out")
