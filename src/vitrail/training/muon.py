"""Muon: the encoder's matrices move by orthogonal steps, everything else by AdamW.

A small ViT has few directions with large gradients and many with small ones. AdamW follows the few; a step whose
singular values are all alike follows each of them as far (K. Jordan and others, 2024). Steps are scaled to the size
that AdamW's have (J. Liu and others, arXiv 2502.16982), so that learning rate and weight decay keep their meaning.

torch.optim.Muon goes through the matrices one by one, which takes a thousand kernels in a step of a small model, and
treats queries, keys and values as one matrix. Here they are three, and matrices of one shape are computed together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial that moves singular values from (0, 1] towards 1."""
ROUNDS = 5
SIZE_OF_ADAM = 0.2
"""About the root mean square of AdamW's steps, in learning rates."""


class Muon(torch.optim.AdamW):
    """AdamW, except that groups with a `momentum` hold matrices that move by orthogonal steps.

    The `parts` of such a group are the number of matrices stacked in each parameter. Like torch's fused AdamW, Muon
    skips a step if the tensor `found_inf` is 1.
    """

    found_inf: Tensor | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state without Adam's reading the step counts of matrices, which have none."""
        groups = state["param_groups"]
        super().__setstate__({**state, "param_groups": [group for group in groups if "momentum" not in group]})
        self.param_groups = groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make a step with all groups. Closures are not supported."""
        assert closure is None
        groups = self.param_groups
        self.param_groups = [group for group in groups if "momentum" not in group]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if "momentum" in group:
                self._move_matrices(group)

    def _move_matrices(self, group: dict[str, Any]) -> None:
        """Move a group's matrices that have a gradient.

        Those of one shape are computed together: in a small model, starting kernels takes most of the time.
        """
        alike: dict[tuple[int, torch.Size], list[Tensor]] = {}
        for parameter, parts in zip(group["params"], group["parts"], strict=True):
            if parameter.grad is not None:
                alike.setdefault((parts, parameter.shape), []).append(parameter)
        applied = 1.0 if self.found_inf is None else 1 - self.found_inf.double()
        rate, shrinkage = group["lr"] * applied, 1 - group["lr"] * group["weight_decay"] * applied
        steps: dict[torch.Size, list[Tensor]] = {}
        for (parts, (rows, columns)), parameters in alike.items():
            step = self._nesterov(parameters, group["momentum"]).view(-1, rows // parts, columns)
            step = step.mT if rows // parts > columns else step
            steps.setdefault(step.shape[1:], []).append(step)
        directions = {shape: iter(_apply_together(orthogonalise, batch)) for shape, batch in steps.items()}
        for (parts, (rows, columns)), parameters in alike.items():
            is_tall = rows // parts > columns
            step = next(directions[torch.Size(sorted((rows // parts, columns)))])
            step = (step.mT if is_tall else step) * (-SIZE_OF_ADAM * math.sqrt(max(rows // parts, columns)) * rate)
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, shrinkage)
            torch._foreach_add_(parameters, list(step.reshape(-1, rows, columns).unbind()))

    def _nesterov(self, parameters: list[Tensor], momentum: float) -> Tensor:
        """Return the steps of Nesterov's momentum for parameters of one shape: (count, rows, columns)."""
        gradient = torch.stack([_gradient(parameter) for parameter in parameters])
        buffers = [self._momentum_buffer(parameter) for parameter in parameters]
        mean = torch.stack(buffers)
        if self.found_inf is not None:  # if it is 1, the mean does not change, and nothing is added to the weights
            gradient = gradient.where(self.found_inf == 0, mean)
        mean.lerp_(gradient, 1 - momentum)
        torch._foreach_copy_(buffers, list(mean.unbind()))
        return gradient.lerp(mean, momentum)

    def _momentum_buffer(self, parameter: Tensor) -> Tensor:
        """Return the running mean of a parameter's gradients."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _apply_together(function: Callable[[Tensor], Tensor], batches: list[Tensor]) -> list[Tensor]:
    """Apply a function to several batches as if they were one."""
    return list(function(torch.cat(batches)).split([len(batch) for batch in batches]))


def orthogonalise(matrices: Tensor) -> Tensor:
    """Bring the singular values of matrices to between about 0.7 and 1.2, and keep their singular vectors.

    By Newton-Schulz iterations, in bf16 on a GPU.

    Args:
        matrices: (count, rows, columns) with rows ≤ columns.
    """
    linear, cubic, fifth = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        square = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=cubic, alpha=fifth), x, beta=linear)
    return x.to(matrices.dtype)
