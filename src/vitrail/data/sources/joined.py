"""Several sources as one, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitrail.data.order import Indices
from vitrail.data.sources.source import Sample, Source


class JoinedSource(Source):
    """The samples of several sources with the same classes."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self.parts, self.classes = tuple(parts), parts[0].classes
        self.starts = np.cumsum([0, *map(len, parts)])
        self.block, self.window = max(part.block for part in parts), max(part.window for part in parts)
        self.reads_in_threads = all(part.reads_in_threads for part in parts)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, index: int) -> Sample:
        part, place = self._find(index)
        return part.read(place)

    def name(self, index: int) -> str:
        part, place = self._find(index)
        return part.name(place)

    def identity(self, index: int) -> str:
        part, place = self._find(index)
        return part.identity(place)

    def labels(self, start: int, stop: int) -> Indices:
        ranges = [(max(start - first, 0), stop - first) for first in self.starts[:-1].tolist()]
        parts = [
            part.labels(low, min(high, len(part)))
            for part, (low, high) in zip(self.parts, ranges, strict=True)
            if low < min(high, len(part))
        ]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _find(self, index: int) -> tuple[Source, int]:
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.parts[number], index - int(self.starts[number])
