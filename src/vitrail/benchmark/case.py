"""The nouns of a benchmark: a `Case` is what is computed, a `Candidate` is one way to compute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.config import show_size
from vitrail.model.architecture import Architecture
from vitrail.model.base import ImageModel
from vitrail.model.cost import FORWARD_AND_BACKWARD, compute_cost
from vitrail.model.create import build_empty_model
from vitrail.model.initialise import initialise

OURS = "vitrail"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Precisions that the model of any library can be cast to."""
SEED = 0

CandidateKey = tuple[str, str]
"""Library, and name of the candidate within it."""


@dataclass(frozen=True)
class Case:
    """What all candidates compute: a task, a model, a batch and a precision."""

    what: str
    """inference, training, latency, loader or end-to-end."""
    name: str
    """Name of the model, as `vitrail models` lists it."""
    architecture: Architecture
    batch: int
    precision: str
    """Precision of the plain candidates: one of `PRECISIONS`."""
    device: torch.device
    extra_precision: str | None = None
    """A further precision, measured only where a candidate supports it: fp8, int8, or auto."""

    @property
    def size(self) -> str:
        """Size of the images, in words."""
        return show_size(self.architecture.image_size)

    @property
    def trains(self) -> bool:
        return self.what in ("training", "end-to-end")

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and images: the precision for inference; float32 for training, where autocast casts."""
        return torch.float32 if self.trains else PRECISIONS[self.precision]

    @property
    def flops(self) -> int:
        """Floating-point operations of one step."""
        return compute_cost(self.architecture).flops * self.batch * (FORWARD_AND_BACKWARD if self.trains else 1)

    def __str__(self) -> str:
        return f"{self.name} {self.what}, {self.size} px, batch {self.batch}, {self.precision}"


class RandomBatch(NamedTuple):
    """Random normalised images (B, C, H, W) and random labels (B,)."""

    images: Tensor
    labels: Tensor


class BuiltCandidate(NamedTuple):
    """A candidate that is ready to run."""

    step: Callable[[], Tensor]
    """Does the work once, and returns its logits (B, K)."""
    parameters: int
    precision: str | None = None
    """The precision in use, if the candidate chose it by itself."""


@dataclass(frozen=True)
class Candidate:
    """One way of one library to compute a case. Its name is unique within the library."""

    library: str
    name: str
    build: Callable[[], BuiltCandidate]
    is_recorded: bool = False
    """Whether it runs in memory that its first call reserves (a CUDA graph)."""
    precision: str | None = None
    """The case's precision if None."""
    has_our_weights: bool = False
    """Whether its logits can be compared with our plain model's."""


class NotMeasured(NamedTuple):
    """What was not measured, and why."""

    where: str
    """The case; empty if it holds for all cases."""
    library: str
    way: str
    """Name of the candidate; empty if it holds for all candidates of the library."""
    reason: str

    def __str__(self) -> str:
        subject = f"{self.library} {self.way}".strip()
        return f"{subject} ({self.where}): {self.reason}" if self.where else f"{subject}: {self.reason}"


def make_batch(case: Case) -> RandomBatch:
    """Return the batch of a case, on its device: the same numbers every time."""
    generator = torch.Generator(case.device).manual_seed(SEED)
    a = case.architecture
    images = torch.randn(case.batch, a.in_channels, *a.image_size, device=case.device, generator=generator)
    labels = torch.randint(max(a.num_classes, 1), (case.batch,), device=case.device, generator=generator)
    return RandomBatch(images.to(case.dtype), labels)


@torch.no_grad()
def make_model(architecture: Architecture) -> ImageModel:
    """Return our model, float32 on the CPU, with new weights; the head is random too, since a new one returns zeros."""
    generator = torch.Generator().manual_seed(SEED)
    model = build_empty_model(architecture).to_empty(device="cpu")
    initialise(model, generator)
    for parameter in model.head.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
    return model


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
