"""The nouns of a benchmark: a case is what is computed, a way is how, and what could not be measured is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.config import show_size
from vitrail.model.architecture import Architecture
from vitrail.model.base import ImageModel
from vitrail.model.cost import FORWARD_AND_BACKWARD, cost
from vitrail.model.create import build
from vitrail.model.initialise import initialise

OURS = "vitrail"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""That any library's model can be brought to. What else there is belongs to single ways."""
SEED = 0

Key = tuple[str, str]
"""Library and way."""


@dataclass(frozen=True)
class Case:
    """What all ways compute alike."""

    what: str
    """inference, training, latency, loader or end-to-end."""
    name: str
    """Of the model, as `vitrail models` lists it."""
    architecture: Architecture
    batch: int
    precision: str
    """Of every library's plain ways: one of `PRECISIONS`."""
    device: torch.device
    beyond: str | None = None
    """A precision that is asked for besides, of the ways that have it: fp8, int8, or auto."""

    @property
    def size(self) -> str:
        """Of the images."""
        return show_size(self.architecture.image_size)

    @property
    def trains(self) -> bool:
        """Whether a step learns."""
        return self.what in ("training", "end-to-end")

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and images. Halved they serve to infer; to train they stay whole, and products are cast."""
        return torch.float32 if self.trains else PRECISIONS[self.precision]

    @property
    def flops(self) -> int:
        """Operations in one step."""
        return cost(self.architecture).flops * self.batch * (FORWARD_AND_BACKWARD if self.trains else 1)

    def __str__(self) -> str:
        return f"{self.name} {self.what}, {self.size} px, batch {self.batch}, {self.precision}"


class Batch(NamedTuple):
    """What goes in: random pixels, normalised, and labels."""

    images: Tensor
    labels: Tensor


class Built(NamedTuple):
    """A way, ready to run."""

    step: Callable[[], Tensor]
    """Does the work once, and gives the logits (B, K) that it came to on the way."""
    parameters: int
    precision: str | None = None
    """What it came to, of a way that chooses for itself."""


@dataclass(frozen=True)
class Way:
    """One way of one library to compute a case; its name is its own within the library, whatever the precision."""

    library: str
    name: str
    build: Callable[[], Built]
    recorded: bool = False
    """It runs in memory that was set aside at its first call."""
    precision: str | None = None
    """The case's if None."""
    our_weights: bool = False
    """Whether its logits can be compared with our plain model's."""


class Missing(NamedTuple):
    """What could not be measured, or was left out, and why."""

    where: str
    """The case; nothing where it holds for all."""
    library: str
    way: str
    """Nothing where it holds for all ways."""
    reason: str

    def __str__(self) -> str:
        which = f"{self.library} {self.way}".strip()
        return f"{which} ({self.where}): {self.reason}" if self.where else f"{which}: {self.reason}"


def make_batch(case: Case) -> Batch:
    """The same numbers every time, on the device: all ways share them."""
    generator = torch.Generator(case.device).manual_seed(SEED)
    a = case.architecture
    images = torch.randn(case.batch, a.in_channels, *a.image_size, device=case.device, generator=generator)
    labels = torch.randint(max(a.num_classes, 1), (case.batch,), device=case.device, generator=generator)
    return Batch(images.to(case.dtype), labels)


@torch.no_grad()
def make_ours(architecture: Architecture) -> ImageModel:
    """Our model with fresh weights, float32 on the CPU; its head is stirred, for a fresh one gives zeros."""
    generator = torch.Generator().manual_seed(SEED)
    model = build(architecture).to_empty(device="cpu")
    initialise(model, generator)
    for parameter in model.head.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
    return model
