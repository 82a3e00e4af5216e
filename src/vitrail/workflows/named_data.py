"""Data sets of every kind with a name for a person, a run folder and a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from vitrail.data.open import Data, list_splits, name_data, open_data
from vitrail.data.sources.source import Source


class NamedData(NamedTuple):
    """A data set and what it is called."""

    name: str
    source: Data | None
    """The images, if no name opens them."""

    @property
    def data(self) -> Data:
        """What `open_data` takes."""
        return self.name if self.source is None else self.source

    def list_splits(self) -> tuple[str, ...]:
        """Return the names of the splits; empty if there are none."""
        return list_splits(self.data)

    def open_training_images(self) -> Source:
        """Open the split "train", or everything if there are no splits."""
        return open_data(self.data, "train") if self.list_splits() else open_data(self.data)


def make_named_data(data: Data) -> NamedData:
    """Return a data set with its name. A list is opened, and called after the number of its images."""
    if isinstance(data, str | Path):
        return NamedData(str(data), None)
    return NamedData(name_data(data), data if isinstance(data, Mapping) else open_data(data))
