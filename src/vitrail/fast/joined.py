"""A block's products for few tokens, with its sums and norms inside: five kernels, where a block is seven.

Shapes: M tokens, K → N features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from vitrail.fast.choice import Way, bucket, choose
from vitrail.fast.kernels.joined import Stream, joining_product, norming_product
from vitrail.fast.kernels.product import Tiling, named

MOST_ROWS = 1024
"""Tokens up to which it is tried: beyond, the chip is full, and starting a kernel is little of its time."""
JOINING = named(
    Tiling(64, 32, 128, 4, 4), Tiling(64, 32, 128, 4, 3), Tiling(64, 32, 256, 4, 3), Tiling(64, 64, 128, 4, 4),
    Tiling(128, 32, 128, 4, 4), Tiling(128, 64, 128, 4, 3, splits=3), Tiling(128, 64, 128, 4, 3, splits=4),
    Tiling(64, 64, 128, 4, 3, splits=2), Tiling(64, 64, 128, 4, 3, splits=3),
)  # fmt: skip
NORMING = named(
    Tiling(64, 64, 128, 4, 4), Tiling(64, 64, 128, 4, 3), Tiling(64, 128, 128, 4, 3), Tiling(128, 64, 128, 4, 3),
    Tiling(64, 32, 256, 4, 3),
)  # fmt: skip


def takes(*weights: Tensor) -> bool:
    """Whether the copy engine can read them: rows of whole 16 bytes."""
    return all(weight.shape[1] * weight.element_size() % 16 == 0 for weight in weights)


class Joining:
    """z + factor · (x · Wᵀ + bias)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, factor: Tensor | None) -> None:
        self.weight, self.bias, self.factor = weight, bias, factor
        self.chosen: dict[tuple[int, bool], Callable[..., Stream]] = {}

    def __call__(self, x: Tensor, z: Tensor, arrived: Tensor | None = None) -> Stream:
        """(M, K), (M, N) → (M, N), with statistics for the next norm. `arrived`: zeros, if sums may be split."""
        key = bucket(len(x)), arrived is None
        if (chosen := self.chosen.get(key)) is None:
            ways = {name: partial(self.by, tiling) for name, tiling in self.tilings(arrived is not None).items()}
            what = "joining", *self.weight.shape, self.bias is None, self.factor is None, *key
            chosen = self.chosen[key] = choose(what, ways, x, z, arrived, in_line=True)
        return chosen(x, z, arrived)

    def tilings(self, splits: bool) -> dict[str, Tiling]:
        """That can compute it."""
        return {
            name: tiling
            for name, tiling in JOINING.items()
            if tiling.splits == 1 or (splits and self.weight.shape[1] % (tiling.splits * tiling.depth) == 0)
        }

    def by(self, tiling: Tiling, x: Tensor, z: Tensor, arrived: Tensor | None) -> Stream:
        """By this one."""
        return joining_product(x, self.weight, self.bias, z, tiling, factor=self.factor, arrived=arrived)


class Norming:
    """norm(z) · Wᵀ + bias, then a GELU if its form is not 0. The norm's weights are taken into those of the product."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        eps: float,
        *,
        stream: torch.dtype,
        form: int = 0,
        following: Tensor | None = None,
    ) -> None:
        """Weights may be rounded already.

        Args:
            weight: (N, K). `bias`: (N,).
            norm_weight: (K,). `norm_bias`: none for an RMSNorm, which does not centre.
            eps: of the norm.
            stream: z's type.
            form: of the GELU.
            following: the weights of the product right after this one, as many as here.
        """
        self.eps, self.form, self.following, self.dtype = eps, form, following, weight.dtype
        self.centred = norm_bias is not None
        whole = weight.float()
        self.weight = (whole * norm_weight).to(stream)
        self.sums = self.weight.float().sum(1)
        constant = torch.zeros_like(self.sums) if norm_bias is None else (whole * norm_bias).sum(1)
        self.constant = constant if bias is None else constant + bias.float()
        self.chosen: dict[int, Way] = {}

    def __call__(self, stream: Stream, arrived: Tensor | None = None) -> Tensor:
        """(M, K) → (M, N). `arrived` is set to zeros, if it is given, for the product that follows."""
        rows = bucket(len(stream.z))
        if (chosen := self.chosen.get(rows)) is None:
            ways = {name: partial(self.by, tiling) for name, tiling in NORMING.items()}
            what = "norming", *self.weight.shape, self.centred, self.form, self.following is None, rows
            chosen = self.chosen[rows] = choose(what, ways, *stream, arrived, in_line=True)
        return chosen(*stream, arrived)

    def by(self, tiling: Tiling, z: Tensor, statistics: Tensor, columns: int, arrived: Tensor | None) -> Tensor:
        """By this one."""
        return norming_product(
            Stream(z, statistics, columns), self.weight, self.sums, self.constant, self.eps, tiling,
            centred=self.centred, form=self.form, following=self.following, arrived=arrived, dtype=self.dtype,
        )  # fmt: skip
