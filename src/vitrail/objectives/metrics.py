"""Measurements as sums with counts: they are added up over batches and ranks before a mean is taken."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vitrail.system.device import to_float64

Sums = dict[str, Tensor]
"""For each name a sum and the number of values in it, as a tensor (2,); or both for each of K classes, (2, K)."""


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


def sum_by_class(values: Tensor, classes: Tensor, count: int, mask: Tensor | None = None) -> Tensor:
    """Return the sum and the number of (B,) values of each class, (2, count) float64; −1 stands for no class."""
    values = to_float64(values.detach())
    classes = classes.to(values.device)
    counted = classes >= 0 if mask is None else mask.to(values.device) & (classes >= 0)
    pairs = torch.stack([torch.where(counted, values, 0), counted.to(values.dtype)])
    return pairs.new_zeros(2, count).index_add_(1, classes.clamp(min=0), pairs)


def add_sums(total: Sums, sums: Sums) -> None:
    """Add `sums` to `total` in place."""
    for name, pair in sums.items():
        total[name] = total[name] + pair if name in total else pair


def compute_means(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the mean of each, and of classes the mean over their means; NaN if nothing was counted."""
    if not sums:
        return {}
    pairs = [pair.reshape(2, -1) for pair in sums.values()]
    totals, counts = torch.cat(pairs, dim=1).tolist()  # one wait for an accelerator, not one for each
    means, first = {}, 0
    for name, pair in zip(sums, pairs, strict=True):
        last = first + pair.shape[1]
        counted = [total / count for total, count in zip(totals[first:last], counts[first:last], strict=True) if count]
        means[name] = sum(counted) / len(counted) if counted else float("nan")
        first = last
    return means


def find_hits(logits: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """Return (B,) bool: whether each label is among the k largest of its (K,) logits."""
    if k == 1:
        return logits.argmax(dim=1) == labels
    return (logits.topk(min(k, logits.shape[1]), dim=1).indices == labels[:, None]).any(dim=1)
