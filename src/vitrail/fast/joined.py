"""A block's products for few tokens, with its sums and norms inside: five kernels, where a block is seven.

Shapes: M tokens, K → N features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vitrail.fast.kernels.joined import Stream, arrivals, joining_product, norming_product
from vitrail.fast.kernels.product import Tiling

if TYPE_CHECKING:
    from vitrail.fast.fused import Block, Layer, Norm, ReadBlock

STREAM = torch.float16
"""What z is kept in between blocks: as many bytes as bf16, eight times finer; it saturates at 65,504."""

MOST_ROWS = 512
"""Tokens up to which it is tried, two images of B/16: beyond, the chip fills, and starting a kernel is less of its
time; and every size that is tried takes seconds when it first comes."""


class Tilings(NamedTuple):
    """How the products of a block are cut up, in all blocks alike."""

    qkv: Tiling = Tiling(128, 64, 128, 4, 3)
    out: Tiling = Tiling(64, 32, 256, 4, 3)
    fc1: Tiling = Tiling(64, 128, 128, 4, 3)
    fc2: Tiling = Tiling(64, 64, 128, 4, 4)


NORMING = (
    Tiling(128, 64, 128, 4, 3), Tiling(64, 128, 128, 4, 3), Tiling(64, 64, 128, 4, 4), Tiling(64, 64, 128, 4, 3),
    Tiling(128, 64, 64, 4, 4), Tiling(64, 128, 64, 4, 4),
)  # fmt: skip
JOINING = (
    Tiling(64, 32, 256, 4, 3), Tiling(64, 64, 128, 4, 4), Tiling(64, 32, 128, 4, 4), Tiling(64, 32, 128, 4, 3),
    Tiling(128, 32, 128, 4, 4),
)  # fmt: skip
SPLIT = (
    Tiling(128, 64, 128, 4, 3, splits=3), Tiling(128, 64, 128, 4, 3, splits=4), Tiling(128, 64, 64, 4, 4, splits=4),
    Tiling(64, 64, 128, 4, 3, splits=2), Tiling(64, 64, 128, 4, 3, splits=3),
)  # fmt: skip
"""In parts, for a long sum such as fc2's. Not tried yet, for they have never run on a GPU; kernel_check has them."""
TRIED = {"fc2": JOINING, "fc1": NORMING, "qkv": NORMING, "out": JOINING}
"""Of each product, one after the other. The first of each were fastest on an H200; which of the others ever are is not
known yet (docs/speed-log.md)."""


def takes(*weights: Tensor) -> bool:
    """Whether the copy engine can read them: rows of whole 16 bytes."""
    return all(weight.shape[1] * weight.element_size() % 16 == 0 for weight in weights)


def divides(tiling: Tiling, depth: int) -> bool:
    """Whether a sum over so many features can be split as a tiling does."""
    return tiling.splits == 1 or depth % (tiling.splits * tiling.depth) == 0


class Joining:
    """z + factor · (x · Wᵀ + bias)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, factor: Tensor | None) -> None:
        self.weight, self.bias, self.factor = weight, bias, factor

    def __call__(self, x: Tensor, z: Tensor, tiling: Tiling, arrived: Tensor | None = None) -> Stream:
        """(M, K), (M, N) → (M, N), with statistics for the next norm. `arrived`: zeros, where sums are split."""
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
        dtype: torch.dtype,
        form: int = 0,
        following: Tensor | None = None,
    ) -> None:
        """Weights may be rounded already.

        Args:
            weight: (N, K). `bias`: (N,).
            norm_weight: (K,). `norm_bias`: none for an RMSNorm, which does not centre.
            eps: of the norm.
            dtype: z's.
            form: of the GELU.
            following: the weights of the product right after this one, as many as here.
        """
        self.eps, self.form, self.following, self.dtype = eps, form, following, weight.dtype
        self.centred = norm_bias is not None
        whole = weight.float()
        self.weight = (whole * norm_weight).to(dtype)
        self.sums = self.weight.float().sum(1)
        constant = torch.zeros_like(self.sums) if norm_bias is None else (whole * norm_bias).sum(1)
        self.constant = constant if bias is None else constant + bias.float()

    def __call__(self, stream: Stream, tiling: Tiling, arrived: Tensor | None = None) -> Tensor:
        """(M, K) → (M, N). `arrived` is set to zeros, if it is given, for the product that follows."""
        return norming_product(
            stream, self.weight, self.sums, self.constant, self.eps, tiling,
            centred=self.centred, form=self.form, following=self.following, arrived=arrived, dtype=self.dtype,
        )  # fmt: skip


class JoinedBlock:
    """A block, of the same weights, whose products have sums and norms in them; and the next one's first product."""

    def __init__(self, block: Block, following: Block | ReadBlock | None) -> None:
        self.attention = block.attention
        self.out = Joining(block.out.weight, block.out.bias, block.factor1)
        self.fc1 = _norming(block.norm2, block.fc1)
        self.fc2 = Joining(block.fc2.weight, block.fc2.bias, block.factor2)
        self.next_qkv = None if following is None else _norming(following.norm1, following.qkv)

    def __call__(self, qkv: Tensor, z: Tensor, tokens: int, tilings: Tilings) -> Stream:
        """(M, 3·D) and z → z behind the block."""
        stream, arrived = self.out(self.attention(qkv, tokens), z, tilings.out), arrivals(z)
        return self.fc2(self.fc1(stream, tilings.fc1, arrived), stream.z, tilings.fc2, arrived)


def _norming(norm: Norm, layer: Layer) -> Norming:
    return Norming(
        layer.weight, layer.bias, norm.weight, norm.bias, norm.eps,
        dtype=STREAM, form=layer.form, following=layer.following,
    )  # fmt: skip
