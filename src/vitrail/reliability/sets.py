"""Conformal prediction: sets of labels that hold the right label in a chosen share of images.

For images that chose nothing it is known how much the model believed in the right label. If a new image is drawn as
they were, its own right label is believed in less than most of theirs only as often as chance says. So the labels
that the model believes in at least that much hold the right one, however well or badly the model is calibrated
(Vovk et al. 2005; the score is that of Sadinle, Lei and Wasserman, arXiv 1609.00451).

Shapes: N images that the record was fitted to, B images, K classes.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.reliability.packed import PackedArray

LEAST_IMAGES = 1000
"""Images that a record is fitted to. With 1,000, the coverage at 95% of one fit is within 93.6 to 96.3% in 95 of 100
fits; with 200 it would be within 91.6 to 97.6%."""
MOST_IMAGES = 20_000
"""Images that a record remembers."""

Array = NDArray[Any]


class LabelSets(Config):
    """How much the model believed in the right label of images that chose nothing."""

    beliefs: PackedArray
    """(N,) float32, ascending: see `measure_beliefs`."""

    @classmethod
    def fit(cls, probabilities: Array, is_right: Array) -> Self:
        """Return the record of some images.

        Args:
            probabilities: (N, K) probabilities as the model gives them, float32.
            is_right: (N, K) bool: the labels that are right for an image; one or more of each.

        Raises:
            ConfigError: there are fewer than `LEAST_IMAGES` images.
        """
        if len(probabilities) < LEAST_IMAGES:
            raise ConfigError(
                f"sets of labels need at least {LEAST_IMAGES:,} images that chose nothing, and there are "
                f"{len(probabilities):,}: with fewer, their promise would hold for some fits and not for others"
            )
        beliefs = np.where(is_right, measure_beliefs(probabilities), -np.inf).max(axis=1)
        return cls(beliefs=PackedArray.pack(np.sort(beliefs), "float32"))

    @property
    def images(self) -> int:
        """N."""
        return self.beliefs.shape[0]

    def find_threshold(self, coverage: float) -> float:
        """Return the least belief that a label needs to be in a set."""
        return find_least_belief(self.beliefs.values, coverage)

    def select(self, probabilities: Array, coverage: float) -> NDArray[np.bool_]:
        """(B, K) probabilities → (B, K) bool: the labels of each set. No set is empty."""
        return measure_beliefs(probabilities) >= self.find_threshold(coverage)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.beliefs.shape) != 1:
            raise ValueError(f"beliefs have the shape {self.beliefs.shape}: they are one number for each image")
        values = self.beliefs.values
        if not LEAST_IMAGES <= len(values) <= MOST_IMAGES:
            raise ValueError(f"there are {len(values):,} beliefs: allowed are {LEAST_IMAGES:,} to {MOST_IMAGES:,}")
        if values[0] < 0 or values[-1] > 1 or (np.diff(values) < 0).any():
            raise ValueError("beliefs must ascend from 0 to 1")
        return self


def measure_beliefs(probabilities: Array) -> Array:
    """(B, K) probabilities → (B, K): the same, but 1 for the most probable label, so that it is in every set.

    Of equal labels the first counts as the most probable one, as in every answer.
    """
    beliefs = np.array(probabilities, dtype=np.float32)
    beliefs[np.arange(len(beliefs)), beliefs.argmax(axis=1)] = 1.0
    return beliefs


def find_least_belief(beliefs: Array, coverage: float) -> float:
    """Return the least belief that a label needs to be in a set, from the (N,) ascending beliefs in right labels.

    With k = ⌊(N + 1) · (1 − coverage)⌋ it is the k-th smallest of the N beliefs, and 0 if k is 0. The right label of a
    new image then lies below it with a probability of at most k / (N + 1).
    """
    rank = count_left_out(len(beliefs), coverage)
    return float(beliefs[rank - 1]) if rank else 0.0


def count_left_out(images: int, coverage: float) -> int:
    """Return ⌊(images + 1) · (1 − coverage)⌋, exactly: 0.1 means a tenth, and not its neighbour in binary.

    Raises:
        ConfigError: the coverage is no share between 0 and 1.
    """
    check_coverage(coverage)
    return math.floor((images + 1) * (1 - Fraction(repr(float(coverage)))))


def check_coverage(coverage: float) -> None:
    """Raise a ConfigError if the coverage is no share between 0 and 1."""
    if not 0 < coverage < 1:
        hint = f"; did you mean {coverage / 100:g}?" if 1 < coverage < 100 else ""
        raise ConfigError(f"coverage = {coverage:g}: give a share between 0 and 1, such as 0.95{hint}")
