"""Polyak averaging: a second set of weights that follows the first slowly, and is what is evaluated and kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank: all of it, unless it is sharded."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


class Average:
    """The average of a module's parameters, and of its floating-point buffers; other buffers are copied."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.followed = {name: tensor for name, tensor in _state(module).items() if tensor.is_floating_point()}
        self.copied = {name: tensor for name, tensor in _state(module).items() if not tensor.is_floating_point()}
        self.tensors = {name: tensor.detach().clone() for name, tensor in _state(module).items()}
        self._sharded = any(hasattr(tensor, "to_local") for tensor in self.tensors.values())

    def update(self, step: int) -> None:
        """After the step with this number."""
        self.blend(self.blend_weight(step))

    def blend_weight(self, step: int) -> float:
        """How far the average goes towards the weights after this step, 1 being all the way. Early on it goes further,
        or its first values would rule it."""
        return 1 - min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def blend(self, share: float | Tensor) -> None:
        """Go such a share of the way. Of a tensor it is not asked what it is, which a device would be waited for."""
        averages, current = [self.tensors[name] for name in self.followed], list(self.followed.values())
        if self._sharded:
            averages, current = [local_part(tensor) for tensor in averages], [local_part(tensor) for tensor in current]
        if isinstance(share, Tensor):
            way = torch._foreach_sub(current, averages)
            torch._foreach_mul_(way, share)
            torch._foreach_add_(averages, way)
        else:
            torch._foreach_lerp_(averages, current, share)
        for name, tensor in self.copied.items():
            self.tensors[name].copy_(tensor)

    @contextlib.contextmanager
    def use_in_module(self) -> Iterator[None]:
        """The module computes with the average inside, and with its own weights again afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, tensor in (self.followed | self.copied).items():
            ours, theirs = local_part(self.tensors[name]), local_part(tensor)
            kept = theirs.clone()
            theirs.copy_(ours)
            ours.copy_(kept)


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and the buffers that are saved, by name."""
    return module.state_dict(keep_vars=True)
