"""The data set that is always there: 1,797 real handwritten digits of 8×8 pixels, inside scikit-learn."""

from __future__ import annotations

import numpy as np
import torch

from vitrail.data.order import Indices
from vitrail.data.sources.source import Sample, Source

BRIGHTEST = 16


class DigitsSource(Source):
    """Grey images, 0 is black."""

    classes = tuple("0123456789")

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        found = load_digits()
        self.pixels = torch.from_numpy((found.images * 255 / BRIGHTEST).round().astype(np.uint8))[:, None]
        self.targets: Indices = found.target.astype(np.int64)

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, index: int) -> Sample:
        """(1, 8, 8) pixels."""
        return Sample(self.pixels[index], int(self.targets[index]))

    def name(self, index: int) -> str:
        """Its number."""
        return f"digits:{index}"

    def labels(self, start: int, stop: int) -> Indices:
        """All of them are in memory."""
        return self.targets[start:stop]
