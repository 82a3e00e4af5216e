"""Let rare classes count as much as common ones: offsets of logits or weights of images from the counts of classes.

    logits   logit adjustment (Menon et al., arXiv 2007.07314): strength · log(share of the class) is added to the
             logits in training only. The model learns what an image shows; the offsets hold how common that is.
    loss     class-balanced loss (Cui et al., arXiv 1901.05555): the loss of an image is divided by the effective
             number of images of its class, (1 − β^n) / (1 − β): a second image of a class says less that is new.

Either way the logits of the trained model are those of a world where every class is equally frequent.

Shapes: K classes. All of it is computed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import ConfigError

BalanceKind = Literal["none", "loss", "logits"]
BETA = 0.9999
"""β of the class-balanced loss, as its authors use it for long-tailed CIFAR-10."""
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Balance:
    """How a classification makes up for classes of different sizes."""

    kind: BalanceKind = "none"
    strength: float = 1.0
    """0 is as good as "none". Of logits: τ, the factor of the offsets. Of loss: the power of the weights."""
    counts: Sequence[int] = ()
    """Training images of each class."""
    drawn: Sequence[int] | None = None
    """How often an epoch shows images of each class, if it repeats some. Only what it leaves uneven is made up for."""

    def __post_init__(self) -> None:
        if self.kind not in ("none", "loss", "logits"):
            raise ConfigError(f"balance = {self.kind!r}: give none, loss or logits")
        if self.strength < 0:
            raise ConfigError(f"balance_strength = {self.strength:g}: give a number from 0 on, such as 1")
        if self.kind != "none" and not len(self.counts):
            raise ConfigError(f'balance = "{self.kind}" needs the number of images of each class')

    @property
    def is_wanted(self) -> bool:
        """Whether rare classes count more than in plain training, by the loss or by sampling."""
        return self.kind != "none" or self.drawn is not None

    @property
    def offsets(self) -> Values:
        """(K,) what is added to the logits in training."""
        return compute_logit_offsets(self._shown, self.strength)

    @property
    def weights(self) -> Values:
        """(K,) the factors of the losses in training."""
        return compute_loss_weights(self._shown, self.strength)

    @property
    def _shown(self) -> Sequence[int]:
        return self.counts if self.drawn is None else self.drawn


def compute_logit_offsets(counts: Sequence[int], strength: float = 1.0) -> Values:
    """Return (K,) offsets: strength · log(share of each class). A class without images counts as if it had one."""
    sizes = _at_least_one(counts)
    offsets: Values = strength * (np.log(sizes) - np.log(sizes.sum()))
    return offsets


def compute_loss_weights(counts: Sequence[int], strength: float = 1.0, beta: float = BETA) -> Values:
    """Return (K,) weights: one over the effective number of images of each class, to the power of `strength`.

    Their mean over the images is 1, so that a learning rate means the same as without them. (The authors let the mean
    over classes be 1; with 100 times as many images in one class as in another the loss is then a sixth.)
    """
    sizes = _at_least_one(counts)
    effective = -np.expm1(sizes * np.log(beta)) / (1 - beta)
    weights = effective**-strength
    scaled: Values = weights * (sizes.sum() / (weights * sizes).sum())
    return scaled


def _at_least_one(counts: Sequence[int]) -> Values:
    return np.maximum(np.asarray(counts, np.float64), 1)
