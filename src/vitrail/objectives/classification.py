"""Supervised classification: one class of many (softmax), or yes and no for each class (sigmoid).

Shapes: B images, K classes.
"""

from __future__ import annotations

import random
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.data.loader import Batch
from vitrail.data.transforms.mixing import Mixing, mix_batch, one_hot
from vitrail.errors import ConfigError
from vitrail.model.base import ImageModel
from vitrail.objectives.base import Objective, Outcome, evaluated
from vitrail.objectives.metrics import Sums, hits, sum_and_count

Loss = Literal["softmax", "sigmoid"]
TOP = 5
"""Evaluations also count labels among so many first guesses, where there are more classes than that."""


class Classification(Objective):
    """Images and labels in; the loss, and how many first guesses are right.

    Training mixes images and smooths targets as asked. Evaluation does neither: its loss is the plain one.
    """

    better = "accuracy"

    def __init__(
        self,
        model: ImageModel,
        *,
        loss: Loss = "softmax",
        label_smoothing: float = 0.0,
        mixing: Mixing | None = None,
    ) -> None:
        """A model with a head, and how it is trained.

        Args:
            loss: "softmax": cross entropy of one class of many. "sigmoid": binary cross entropies, summed over classes.
            label_smoothing: the share of every target that is spread evenly over all classes.
            mixing: Mixup and CutMix; none if None.
        """
        super().__init__(model)
        if not model.num_classes:
            raise ConfigError(
                "the model has no head to classify with: give it num_classes, or call model.replace_head(num_classes), "
                "with one class for each label of the data"
            )
        if loss not in ("softmax", "sigmoid"):
            raise ConfigError(f"loss = {loss!r}: give softmax (one class of many) or sigmoid (yes and no for each)")
        if not 0 <= label_smoothing < 1:
            raise ConfigError(f"label_smoothing = {label_smoothing}: give a share from 0 up to, not including, 1")
        self.loss: Loss = loss
        self.label_smoothing = label_smoothing
        self.mixing = mixing or Mixing()

    def forward(self, batch: Batch, key: int) -> Outcome:
        """Mean loss; sums of "loss" and "accuracy", in evaluation also of "top5". `key` decides what is mixed."""
        return self._training(batch, key) if self.training else self._evaluation(batch)

    def parts_to_compile(self) -> list[nn.Module]:
        """The model, which is called whole."""
        return [self.model]

    def _training(self, batch: Batch, key: int) -> Outcome:
        return self.learn(*self.inputs(batch, key))

    def inputs(self, batch: Batch, key: int) -> tuple[Tensor, ...]:
        """Normalised images, mixed where that is asked for, and their labels (B,) or targets (B, K)."""
        images, targets = self.images(batch), batch.labels
        if self.mixing.mixup or self.mixing.cutmix:
            return mix_batch(images, targets, self.model.num_classes, self.mixing, random.Random(key))
        return images, targets

    def learn(self, *inputs: Tensor) -> Outcome:
        """What a step of training computes."""
        images, targets = inputs
        logits = self.model(images).float()
        losses = self.losses(logits, targets, self.label_smoothing)
        likeliest = targets if targets.ndim == 1 else targets.argmax(dim=1)
        sums = {"loss": sum_and_count(losses), "accuracy": sum_and_count(hits(logits, likeliest))}
        return Outcome(losses.mean(), sums)

    def _evaluation(self, batch: Batch) -> Outcome:
        logits = self.model(self.images(batch)).float()
        losses = self.losses(logits, batch.labels)
        sums: Sums = {
            "loss": sum_and_count(losses, batch.mask),
            "accuracy": sum_and_count(hits(logits, batch.labels), batch.mask),
        }
        if self.model.num_classes > TOP:
            sums[f"top{TOP}"] = sum_and_count(hits(logits, batch.labels, TOP), batch.mask)
        return evaluated(sums)

    def losses(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """(B, K) logits; (B,) labels or (B, K) targets that sum to 1 → (B,)."""
        if self.loss == "softmax":
            return F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none")
        return sigmoid_losses(logits, targets, smoothing)


def sigmoid_losses(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """(B, K) logits; (B,) labels or (B, K) targets → (B,): binary cross entropies, summed over the classes.

    The sum, as in the released pre-training on ImageNet-21k: a mean would make the one right class of thousands small.
    """
    classes = logits.shape[1]
    targets = one_hot(targets, classes) if targets.ndim == 1 else targets
    targets = targets * (1 - smoothing) + smoothing / classes
    # torch's own function takes the difference of two large numbers: 7% off for a rightly low logit of −12.
    return -(targets * F.logsigmoid(logits) + (1 - targets) * F.logsigmoid(-logits)).sum(dim=1)
