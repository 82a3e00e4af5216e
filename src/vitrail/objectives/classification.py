"""Supervised classification: one class of many (softmax), or yes or no for each class (sigmoid).

Rare classes can count more in training: see `vitrail/objectives/balance.py`.

Shapes: B images, K classes.
"""

from __future__ import annotations

import random
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.loader import Batch
from vitrail.data.transforms.mixing import Mixing, mix_batch, one_hot
from vitrail.errors import ConfigError
from vitrail.model.base import ImageModel
from vitrail.objectives.balance import Balance
from vitrail.objectives.base import Outcome, evaluation_outcome
from vitrail.objectives.metrics import Sums, find_hits, sum_and_count, sum_by_class
from vitrail.objectives.supervised import Supervised
from vitrail.system.precision import widen

Loss = Literal["softmax", "sigmoid"]
TOP = 5
"""Evaluations with more classes than this also count labels among so many first guesses."""


class Classification(Supervised):
    """Trains a model to predict labels; measures the loss and the share of right first guesses.

    Training mixes images, smooths targets and balances classes as configured. Evaluation does none of these.
    """

    offsets: Tensor
    weights: Tensor

    def __init__(
        self,
        model: ImageModel,
        *,
        loss: Loss = "softmax",
        label_smoothing: float = 0.0,
        mixing: Mixing | None = None,
        balance: Balance | None = None,
    ) -> None:
        """Take a model with a head.

        Args:
            loss: "softmax": cross entropy of one class of many. "sigmoid": binary cross entropies, summed over classes.
            label_smoothing: the share of every target that is spread evenly over all classes.
            mixing: Mixup and CutMix; none if None.
            balance: how rare classes count more; None for plain training.
        """
        if not model.num_classes:
            raise ConfigError(
                "the model has no head to classify with: give it num_classes, or call model.replace_head(num_classes), "
                "with one class for each label of the data"
            )
        super().__init__(model, model.task)
        if loss not in ("softmax", "sigmoid"):
            raise ConfigError(f"loss = {loss!r}: give softmax (one class of many) or sigmoid (yes and no for each)")
        if not 0 <= label_smoothing < 1:
            raise ConfigError(f"label_smoothing = {label_smoothing}: give a share from 0 up to, not including, 1")
        self.loss: Loss = loss
        self.label_smoothing = label_smoothing
        self.mixing = mixing or Mixing()
        self.balance = balance or Balance()
        if self.balance.kind == "logits" and loss == "sigmoid":
            raise ConfigError(
                'balance = "logits" shifts classes against each other, and loss = "sigmoid" asks for each alone: give '
                'balance = "loss", or loss = "softmax"'
            )
        self._add_buffers()

    def _add_buffers(self) -> None:
        """Keep what balances the classes as buffers: they are on the device, and no part of the weights."""
        wanted = {"offsets": self.balance.kind == "logits", "weights": self.balance.kind == "loss"}
        for name, is_wanted in wanted.items():
            if not is_wanted:
                continue
            values = torch.from_numpy(getattr(self.balance, name)).float()
            if len(values) != self.model.num_classes:
                raise ConfigError(f"there are counts of {len(values)} classes, and the model has another number")
            self.register_buffer(name, values, persistent=False)

    def inputs(self, batch: Batch, key: int) -> tuple[Tensor, Tensor]:
        """Return normalised images, mixed if configured, and their labels (B,) or targets (B, K)."""
        images, targets = self.images(batch), batch.labels
        if self.mixing.mixup or self.mixing.cutmix:
            return mix_batch(images, targets, self.model.num_classes, self.mixing, random.Random(key))
        return images, targets

    def learn(self, images: Tensor, *targets: Tensor) -> Outcome:
        """Compute the outcome of a training step from `inputs`."""
        (target,) = targets
        logits = widen(self.model(images))
        losses = self.training_losses(logits, target)
        likeliest = target if target.ndim == 1 else target.argmax(dim=1)
        sums = {"loss": sum_and_count(losses), "accuracy": sum_and_count(find_hits(logits, likeliest))}
        return Outcome(losses.mean(), sums)

    def evaluate(self, batch: Batch) -> Outcome:
        """Compute the outcome of an evaluation batch, also of the first few guesses if there are many classes."""
        logits = widen(self.model(self.images(batch)))
        losses = self.losses(logits, batch.labels)
        sums: Sums = {
            "loss": sum_and_count(losses, batch.mask),
            "accuracy": sum_and_count(find_hits(logits, batch.labels), batch.mask),
        }
        if self.model.num_classes > TOP:
            sums[f"top{TOP}"] = sum_and_count(find_hits(logits, batch.labels, TOP), batch.mask)
        if self.balance.is_wanted:
            hits = find_hits(logits, batch.labels)
            sums["balanced_accuracy"] = sum_by_class(hits, batch.labels, self.model.num_classes, batch.mask)
        return evaluation_outcome(sums)

    def training_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the (B,) losses of (B, K) logits and (B,) labels or (B, K) targets: smoothed, and balanced.

        Offsets are added to logits before anything else. A weight is that of an image's class, and stands before its
        smoothed loss; of a mixed image each part has the weight of its own class.
        """
        if self.balance.kind == "loss":
            shares = one_hot(targets, logits.shape[1]) if targets.ndim == 1 else targets
            return self._weighted_losses(logits, shares * self.weights)
        if self.balance.kind == "logits":
            logits = logits + self.offsets
        return self.losses(logits, targets, self.label_smoothing)

    def _weighted_losses(self, logits: Tensor, masses: Tensor) -> Tensor:
        """Return the (B,) losses for (B, K) masses: how much each class of an image counts."""
        mass = masses.sum(dim=1, keepdim=True)
        smoothed = masses * (1 - self.label_smoothing) + mass * (self.label_smoothing / masses.shape[1])
        if self.loss == "softmax":
            return F.cross_entropy(logits, smoothed, reduction="none")
        return sigmoid_losses(logits, smoothed, mass=mass)

    def losses(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the (B,) losses of (B, K) logits and (B,) labels or (B, K) targets that sum to 1."""
        if self.loss == "softmax":
            return F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none")
        return sigmoid_losses(logits, targets, smoothing)


def sigmoid_losses(logits: Tensor, targets: Tensor, smoothing: float = 0.0, mass: Tensor | float = 1.0) -> Tensor:
    """Return (B,) binary cross entropies, summed over the classes, of (B, K) logits and (B,) labels or (B, K) targets.

    The sum is what the released pre-training on ImageNet-21k uses; a mean over thousands of classes would be tiny.
    `mass` is how much an image counts, to which its targets sum.
    """
    classes = logits.shape[1]
    targets = one_hot(targets, classes) if targets.ndim == 1 else targets
    targets = targets * (1 - smoothing) + smoothing / classes
    # torch's own function subtracts two large numbers: it is 7% off for a logit of −12 and target 0.
    return -(targets * F.logsigmoid(logits) + (mass - targets) * F.logsigmoid(-logits)).sum(dim=1)
