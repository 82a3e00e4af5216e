"""Heads: from the representation y of an image to the logits of its classes.

Shapes: B images, D width, K classes.
"""

from __future__ import annotations

from torch import Tensor, nn


class MlpHead(nn.Module):
    """The head of the paper's pre-training: a hidden layer with tanh, then a linear layer."""

    def __init__(self, width: int, representation_size: int, num_classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, representation_size)
        self.linear = nn.Linear(representation_size, num_classes) if num_classes else nn.Identity()

    def compute_pre_logits(self, y: Tensor) -> Tensor:
        """(B, D) → (B, representation size): the layer that the released code calls pre_logits."""
        pre_logits: Tensor = self.hidden(y).tanh()
        return pre_logits

    def forward(self, y: Tensor) -> Tensor:
        """(B, D) → (B, K), or (B, representation size) for K = 0."""
        logits: Tensor = self.linear(self.compute_pre_logits(y))
        return logits


class DistilledHead(nn.Module):
    """A linear head for the class token and one for the distillation token; the logits are their mean (DeiT)."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, num_classes)
        self.distilled = nn.Linear(width, num_classes)

    def forward(self, y: Tensor) -> Tensor:
        """(B, 2D) → (B, K)."""
        first, second = y.chunk(2, dim=1)
        logits: Tensor = (self.linear(first) + self.distilled(second)) / 2
        return logits


def build_head(width: int, representation_size: int | None, num_classes: int) -> nn.Module:
    """Build an `MlpHead` if there is a representation size, else a linear layer, or nothing for 0 classes."""
    if representation_size is not None:
        return MlpHead(width, representation_size, num_classes)
    return nn.Linear(width, num_classes) if num_classes else nn.Identity()
