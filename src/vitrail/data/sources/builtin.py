"""The built-in data set: 1,797 real handwritten digits of 8×8 pixels, which scikit-learn contains."""

from __future__ import annotations

import numpy as np
import torch

from vitrail.data.order import Indices
from vitrail.data.sources.source import Sample, Source

MAX_BRIGHTNESS = 16


class DigitsSource(Source):
    """Grey images of shape (1, 8, 8); 0 is black."""

    classes = tuple("0123456789")

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        self.pixels = torch.from_numpy((digits.images * 255 / MAX_BRIGHTNESS).round().astype(np.uint8))[:, None]
        self.digit_labels: Indices = digits.target.astype(np.int64)

    def __len__(self) -> int:
        return len(self.digit_labels)

    def read(self, index: int) -> Sample:
        return Sample(self.pixels[index], int(self.digit_labels[index]))

    def name(self, index: int) -> str:
        return f"digits:{index}"

    def labels(self, start: int, stop: int) -> Indices:
        return self.digit_labels[start:stop]
