"""What every objective is to the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.data.loader import Batch
from vitrail.model.base import ImageModel
from vitrail.objectives.metrics import Sums


class Outcome(NamedTuple):
    """Of one batch."""

    loss: Tensor
    """The mean over the batch, to be differentiated."""
    sums: Sums
    """What was measured, summed over samples: always "loss"."""


def evaluated(sums: Sums) -> Outcome:
    """Of a batch in evaluation: the mean over what was counted; 0 for a batch that only fills up."""
    total, count = sums["loss"].unbind()
    return Outcome((total / count.clamp(min=1)).float(), sums)


class Objective(nn.Module, ABC):
    """A model, whatever else is trained with it, and how a batch becomes a loss.

    A module, because sharding and the averaging of gradients over ranks hang on module calls.
    """

    better: str
    """The metric by which one evaluation is better than another: "accuracy" (higher) or "loss" (lower)."""
    mean: Tensor
    std: Tensor

    def __init__(self, model: ImageModel) -> None:
        super().__init__()
        self.model = model
        preprocessing = model.preprocessing
        # As buffers, so that normalising on an accelerator copies nothing there in every step.
        shape = (len(preprocessing.mean), 1, 1)
        mean, std = torch.tensor(preprocessing.mean).view(shape), torch.tensor(preprocessing.std).view(shape)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    @abstractmethod
    def forward(self, batch: Batch, key: int) -> Outcome:
        """A batch on the model's device → loss and sums.

        `key`: decides all that is random here. In training it changes with every step; in evaluation it stays.
        `self.training` says which it is: an evaluation counts only samples of `batch.mask`.
        """

    @abstractmethod
    def parts_to_compile(self) -> list[nn.Module]:
        """The modules that take the time, as they are called."""

    def images(self, batch: Batch) -> Tensor:
        """(B, C, height, width) uint8 → float32, as the model's preprocessing says."""
        return (batch.images.float() / 255 - self.mean) / self.std
