"""Scores that tell whether an image looks like the images that the model knows.

Three scores, each larger for stranger images:

    softmax      −log of the largest probability (Hendrycks and Gimpel, arXiv 1610.02136)
    energy       −log Σ exp(logit) (Liu et al., arXiv 2010.03759)
    neighbours   the distance of the representation to its k-th nearest among those of known images, in the space of
                 `space.py` (after Sun et al., arXiv 2204.06507, whose space is the direction alone)

An image is called unknown if fewer than 5% of known images look as strange. That promises nothing about how many
strange images are found, which depends on them.

Shapes: N known images, B images, K classes, D the size of the representation, M images in the bank.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from vitrail.config import Config
from vitrail.errors import ConfigError, WeightsError
from vitrail.reliability.packed import PackedArray
from vitrail.reliability.space import MOST_WIDTH, NeighbourSpace

ScoreKind = Literal["softmax", "energy", "neighbours"]
SCORE_KINDS: tuple[ScoreKind, ...] = get_args(ScoreKind)
LEAST_IMAGES = 100
"""Known images that a score is fitted to. Of 100, half are the bank of neighbours, and an image is unknown if at most
one of the other 50 looks as strange."""
MOST_IMAGES = 20_000
"""Known images whose scores are remembered."""
MOST_IN_BANK = 1000
"""Known images whose representations are remembered."""
NEIGHBOURS = 10
"""k."""
ACCEPTED = 0.95
"""The share of known images that are not called unknown."""

Array = NDArray[Any]


class Familiarity(NamedTuple):
    """Whether an image looks like the known ones."""

    is_unknown: bool
    """Whether fewer known images look as strange than are accepted to be called unknown."""
    share: float
    """The share of known images that look at least as strange: small for a strange image."""
    score: float
    """How strange it looks, in the units of the score."""


def describe_familiarity(familiarity: Familiarity) -> dict[str, bool | float]:
    """Return it as two plain values: `unknown`, and `known_share`, with the digits that matter."""
    return {"unknown": familiarity.is_unknown, "known_share": float(f"{familiarity.share:.6g}")}


class UnknownScore(Config):
    """A score, and its values for known images that chose nothing."""

    kind: ScoreKind
    known: PackedArray
    """(N,) float32, ascending: the scores of known images."""
    bank: PackedArray | None = None
    """(M, D) float32: representations of other known images; only for neighbours."""
    neighbours: Annotated[int, Field(ge=1)] = NEIGHBOURS
    """k, or M if that is smaller."""
    accepted: Annotated[float, Field(gt=0, lt=1)] = ACCEPTED
    """The share of known images that are not called unknown."""

    @classmethod
    def fit(cls, kind: ScoreKind, logits: Array | None, embeddings: Array | None, accepted: float = ACCEPTED) -> Self:
        """Return the score with its values for known images that chose nothing.

        For neighbours one half of the images, at most `MOST_IN_BANK`, becomes the bank, and the others are compared
        with it, so that they are as new to it as a new image.

        Args:
            kind: softmax and energy need logits, and neighbours needs embeddings.
            logits: (N, K), in random order.
            embeddings: (N, D), in random order.
            accepted: the share of known images that are not called unknown.

        Raises:
            ConfigError: there are fewer than `LEAST_IMAGES` images.
        """
        rows = logits if kind != "neighbours" else embeddings
        assert rows is not None
        if len(rows) < LEAST_IMAGES:
            raise ConfigError(
                f"a score of unknown images needs at least {LEAST_IMAGES} known images that chose nothing, and there "
                f"are {len(rows)}"
            )
        if kind != "neighbours":
            scores, bank = _score_logits(kind, rows), None
        else:
            size = min(len(rows) // 2, MOST_IN_BANK)
            bank = PackedArray.pack(rows[:size], "float32")
            scores = NeighbourSpace(bank.values).measure_distances(rows[size:], NEIGHBOURS)
        known = PackedArray.pack(np.sort(scores[:MOST_IMAGES]), "float32")
        return cls(kind=kind, known=known, bank=bank, accepted=accepted)

    @property
    def images(self) -> int:
        """N."""
        return self.known.shape[0]

    @property
    def needs_embeddings(self) -> bool:
        """Whether it is computed from the representation and not from logits."""
        return self.kind == "neighbours"

    def measure(self, logits: Array | None, embeddings: Array | None) -> Array:
        """(B, K) logits, or (B, D) embeddings → (B,) float64 scores.

        Raises:
            WeightsError: the representation has another size than the bank's.
        """
        if self.bank is None:
            assert logits is not None
            return _score_logits(self.kind, logits)
        assert embeddings is not None
        if embeddings.shape[1] != self.bank.shape[1]:
            raise WeightsError(
                f"the representation has {embeddings.shape[1]} numbers, and those that it is compared with have "
                f"{self.bank.shape[1]}: `vitrail calibrate` makes new ones"
            )
        return self._space.measure_distances(embeddings, self.neighbours)

    @cached_property
    def _space(self) -> NeighbourSpace:
        assert self.bank is not None
        return NeighbourSpace(self.bank.values)

    def judge(self, score: float) -> Familiarity:
        """Return what a score says about its image."""
        strange = self.images - int(np.searchsorted(self.known.values, np.float32(score)))
        share = (1 + strange) / (self.images + 1)
        return Familiarity(share <= 1 - self.accepted + 1e-12, share, float(score))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.known.shape) != 1 or not LEAST_IMAGES // 2 <= self.known.shape[0] <= MOST_IMAGES:
            raise ValueError(
                f"known has the shape {self.known.shape}: allowed are {LEAST_IMAGES // 2} to {MOST_IMAGES:,} scores"
            )
        if (np.diff(self.known.values) < 0).any():
            raise ValueError("known must ascend")
        if (self.bank is not None) != self.needs_embeddings:
            raise ValueError(f"kind = {self.kind!r}: only neighbours has a bank")
        if self.bank is not None:
            shape = self.bank.shape
            if len(shape) != 2 or not LEAST_IMAGES // 2 <= shape[0] <= MOST_IN_BANK or shape[1] > MOST_WIDTH:
                raise ValueError(
                    f"bank has the shape {shape}: allowed are {LEAST_IMAGES // 2} to {MOST_IN_BANK:,} rows of up to "
                    f"{MOST_WIDTH:,} numbers"
                )
        return self


def measure_auroc(known: Array, unknown: Array) -> float:
    """Return the probability that an unknown image scores higher than a known one; a tie counts half."""
    if not len(known) or not len(unknown):
        raise ConfigError("an AUROC needs known and unknown images")
    ordered = np.sort(known)
    below, up_to = np.searchsorted(ordered, unknown), np.searchsorted(ordered, unknown, side="right")
    return float((below + up_to).mean() / (2 * len(known)))


def _score_logits(kind: ScoreKind, logits: Array) -> Array:
    """(B, K) → (B,) in float64."""
    wide = np.asarray(logits, dtype=np.float64)
    largest = wide.max(axis=1)
    log_sum = np.log(np.exp(wide - largest[:, None]).sum(axis=1))
    scores: Array = log_sum if kind == "softmax" else -(largest + log_sum)
    return scores
