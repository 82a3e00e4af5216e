"""Gradient clipping."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vitrail.training.distributed import gather_tensor


def clip_gradients(parameters: Iterable[nn.Parameter], most: float | None) -> Tensor:
    """Scale the gradients down if their total length exceeds `most`, and return that length before scaling."""
    learning = [parameter for parameter in parameters if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm([p.grad for p in learning if p.grad is not None])
    total = gather_tensor(total)
    if most is not None:
        torch.nn.utils.clip_grads_with_norm_(learning, most, total)
    return total
