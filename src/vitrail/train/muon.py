"""Muon: the matrices of the encoder move by orthogonal steps, everything else by AdamW.

A small ViT has few directions with large gradients and many with small ones. AdamW follows the few; a step whose
singular values are all alike follows each of them as far (K. Jordan and others, 2024). Steps are scaled to the size
that AdamW's have (J. Liu and others, arXiv 2502.16982), so that learning rate and weight decay keep their meaning.

torch.optim.Muon goes through matrices one by one, a thousand kernels in a step of a small model, and takes queries,
keys and values for one matrix. Here those are three, and matrices of one shape move together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial that brings singular values from (0, 1] towards 1: the steepest at 0 that stays near 1."""
ROUNDS = 5
SIZE_OF_ADAM = 0.2
"""About the root mean square of AdamW's steps, in learning rates."""


class Muon(torch.optim.AdamW):
    """AdamW, but groups with a `momentum` hold matrices, of `parts` stacked ones each, that move by orthogonal steps.

    As torch's fused AdamW it leaves out a step where the tensor `found_inf`, if there is one, is 1.
    """

    found_inf: Tensor | None = None

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
        """Nesterov's momentum, made orthogonal, of all the group's matrices that have a gradient."""
        learning = [parameter for parameter in group["params"] if parameter.grad is not None]
        kept = 1.0 if self.found_inf is None else 1 - self.found_inf.double()
        shapes: dict[tuple[int, int], list[tuple[Tensor, ...]]] = {}
        for parameter in learning:
            momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
            for found in _matrices(parameter, parameter.grad, momentum, parts=group["parts"]):
                shapes.setdefault((found[0].shape[0], found[0].shape[1]), []).append(found)
        if group["weight_decay"]:
            torch._foreach_mul_(learning, 1 - group["lr"] * group["weight_decay"] * kept)
        for (rows, columns), matrices in shapes.items():
            weights, gradients, momenta = (list(tensors) for tensors in zip(*matrices, strict=True))
            gradient, momentum = torch.stack(gradients), torch.stack(momenta)
            if self.found_inf is not None:  # where it is 1, the momentum stays, and nothing is added to weights
                gradient = gradient.where(self.found_inf == 0, momentum)
            momentum.lerp_(gradient, 1 - group["momentum"])
            torch._foreach_copy_(momenta, list(momentum.unbind()))
            turned = orthogonal(gradient.lerp(momentum, group["momentum"]))
            turned *= -group["lr"] * SIZE_OF_ADAM * math.sqrt(max(rows, columns)) * kept
            torch._foreach_add_(weights, list(turned.unbind()))


def _matrices(*tensors: Tensor, parts: int) -> Iterator[tuple[Tensor, ...]]:
    """Views of the stacked parts of tensors of one shape, each with no more rows than columns."""
    for matrices in zip(*(tensor.chunk(parts) for tensor in tensors), strict=True):
        tall = matrices[0].shape[0] > matrices[0].shape[1]
        yield tuple(matrix.t() if tall else matrix for matrix in matrices)


def orthogonal(matrices: Tensor) -> Tensor:
    """(count, rows, columns) with rows ≤ columns → float32 ones whose singular values lie between about 0.7 and 1.2,
    with the same singular vectors: Newton-Schulz iterations, on a GPU in bf16."""
    linear, cubic, fifth = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        square = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=cubic, alpha=fifth), x, beta=linear)
    return x.to(matrices.dtype)
