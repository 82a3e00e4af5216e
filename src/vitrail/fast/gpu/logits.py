"""A plain head on a GPU, for a few images by a kernel that starts while the one before it is still at work."""

from __future__ import annotations

from torch import Tensor, nn

from vitrail.fast.gpu.choice import Way, choose
from vitrail.fast.gpu.kernels import few_rows


class Logits:
    """y · Wᵀ + bias in float32, of a head that is one dense layer."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head
        self.chosen: dict[int, Way] = {}

    def __call__(self, y: Tensor) -> Tensor:
        """(B, D) → (B, K)."""
        count = len(y)
        if count > few_rows.MOST:
            return self.by_library(y)
        if (chosen := self.chosen.get(count)) is None:
            what = "head", *self.head.weight.shape, self.head.bias is None, count
            chosen = self.chosen[count] = choose(what, self.ways(), y, in_line=True)
        return chosen(y)

    def ways(self) -> dict[str, Way]:
        """That can compute it."""
        return {"library": self.by_library, "few rows": self.by_few_rows}

    def by_library(self, y: Tensor) -> Tensor:
        """By what torch calls."""
        logits: Tensor = self.head(y)
        return logits

    def by_few_rows(self, y: Tensor) -> Tensor:
        """By our own kernel."""
        return few_rows.few_rows(y.contiguous(), self.head.weight, self.head.bias)
