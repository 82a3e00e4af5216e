"""`StepMasks`: the masks of dropout and stochastic depth in one forward pass of `FusedTraining`.

Each mask has a place in the model and depends on the step's key and the image's number (kernels/dropout.py).

Shapes: B images, R tokens that are read, C channels.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor, nn

from vitrail.fast.gpu.kernels.dropout import DropoutMask, read_mask
from vitrail.model.encoder import StochasticDepth


class Place(IntEnum):
    """Where an encoder block has a mask."""

    ATTENTION = 1
    """After the output projection of attention."""
    ATTENTION_DEPTH = 2
    """Stochastic depth of the attention branch."""
    HIDDEN = 3
    """After the GELU."""
    MLP = 4
    """After the second layer of the MLP."""
    MLP_DEPTH = 5
    """Stochastic depth of the MLP branch."""


class StepMasks:
    """The masks of one forward pass.

    Args:
        key: (2,) int64 on the device: the step's key, and the number of the first image in the step. See `make_key`.
    """

    def __init__(self, key: Tensor) -> None:
        self.key = key

    def mask_tokens(self, dropout: nn.Dropout) -> DropoutMask | None:
        """Return the mask of the embedded tokens; None if nothing is dropped."""
        return DropoutMask.from_rate(self.key, 0, _get_rate(dropout))

    def mask_in_block(self, dropout: nn.Dropout, block: int, place: Place) -> DropoutMask | None:
        """Return the mask of a place in the block with this number; None if nothing is dropped there."""
        return DropoutMask.from_rate(self.key, len(Place) * block + place, _get_rate(dropout))

    def draw_depth(self, drop: StochasticDepth, block: int, place: Place, images: int) -> Tensor | None:
        """Draw stochastic depth (B,): 0 for images whose branch is dropped, 1 / (1 - rate) for others; None if off."""
        rate = drop.rate if drop.training else 0.0
        mask = DropoutMask.from_rate(self.key, len(Place) * block + place, rate)
        return None if mask is None else read_mask(mask, images, 1, 1).flatten()

    def drop_read_tokens(self, x: Tensor, dropout: nn.Dropout, block: int, place: Place) -> Tensor:
        """Apply dropout to the first tokens of every image, x (B, R, C), by torch, in float32."""
        mask = self.mask_in_block(dropout, block, place)
        return x if mask is None else (x.float() * read_mask(mask, *x.shape)).to(x.dtype)


def make_key(key: int, first_image: int) -> Tensor:
    """Return what masks depend on, (2,) int64 on the CPU.

    Args:
        key: 64 bits that differ from step to step.
        first_image: The number of the batch's first image among the images of the step.
    """
    return torch.tensor([key - (1 << 64) if key >> 63 else key, first_image])


def draw_key(device: torch.device) -> Tensor:
    """Draw a key and a number of the first image with torch's generator of a device."""
    return torch.empty(2, dtype=torch.int64, device=device).random_()


def _get_rate(dropout: nn.Dropout) -> float:
    return dropout.p if dropout.training else 0.0
