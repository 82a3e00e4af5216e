"""A linear classifier on representations, however it was found.

Shapes: N images, D features, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 4096
"""Images whose scores are in memory at once."""


@dataclass(frozen=True)
class Linear:
    """Scores of classes = weight · features + bias, for features as a model gives them."""

    weight: Tensor
    """(K, D)."""
    bias: Tensor
    """(K,)."""

    def scores(self, values: Tensor) -> Tensor:
        """(N, D) → (N, K), as precise as the weights are."""
        return torch.addmm(self.bias, values.to(self.weight), self.weight.T)

    def predicted(self, values: Tensor) -> Tensor:
        """(N, D) → (N,) the class with the highest score; of equal ones the first."""
        return torch.cat([self.scores(block).argmax(dim=1) for block in values.split(BLOCK)])

    def accuracy(self, values: Tensor, labels: Tensor) -> float:
        """The share of images whose class has the highest score."""
        return (self.predicted(values) == labels.to(self.weight.device)).double().mean().item()


@dataclass(frozen=True)
class Standardisation:
    """Features less their mean, over their deviation. A feature that never changes stays 0: the deviation is made a
    little larger than it is, as in the released code."""

    mean: Tensor
    """(D,)."""
    scale: Tensor
    """(D,)."""

    SMALL = 1e-5

    @classmethod
    def of(cls, values: Tensor) -> Standardisation:
        """By the mean and deviation of (N, D) features."""
        return cls(values.mean(dim=0), values.std(dim=0, correction=0) + cls.SMALL)

    def __call__(self, values: Tensor) -> Tensor:
        """(N, D) → (N, D)."""
        return (values - self.mean) / self.scale

    def folded(self, weight: Tensor, bias: Tensor) -> Linear:
        """The classifier of features as they are, from (K, D) and (K,) of one that takes standardised ones."""
        weight = weight / self.scale
        return Linear(weight, bias - weight @ self.mean)
