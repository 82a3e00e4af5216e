"""An encoder block for few tokens (one or two images), whose sums and norms are merged into its products.

Such a block takes five kernels instead of seven. `FusedEmbedder.run_merged` uses it for least latency; for more tokens
separate kernels are faster.

Shapes: M tokens, K → N features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vitrail.fast.gpu.kernels.merged import ResidualStream, multiply_and_add, normalise_and_multiply
from vitrail.fast.gpu.kernels.product import Tiling

if TYPE_CHECKING:
    from vitrail.fast.gpu.fused_block import FusedBlock, FusedLastBlock
    from vitrail.fast.gpu.fused_layers import FusedLinear, FusedNorm

STREAM = torch.float16
"""Type of z between blocks: as many bytes as bf16 but eight times finer; it saturates at 65,504."""

MOST_ROWS = 512
"""Merging is tried up to so many tokens (two images of B/16). With more, starting kernels matters less, and trying a
size takes seconds when it first comes."""

NORM_TILINGS = (Tiling(64, 128, 128, 4, 3), Tiling(128, 64, 128, 4, 3), Tiling(64, 64, 128, 4, 4))
RESIDUAL_TILINGS = (Tiling(64, 32, 256, 4, 3), Tiling(64, 64, 128, 4, 4), Tiling(64, 32, 128, 4, 4))


class BlockTilings(NamedTuple):
    """The tile sizes of a block's four products, the same in all blocks."""

    qkv: Tiling = NORM_TILINGS[0]
    out: Tiling = RESIDUAL_TILINGS[0]
    fc1: Tiling = NORM_TILINGS[0]
    fc2: Tiling = RESIDUAL_TILINGS[0]


TILING_CANDIDATES = {"fc2": RESIDUAL_TILINGS, "fc1": NORM_TILINGS, "qkv": NORM_TILINGS, "out": RESIDUAL_TILINGS}
"""What is tried for each product, in this order. The first of each was fastest on an H200; the second was for qkv and
fc2 in an earlier measurement (benchmarks/RESULTS.md)."""


def supports_weights(*weights: Tensor) -> bool:
    """Return whether the GPU's copy engine can read the weights: their rows must be multiples of 16 bytes."""
    return all(weight.shape[1] * weight.element_size() % 16 == 0 for weight in weights)


class ResidualProduct:
    """z + factor · (x · Wᵀ + bias)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, factor: Tensor | None) -> None:
        self.weight, self.bias, self.factor = weight, bias, factor

    def __call__(self, x: Tensor, z: Tensor, tiling: Tiling) -> ResidualStream:
        """x (M, K), z (M, N) → the new z (M, N), with statistics for the next norm."""
        return multiply_and_add(x, self.weight, self.bias, z, tiling, factor=self.factor)


class NormProduct:
    """norm(z) · Wᵀ + bias, then a GELU if its form is not 0. The norm's weights are multiplied into W."""

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
        next_weight: Tensor | None = None,
    ) -> None:
        """Merge the weights of a norm and of the product after it.

        Args:
            weight: (N, K), may already be rounded.
            bias: (N,) or None.
            norm_weight: (K,).
            norm_bias: (K,); None for an RMSNorm, which does not subtract the mean.
            eps: Of the norm.
            dtype: Type of z.
            form: Number of the GELU; 0 for none.
            next_weight: The weights of the product right after this one, of the same size as `weight`.
        """
        self.eps, self.form, self.next_weight, self.dtype = eps, form, next_weight, weight.dtype
        self.centred = norm_bias is not None
        whole = weight.float()
        self.weight = (whole * norm_weight).to(dtype)
        self.sums = self.weight.float().sum(1)
        constant = torch.zeros_like(self.sums) if norm_bias is None else (whole * norm_bias).sum(1)
        self.constant = constant if bias is None else constant + bias.float()

    def __call__(self, stream: ResidualStream, tiling: Tiling) -> Tensor:
        """(M, K) → (M, N)."""
        return normalise_and_multiply(
            stream, self.weight, self.sums, self.constant, self.eps, tiling,
            centred=self.centred, form=self.form, next_weight=self.next_weight, dtype=self.dtype,
        )  # fmt: skip


class MergedBlock:
    """A block with sums and norms merged into its products, and the first product of the block after it."""

    def __init__(self, block: FusedBlock, next_block: FusedBlock | FusedLastBlock | None) -> None:
        self.attention = block.attention
        self.out = ResidualProduct(block.out.weight, block.out.bias, block.factor1)
        self.fc1 = _merge_norm(block.norm2, block.fc1)
        self.fc2 = ResidualProduct(block.fc2.weight, block.fc2.bias, block.factor2)
        self._next_qkv = None if next_block is None else _merge_norm(next_block.norm1, next_block.qkv)
        self._finish = None if next_block is None else next_block.qkv.finish

    def __call__(self, qkv: Tensor, z: Tensor, tokens: int, tilings: BlockTilings) -> ResidualStream:
        """qkv (M, 3·D) and z (M, D) → z after the block."""
        stream = self.out(self.attention(qkv, tokens), z, tilings.out)
        return self.fc2(self.fc1(stream, tilings.fc1), stream.z, tilings.fc2)

    def multiply_next(self, stream: ResidualStream, tiling: Tiling) -> Tensor | None:
        """z after the block → qkv (M, 3·D) of the next one, ready for attention; None if there is no next one."""
        if self._next_qkv is None or self._finish is None:
            return None
        return self._finish(self._next_qkv(stream, tiling))


def _merge_norm(norm: FusedNorm, layer: FusedLinear) -> NormProduct:
    return NormProduct(
        layer.weight, layer.bias, norm.weight, norm.bias, norm.eps,
        dtype=STREAM, form=layer.form, next_weight=layer.next_weight,
    )  # fmt: skip
