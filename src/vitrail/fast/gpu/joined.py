"""A block's products for few tokens, with its sums and norms inside: five kernels, where a block is seven.

Shapes: M tokens, K → N features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vitrail.fast.gpu.kernels.joined import Stream, joining_product, norming_product
from vitrail.fast.gpu.kernels.product import Tiling

if TYPE_CHECKING:
    from vitrail.fast.gpu.fused import Block, Layer, Norm, ReadBlock

STREAM = torch.float16
"""What z is kept in between blocks: as many bytes as bf16, eight times finer; it saturates at 65,504."""

MOST_ROWS = 512
"""Tokens up to which it is tried, two images of B/16: beyond, the chip fills, and starting a kernel is less of its
time; and every size that is tried takes seconds when it first comes."""

NORMING = (Tiling(64, 128, 128, 4, 3), Tiling(128, 64, 128, 4, 3), Tiling(64, 64, 128, 4, 4))
JOINING = (Tiling(64, 32, 256, 4, 3), Tiling(64, 64, 128, 4, 4), Tiling(64, 32, 128, 4, 4))


class Tilings(NamedTuple):
    """How the products of a block are cut up, in all blocks alike."""

    qkv: Tiling = NORMING[0]
    out: Tiling = JOINING[0]
    fc1: Tiling = NORMING[0]
    fc2: Tiling = JOINING[0]


TRIED = {"fc2": JOINING, "fc1": NORMING, "qkv": NORMING, "out": JOINING}
"""Of each product, one after the other. The first of each were fastest on an H200; the second were for qkv and fc2 in
an earlier measurement (docs/speed-log.md)."""


def takes(*weights: Tensor) -> bool:
    """Whether the copy engine can read them: rows of whole 16 bytes."""
    return all(weight.shape[1] * weight.element_size() % 16 == 0 for weight in weights)


class Joining:
    """z + factor · (x · Wᵀ + bias)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, factor: Tensor | None) -> None:
        self.weight, self.bias, self.factor = weight, bias, factor

    def __call__(self, x: Tensor, z: Tensor, tiling: Tiling) -> Stream:
        """(M, K), (M, N) → (M, N), with statistics for the next norm."""
        return joining_product(x, self.weight, self.bias, z, tiling, factor=self.factor)


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

    def __call__(self, stream: Stream, tiling: Tiling) -> Tensor:
        """(M, K) → (M, N)."""
        return norming_product(
            stream, self.weight, self.sums, self.constant, self.eps, tiling,
            centred=self.centred, form=self.form, following=self.following, dtype=self.dtype,
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
        stream = self.out(self.attention(qkv, tokens), z, tilings.out)
        return self.fc2(self.fc1(stream, tilings.fc1), stream.z, tilings.fc2)


def _norming(norm: Norm, layer: Layer) -> Norming:
    return Norming(
        layer.weight, layer.bias, norm.weight, norm.bias, norm.eps,
        dtype=STREAM, form=layer.form, following=layer.following,
    )  # fmt: skip
