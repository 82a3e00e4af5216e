"""Sums over all ranks that gradients pass through, for losses that look at a whole batch at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks, on every rank; the tensor itself if there is one rank.

    Every rank must compute the same loss from it. The gradient of that loss, averaged over ranks as in training, is
    then that of one rank with all samples.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return values
    total: Tensor = _RankSum.apply(values)
    return total


class _RankSum(torch.autograd.Function):
    """A sum over ranks: so is its gradient, because every rank's loss depends on every rank's values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total
