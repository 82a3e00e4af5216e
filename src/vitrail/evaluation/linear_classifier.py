"""A linear classifier on features, however its weights were found.

Shapes: N images, D features, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 4096
"""Images whose scores are in memory at once."""


@dataclass(frozen=True)
class LinearClassifier:
    """Scores of classes = weight · features + bias, for features that are not standardised."""

    weight: Tensor
    """(K, D)."""
    bias: Tensor
    """(K,)."""

    def scores(self, values: Tensor) -> Tensor:
        """(N, D) → (N, K), in the precision of the weights."""
        return torch.addmm(self.bias, values.to(self.weight), self.weight.T)

    def predict(self, values: Tensor) -> Tensor:
        """(N, D) → (N,) the class with the highest score; of equal scores the first class."""
        return torch.cat([self.scores(block).argmax(dim=1) for block in values.split(BLOCK)])

    def accuracy(self, values: Tensor, labels: Tensor) -> float:
        """Return the share of images whose label has the highest score."""
        return (self.predict(values) == labels.to(self.weight.device)).double().mean().item()


@dataclass(frozen=True)
class Standardisation:
    """Subtracts the mean of features and divides by their deviation.

    A small constant is added to the deviation, as in the released code, so that a constant feature becomes 0.
    """

    mean: Tensor
    """(D,)."""
    scale: Tensor
    """(D,)."""

    SMALL = 1e-5

    @classmethod
    def from_features(cls, values: Tensor) -> Standardisation:
        """Take the mean and deviation of (N, D) features."""
        return cls(values.mean(dim=0), values.std(dim=0, correction=0) + cls.SMALL)

    def __call__(self, values: Tensor) -> Tensor:
        """(N, D) → (N, D)."""
        return (values - self.mean) / self.scale

    def fold_into(self, weight: Tensor, bias: Tensor) -> LinearClassifier:
        """Turn a classifier of standardised features, (K, D) and (K,), into one of the features themselves."""
        weight = weight / self.scale
        return LinearClassifier(weight, bias - weight @ self.mean)
