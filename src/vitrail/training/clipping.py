"""How long a gradient is, and that it is no longer than it may be."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vitrail.training.distributed import gather_tensor


def clip_gradients(parameters: Iterable[nn.Parameter], most: float | None) -> Tensor:
    """The length of all gradients together, which are scaled down where it is more than `most`."""
    learning = [parameter for parameter in parameters if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm([p.grad for p in learning if p.grad is not None])
    total = gather_tensor(total)
    if most is not None:
        torch.nn.utils.clip_grads_with_norm_(learning, most, total)
    return total
