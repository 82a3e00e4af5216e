"""Polyak averaging: a second set of weights follows the first slowly. It is what is evaluated and saved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is on this rank: all of it, unless it is sharded."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


class Average:
    """The average of a module's parameters and floating-point buffers. Other buffers are copied.

    Args:
        module: What is averaged.
        decay: The share of itself that the average keeps in a step.
        has_ramp: Whether it keeps less in early steps, so that the initial values do not dominate it for long.
    """

    def __init__(self, module: nn.Module, decay: float, has_ramp: bool = True) -> None:
        self.decay, self.has_ramp = decay, has_ramp
        self.followed = {name: tensor for name, tensor in _state(module).items() if tensor.is_floating_point()}
        self.copied = {name: tensor for name, tensor in _state(module).items() if not tensor.is_floating_point()}
        self.tensors = {name: tensor.detach().clone() for name, tensor in _state(module).items()}
        self._sharded = any(hasattr(tensor, "to_local") for tensor in self.tensors.values())

    def update(self, step: int) -> None:
        """Update the average after the step with this number."""
        self.blend(self.blend_weight(step))

    def blend_weight(self, step: int) -> float:
        """Return the share of the current weights in the average after this step, from 0 to 1.

        With the ramp it is larger in early steps: the average then follows about the last ninth of the steps so far.
        """
        return 1 - (min(self.decay, (1 + step) / (10 + step)) if self.has_ramp else self.decay)

    @torch.no_grad()
    def blend(self, share: float | Tensor) -> None:
        """Move the average towards the current weights by this share. Does not wait for a tensor's value."""
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
        """Let the module compute with the average while the block runs, and with its own weights again afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, tensor in (self.followed | self.copied).items():
            ours, theirs = local_part(self.tensors[name]), local_part(tensor)
            copy = theirs.clone()
            theirs.copy_(ours)
            ours.copy_(copy)


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, and the buffers that are saved, by name."""
    return module.state_dict(keep_vars=True)
