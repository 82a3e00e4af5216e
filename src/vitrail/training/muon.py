"""Muon: the matrices of the encoder move by orthogonal steps, everything else by AdamW.

A small ViT has few directions with large gradients and many with small ones. AdamW follows the few; a step whose
singular values are all alike follows each of them as far (K. Jordan and others, 2024). Steps are scaled to the size
that AdamW's have (J. Liu and others, arXiv 2502.16982), so that learning rate and weight decay keep their meaning.

torch.optim.Muon goes through matrices one by one, a thousand kernels in a step of a small model, and takes queries,
keys and values for one matrix. Here those are three, and matrices of one shape move together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial that brings singular values from (0, 1] towards 1: the steepest at 0 that stays near 1."""
ROUNDS = 5
SIZE_OF_ADAM = 0.2
"""About the root mean square of AdamW's steps, in learning rates."""


class Muon(torch.optim.AdamW):
    """AdamW, but groups with a `momentum` hold matrices that move by orthogonal steps.

    Their `parts` tell for each parameter how many matrices are stacked in it. As torch's fused AdamW, Muon leaves out a
    step where the tensor `found_inf`, if there is one, is 1.
    """

    found_inf: Tensor | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Adam's reads the number of steps of every parameter; matrices have none."""
        groups = state["param_groups"]
        super().__setstate__({**state, "param_groups": [group for group in groups if "momentum" not in group]})
        self.param_groups = groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """All groups; there is no closure."""
        assert closure is None
        groups = self.param_groups
        self.param_groups = [group for group in groups if "momentum" not in group]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if "momentum" in group:
                self._turn(group)

    def _turn(self, group: dict[str, Any]) -> None:
        """All the group's matrices that have a gradient. Those of one shape are computed together: what takes time in a
        small model is starting kernels."""
        alike: dict[tuple[int, torch.Size], list[Tensor]] = {}
        for parameter, parts in zip(group["params"], group["parts"], strict=True):
            if parameter.grad is not None:
                alike.setdefault((parts, parameter.shape), []).append(parameter)
        kept = 1.0 if self.found_inf is None else 1 - self.found_inf.double()
        rate, shrunk = group["lr"] * kept, 1 - group["lr"] * group["weight_decay"] * kept
        steps: dict[torch.Size, list[Tensor]] = {}
        for (parts, (rows, columns)), parameters in alike.items():
            step = self._nesterov(parameters, group["momentum"]).view(-1, rows // parts, columns)
            step = step.mT if rows // parts > columns else step
            steps.setdefault(step.shape[1:], []).append(step)
        turned = {shape: iter(_together(orthogonalise, found)) for shape, found in steps.items()}
        for (parts, (rows, columns)), parameters in alike.items():
            tall = rows // parts > columns
            step = next(turned[torch.Size(sorted((rows // parts, columns)))])
            step = (step.mT if tall else step) * (-SIZE_OF_ADAM * math.sqrt(max(rows // parts, columns)) * rate)
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, shrunk)
            torch._foreach_add_(parameters, list(step.reshape(-1, rows, columns).unbind()))

    def _nesterov(self, parameters: list[Tensor], momentum: float) -> Tensor:
        """(count, rows, columns): where Nesterov's momentum leads parameters of one shape."""
        gradient = torch.stack([_given(parameter) for parameter in parameters])
        kept = [self._kept(parameter) for parameter in parameters]
        mean = torch.stack(kept)
        if self.found_inf is not None:  # where it is 1, the mean stays as it is, and nothing is added to weights
            gradient = gradient.where(self.found_inf == 0, mean)
        mean.lerp_(gradient, 1 - momentum)
        torch._foreach_copy_(kept, list(mean.unbind()))
        return gradient.lerp(mean, momentum)

    def _kept(self, parameter: Tensor) -> Tensor:
        """The running mean of its gradients."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        found: Tensor = state["momentum_buffer"]
        return found


def _given(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _together(function: Callable[[Tensor], Tensor], batches: list[Tensor]) -> list[Tensor]:
    """What a function gives for each of some batches, computed as one."""
    return list(function(torch.cat(batches)).split([len(batch) for batch in batches]))


def orthogonalise(matrices: Tensor) -> Tensor:
    """(count, rows, columns) with rows ≤ columns → ones whose singular values lie between about 0.7 and 1.2, with the
    same singular vectors: Newton-Schulz iterations, on a GPU in bf16."""
    linear, cubic, fifth = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        square = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=cubic, alpha=fifth), x, beta=linear)
    return x.to(matrices.dtype)
