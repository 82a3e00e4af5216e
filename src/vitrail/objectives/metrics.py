"""What a run measures, as sums with counts: they add up over batches and over ranks, and only then is a mean taken."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Sums = dict[str, Tensor]
"""For each name a tensor of two values: a sum and how many it was summed over."""


def sum_and_count(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B,) values of samples → their sum and number, (2,) float64; only those of `mask` where there is one.

    float64, so that counts stay whole and the order of adding does not show in the digits that are printed.
    """
    values = values.detach().double()
    if mask is None:
        return torch.stack([values.sum(), values.new_full((), values.numel())])
    return torch.stack([torch.where(mask, values, 0).sum(), mask.sum().double()])


def add(total: Sums, sums: Sums) -> None:
    """Into `total`, in place."""
    for name, pair in sums.items():
        total[name] = total[name] + pair if name in total else pair


def means(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """The mean of each; not a number where nothing was counted."""
    if not sums:
        return {}
    pairs = torch.stack(list(sums.values())).tolist()  # one wait for an accelerator, not one for each
    return {name: total / count if count else float("nan") for name, (total, count) in zip(sums, pairs, strict=True)}


def hits(logits: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """(B, K) logits and (B,) labels → (B,) bool: whether the label is among the k largest."""
    if k == 1:
        return logits.argmax(dim=1) == labels
    return (logits.topk(min(k, logits.shape[1]), dim=1).indices == labels[:, None]).any(dim=1)
