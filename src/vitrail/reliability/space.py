"""The space in which an image's nearest neighbours among known images are found.

A representation y has two parts there, whose squared distances are added:

- its direction, y / |y|: what kind of picture it is, however much there is in it;
- its whitened value, W (y − mean), where all directions in which known images differ count alike, also the faint ones
  in which only strange images differ.

Each part is scaled so that two known images have a mean squared distance of 1 in it. Measured (docs/reliability.md),
the first part finds some strange images best and the second others, and both together are near the better one.

Shapes: M known images of the bank, B images, D the size of the representation.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_WIDTH = 4096
"""The largest D: whitening takes D³ operations."""
BLOCK = 1024
"""Images at a time."""
TINY = 1e-12

Array = NDArray[Any]


class NeighbourSpace:
    """A bank of known representations, and the space that it spans."""

    def __init__(self, bank: Array) -> None:
        wide = np.asarray(bank, dtype=np.float64)
        self.mean = wide.mean(axis=0)
        variances, axes = np.linalg.eigh(estimate_covariance(wide))
        largest = max(float(variances[-1]), TINY)
        whitening = axes / np.sqrt(np.maximum(variances, TINY * largest))
        self.whitening = whitening / _typical_distance((wide - self.mean) @ whitening)
        self.direction_scale = 1 / _typical_distance(_point(wide))
        self.rows = self.place(wide)

    def place(self, embeddings: Array) -> Array:
        """(B, D) → (B, 2 D): the points of representations, whitened values first."""
        wide = np.asarray(embeddings, dtype=np.float64)
        return np.concatenate([(wide - self.mean) @ self.whitening, _point(wide) * self.direction_scale], axis=1)

    def measure_distances(self, embeddings: Array, k: int) -> Array:
        """(B, D) → (B,): distances to the k-th nearest row of the bank, or to the farthest if there are fewer rows."""
        place = min(k, len(self.rows)) - 1
        distances = np.empty(len(embeddings))
        for start in range(0, len(embeddings), BLOCK):
            points = self.place(embeddings[start : start + BLOCK])
            squares = (points**2).sum(axis=1)[:, None] + (self.rows**2).sum(axis=1) - 2 * points @ self.rows.T
            nearest = np.partition(squares, place, axis=1)[:, place]
            distances[start : start + BLOCK] = np.sqrt(np.maximum(nearest, 0))
        return distances


def estimate_covariance(rows: Array) -> Array:
    """(M, D) → (D, D): the covariance, drawn towards a sphere as few rows require (Ledoit and Wolf, 2004)."""
    count, width = rows.shape
    centred = rows - rows.mean(axis=0)
    covariance = centred.T @ centred / count
    sphere = float(np.trace(covariance)) / width
    distance = float(((covariance - sphere * np.eye(width)) ** 2).sum())
    noise = (float(((centred**2).sum(axis=1) ** 2).sum()) / count - float((covariance**2).sum())) / count
    share = min(noise / distance, 1.0) if distance > 0 else 1.0
    drawn: Array = (1 - share) * covariance + share * sphere * np.eye(width)
    return drawn


def _typical_distance(rows: Array) -> float:
    """(M, D) → the root of the mean squared distance of two rows."""
    spread = float(((rows - rows.mean(axis=0)) ** 2).sum(axis=1).mean())
    return math.sqrt(2 * max(spread, TINY))


def _point(rows: Array) -> Array:
    """(B, D) → (B, D) of length 1; a row of zeros stays."""
    pointed: Array = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    return pointed
