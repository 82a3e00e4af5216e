"""What is measured, and the ways to compute it: our model's, then each peer's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.config import show_size
from vitrail.errors import NotApplicableError
from vitrail.fast.captured import Captured
from vitrail.fast.packed import pack
from vitrail.model.architecture import Architecture
from vitrail.model.base import ImageModel
from vitrail.model.cost import FORWARD_AND_BACKWARD, cost
from vitrail.model.create import build
from vitrail.model.initialise import initialise
from vitrail.workflows.bench_peers import parameters_of, peer_model

OURS = "vitrail"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEARNING_RATE = 1e-4
SEED = 0


@dataclass(frozen=True)
class Case:
    """What all ways compute alike."""

    what: str
    """inference, training or latency."""
    name: str
    """Of the model, as `vitrail models` lists it."""
    architecture: Architecture
    batch: int
    precision: str
    device: torch.device

    @property
    def size(self) -> str:
        """Of the images."""
        return show_size(self.architecture.image_size)

    @property
    def trains(self) -> bool:
        """Whether a step learns."""
        return self.what == "training"

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


@dataclass(frozen=True)
class Way:
    """One way of one library to compute a case."""

    library: str
    name: str
    build: Callable[[], Built]
    recorded: bool = False
    """It runs in memory that was set aside at its first call."""


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


def all_ways(
    case: Case, batch: Batch, ours: ImageModel, peers: Sequence[str], compiles: bool
) -> Iterator[Way | Missing]:
    """Ours, then those of each peer, which is built when it is its turn."""
    yield from ways_of(OURS, ours, case, batch, compiles)
    if case.device.type == "cpu" and case.precision == "fp32" and not case.trains:
        yield Way(OURS, "packed", lambda: _packed(ours, case, batch))
    for library in peers:
        try:
            theirs = peer_model(library, case.architecture)
        except NotApplicableError as error:
            yield Missing(str(case), library, "", str(error))
            continue
        yield from ways_of(library, theirs, case, batch, compiles)


def ways_of(library: str, model: nn.Module, case: Case, batch: Batch, compiles: bool) -> Iterator[Way]:
    """Those that there are for any model; each works on a copy of it."""

    def way(name: str, compiled: bool, recorded: bool = False) -> Way:
        return Way(library, name, lambda: _built(model, case, batch, compiled, recorded), recorded)

    yield way("eager", compiled=False)
    if compiles:
        yield way("compiled", compiled=True)
    if case.device.type == "cuda" and case.batch == 1 and not case.trains:
        yield way("CUDA graph", compiled=False, recorded=True)
        if compiles:
            yield way("compiled, CUDA graph", compiled=True, recorded=True)


def _built(model: nn.Module, case: Case, batch: Batch, compiled: bool, recorded: bool) -> Built:
    """A copy of a model on its device, and a step of it."""
    parameters = parameters_of(model)
    own = copy.deepcopy(model).to(case.device, case.dtype).train(case.trains)
    run: Callable[[Tensor], Tensor] = torch.compile(own, dynamic=False) if compiled else own
    if case.trains:
        return Built(training_step(own, run, case, batch), parameters)
    return Built(inference_step(Captured(run) if recorded else run, batch.images), parameters)


def _packed(model: ImageModel, case: Case, batch: Batch) -> Built:
    parameters = parameters_of(model)
    own = copy.deepcopy(model).eval()
    if not pack(own):
        raise NotApplicableError("this torch, or this processor, lets no dense layer be packed")
    return Built(inference_step(own, batch.images), parameters)


def inference_step(run: Callable[[Tensor], Tensor], images: Tensor) -> Callable[[], Tensor]:
    """A forward pass."""

    def step() -> Tensor:
        with torch.inference_mode():
            return run(images)

    return step


def training_step(model: nn.Module, run: Callable[[Tensor], Tensor], case: Case, batch: Batch) -> Callable[[], Tensor]:
    """Forward, backward and fused AdamW; `run` is the model, or the model compiled."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    half = case.precision != "fp32"

    def step() -> Tensor:
        with torch.autocast(case.device.type, PRECISIONS[case.precision]) if half else nullcontext():
            logits = run(batch.images)
            loss = nn.functional.cross_entropy(logits, batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return logits.detach()

    return step
