"""Measurements as sums with counts: they are added up over batches and ranks before a mean is taken."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vitrail.system.device import to_float64

Sums = dict[str, Tensor]
"""For each name a tensor of two values: a sum and the number of values in it."""


def sum_and_count(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the sum and the number of (B,) values as (2,) float64; with a mask, only of the values it selects.

    float64 keeps counts whole and hides the order of addition in the printed digits. On Apple's GPU there is none, and
    the CPU adds.
    """
    values = to_float64(values.detach())
    if mask is None:
        return torch.stack([values.sum(), values.new_full((), values.numel())])
    mask = mask.to(values.device)
    return torch.stack([torch.where(mask, values, 0).sum(), mask.sum().double()])


def add_sums(total: Sums, sums: Sums) -> None:
    """Add `sums` to `total` in place."""
    for name, pair in sums.items():
        total[name] = total[name] + pair if name in total else pair


def compute_means(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the mean of each; NaN if nothing was counted."""
    if not sums:
        return {}
    pairs = torch.stack(list(sums.values())).tolist()  # one wait for an accelerator, not one for each
    return {name: total / count if count else float("nan") for name, (total, count) in zip(sums, pairs, strict=True)}


def find_hits(logits: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """Return (B,) bool: whether each label is among the k largest of its (K,) logits."""
    if k == 1:
        return logits.argmax(dim=1) == labels
    return (logits.topk(min(k, logits.shape[1]), dim=1).indices == labels[:, None]).any(dim=1)
