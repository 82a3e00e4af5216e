"""The interface between an objective and the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.data.loader import Batch
from vitrail.model.base import ImageModel
from vitrail.model.cost import compute_cost
from vitrail.objectives.metrics import Sums


class Outcome(NamedTuple):
    """What an objective computes for one batch."""

    loss: Tensor
    """The mean over the batch, with its gradient."""
    sums: Sums
    """Measurements summed over samples, with counts; always with "loss"."""


def evaluation_outcome(sums: Sums) -> Outcome:
    """Return the outcome of an evaluation batch. Its loss is the mean over the counted samples, 0 if there are none."""
    total, count = sums["loss"].unbind()
    return Outcome((total / count.clamp(min=1)).float(), sums)


class Objective(nn.Module, ABC):
    """A model, the other modules trained with it, and the loss of a batch.

    It is a module because sharding and the averaging of gradients over ranks work on module calls.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: ImageModel) -> None:
        super().__init__()
        self.model = model
        preprocessing = model.preprocessing
        # Buffers, so that normalising on an accelerator copies nothing to it in every step.
        shape = (len(preprocessing.mean), 1, 1)
        mean, std = torch.tensor(preprocessing.mean).view(shape), torch.tensor(preprocessing.std).view(shape)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    @abstractmethod
    def forward(self, batch: Batch, key: int) -> Outcome:
        """Return loss and sums of a batch on the model's device.

        An evaluation (`self.training` is False) counts only the samples of `batch.mask`.

        Args:
            key: decides everything random here. It changes with every training step and is fixed in evaluation.
        """

    @abstractmethod
    def parts_to_compile(self) -> list[nn.Module]:
        """Return the modules worth compiling, as they are called."""

    def finish_step(self, progress: float) -> None:
        """Do what follows every update of the weights; nothing, unless an objective says otherwise.

        Args:
            progress: the share of all steps that are done, up to 1.
        """

    def count_flops(self) -> int:
        """Return the operations of one forward pass of one image."""
        return compute_cost(self.model.architecture).flops

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Set whether activations are computed again in the backward pass, which saves memory."""
        self.model.set_gradient_checkpointing(enabled)

    def images(self, batch: Batch) -> Tensor:
        """Return the (B, C, height, width) images as float32, normalised for the model."""
        return (batch.images.float() / 255 - self.mean) / self.std

    def embed(self, batch: Batch) -> Tensor:
        """Return the (B, D) representations of the images, as the model without the objective computes them."""
        return self.model.embed(self.images(batch))
