"""Projections of representations, which joint-embedding objectives compare and throw away after training.

Shapes: N representations of width D.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.data.order import derive_seed
from vitrail.model.initialise import fill_lecun_normal
from vitrail.objectives.rank_sums import sum_over_ranks
from vitrail.system.precision import widen

BOTTLENECK = 256
"""Width of the unit vectors that are compared with prototypes."""


class Projection(nn.Module):
    """Three dense layers, (N, D) → (N, out), with a norm and GELU between them; thrown away after training."""

    def __init__(self, width: int, hidden: int, out: int, norm: str) -> None:
        super().__init__()
        sizes = [(width, hidden), (hidden, hidden), (hidden, out)]
        self.layers = nn.ModuleList(nn.Linear(before, after, bias=norm != "batch") for before, after in sizes)
        kinds: dict[str, type[nn.Module]] = {"batch": BatchStandardise, "layer": nn.LayerNorm}
        self.norms = nn.ModuleList(kinds[norm](hidden) if norm in kinds else nn.Identity() for _ in sizes[1:])

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = F.gelu(norm(layer(x)))
        projected: Tensor = self.layers[-1](x)
        return projected


class PrototypeHead(nn.Module):
    """(N, D) representations → (N, K) cosine similarities to learned prototypes, in float32 or float64."""

    def __init__(self, width: int, hidden: int, prototypes: int) -> None:
        super().__init__()
        self.projection = Projection(width, hidden, BOTTLENECK, "none")
        self.prototypes = nn.Linear(BOTTLENECK, prototypes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.projection(x)
        units = F.normalize(widen(projected), dim=1)
        with torch.autocast(x.device.type, enabled=False):  # a small temperature magnifies rounding
            return F.linear(units, F.normalize(self.prototypes.weight, dim=1))


class BatchStandardise(nn.Module):
    """Batch norm with the statistics of the batch of all ranks, in training and evaluation: (N, W) → (N, W).

    It keeps no running statistics: it is for projections that are thrown away after training.
    """

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        wide = widen(x)
        count = sum_over_ranks(wide.new_full((), len(wide))).clamp(min=1)
        centred = wide - sum_over_ranks(wide.sum(dim=0)) / count
        variance = sum_over_ranks(centred.square().sum(dim=0)) / count
        return (centred * (variance + self.eps).rsqrt() * self.weight + self.bias).to(x.dtype)


@torch.no_grad()
def initialise_projection(module: nn.Module, seed: int) -> None:
    """Fill dense layers and norms of a module, on the CPU."""
    generator = torch.Generator().manual_seed(derive_seed(seed, 2))
    for part in module.modules():
        if isinstance(part, nn.Linear):
            fill_lecun_normal(part, generator)
        elif isinstance(part, nn.LayerNorm | BatchStandardise):
            part.reset_parameters()
