"""The layers that a fused model is made of: norm, dense layer, attention, head.

Each can be computed in several ways: by torch, or by our kernels with different tile sizes. The fastest one for a shape
is found when that shape first comes (autotune.py).

Shapes: B images, T tokens, M = B·T, K → N features, D width, H heads, d = D/H.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.fast.gpu.autotune import Implementation, choose_fastest, round_up_rows
from vitrail.fast.gpu.kernels import few_rows
from vitrail.fast.gpu.kernels.attention import attention, supports_shape
from vitrail.fast.gpu.kernels.gelu import SWIGLU, number_gelu
from vitrail.fast.gpu.kernels.norm import NormedTokens, add_norm
from vitrail.fast.gpu.kernels.product import FEW, PackedRotation, Tiling, name_tilings, product
from vitrail.fast.gpu.kernels.quantise import quantise_weight
from vitrail.fast.gpu.kernels.swiglu import apply_swiglu

HALF = torch.bfloat16
WIDE = name_tilings(Tiling(128, 128, 64, 4, 3, programs=2, parts=2), Tiling(128, 256, 64, 8, 4, parts=2))
NARROW = name_tilings(
    Tiling(64, 32, 256, 4, 3), Tiling(64, 64, 128, 4, 3), Tiling(64, 64, 128, 4, 4), Tiling(64, 128, 128, 4, 3),
    Tiling(128, 64, 128, 4, 3), Tiling(128, 64, 128, 4, 3, splits=2), Tiling(128, 64, 128, 4, 3, splits=3),
)  # fmt: skip
BYTES = name_tilings(Tiling(128, 256, 128, 8, 3), Tiling(128, 128, 128, 4, 3, programs=2))
NARROW_BYTES = name_tilings(Tiling(64, 64, 128, 4, 4), Tiling(64, 128, 128, 4, 4), Tiling(64, 64, 256, 4, 3, splits=2))
"""Tilings that were fastest for some product on an H200, out of many that were tried (benchmarks/RESULTS.md): for many
and for few rows, in bf16 and in FP8."""
WIDEST_FLASH_HEAD = 256
"""Widest head that Flash Attention takes."""
ATTENTION_TILES = [(64, 4), (128, 8)]
"""Queries per tile and warps per program, of our attention kernel."""


class FusedNorm:
    """z + factor · branch, and its LayerNorm or RMSNorm, in one pass."""

    def __init__(self, norm: nn.Module) -> None:
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        assert norm.eps is not None
        self.weight = norm.weight.detach().float()
        self.bias = norm.bias.detach().float() if isinstance(norm, nn.LayerNorm) else None
        self.eps = norm.eps

    def __call__(self, z: Tensor, branch: Tensor, factor: Tensor | None, dtype: torch.dtype) -> NormedTokens:
        """z and branch (M, D), factor (D,) → the sum, and its norm as `dtype`."""
        return add_norm(z, branch, self.weight, self.bias, self.eps, factor=factor, dtype=dtype)

    def normalise(self, x: Tensor, dtype: torch.dtype) -> NormedTokens:
        """x (M, D) → x itself and its norm as `dtype`."""
        return add_norm(x, None, self.weight, self.bias, self.eps, dtype=dtype)


class DenseWeights(NamedTuple):
    """What a dense layer computes with."""

    weight: Tensor
    """(N, K)"""
    bias: Tensor | None
    """(N,)"""


class FusedLinear:
    """x · Wᵀ + bias, then a GELU or SwiGLU if its form is not 0: in bf16, or in FP8 where x has scales."""

    def __init__(
        self,
        layer: nn.Linear | DenseWeights,
        form: int = 0,
        fp8: bool = False,
        rows: slice = slice(None),
        splits: bool = False,
    ) -> None:
        """Take the weights of a layer.

        Args:
            layer: The dense layer. For SwiGLU its outputs are interleaved: gate, value, gate, value, …
            form: Number of the GELU after it (`number_gelu`), or `SWIGLU`; 0 for none.
            fp8: Quantise the weights to FP8.
            rows: Which outputs of the layer to compute.
            splits: The result may come in parts (S, M, N), which the caller adds up, as `add_norm` does.
        """
        self.fp8, self.form, self.splits = fp8, form, splits
        self.chosen: dict[tuple[Hashable, ...], Implementation] = {}
        self.next_weight: Tensor | None = None
        """The weights of the product right after this one, which the cache fetches in the meantime."""
        self.scales: Tensor | None = None
        self.weight = layer.weight.detach()[rows].to(HALF)
        if fp8:
            self.weight, self.scales = quantise_weight(layer.weight[rows])
        self.bias = None if layer.bias is None else layer.bias.detach()[rows].to(HALF)

    def __call__(self, x: Tensor, scales: Tensor | None = None, out_scale: Tensor | None = None) -> Tensor:
        """(M, K), in FP8 with scales (M, 1) or () → (M, N) in bf16, or in FP8 in units of `out_scale`."""
        key = round_up_rows(len(x)), scales is not None and scales.numel() > 1, out_scale is not None
        if (chosen := self.chosen.get(key)) is None:
            shape = *self.describe(), *key
            candidates = self.list_implementations(*key)
            chosen = choose_fastest(shape, candidates, x, scales, out_scale, cold_cache=key[0] <= FEW)
            self.chosen[key] = chosen
        return chosen(x, scales, out_scale)

    def describe(self) -> tuple[Hashable, ...]:
        """Return what its time depends on, besides the input."""
        return "product", self.fp8, *self.weight.shape, self.form, self.splits

    def list_implementations(self, rows: int, by_row: bool, to_fp8: bool) -> dict[str, Implementation]:
        """Return what can compute it, by name. torch supports FP8 only with a scale per row, and without a GELU."""
        candidates: dict[str, Implementation] = {}
        if not self.fp8 or (by_row and not to_fp8 and self.form in (0, SWIGLU)):
            candidates["library"] = lambda x, scales, out_scale: self.finish(self.run_torch(x, scales))
        if rows <= few_rows.MOST and not self.fp8:
            candidates["few rows"] = lambda x, scales, out_scale: self.finish(
                few_rows.multiply_few_rows(x, self.weight, self.bias, self.form % SWIGLU)
            )
        return candidates | {name: partial(self.run_kernel, tiling) for name, tiling in self.list_tilings(rows).items()}

    def list_tilings(self, rows: int) -> dict[str, Tiling]:
        """Return the tilings that are worth trying for so many rows."""
        (outputs, inputs), size = self.weight.shape, self.weight.element_size()
        outputs = outputs // 2 if self.form == SWIGLU else outputs
        if inputs * size % 16 or outputs * size % 16:  # the copy engine takes rows of whole 16 bytes
            return {}
        wide, narrow = (BYTES, NARROW_BYTES) if self.fp8 else (WIDE, NARROW)
        return {
            name: tiling
            for name, tiling in (wide if rows > FEW else narrow).items()
            if tiling.splits == 1 or (self.splits and self.weight.shape[1] % (tiling.splits * tiling.depth) == 0)
        }

    def run_kernel(
        self,
        tiling: Tiling,
        x: Tensor,
        scales: Tensor | None,
        out_scale: Tensor | None,
        rotation: PackedRotation | None = None,
    ) -> Tensor:
        return product(
            x, self.weight, self.bias, tiling,
            form=self.form, row_scales=scales, column_scales=self.scales, out_scale=out_scale,
            next_weight=self.next_weight, rotation=rotation, dtype=HALF,
        )  # fmt: skip

    def run_torch(self, x: Tensor, scales: Tensor | None) -> Tensor:
        """Multiply, and apply a GELU, but no SwiGLU."""
        y: Tensor
        if self.scales is not None:
            assert scales is not None
            y = torch._scaled_mm(
                x, self.weight.t(), scales, self.scales[None], bias=self.bias, out_dtype=HALF, use_fast_accum=True
            )
            return y
        if self.form == number_gelu("tanh") and self.bias is not None and x.is_cuda:
            y = torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)
            return y
        y = F.linear(x, self.weight, self.bias)
        if self.form == number_gelu("quick"):
            return y * torch.sigmoid(1.702 * y)
        if self.form == SWIGLU:
            return y
        return F.gelu(y, approximate="tanh" if self.form == number_gelu("tanh") else "none") if self.form else y

    def finish(self, y: Tensor) -> Tensor:
        """Apply what our own product does by itself, and others do not."""
        return apply_swiglu(y, interleaved=True) if self.form == SWIGLU else y


class FusedAttention:
    """Self-attention: queries, keys and values side by side (M, 3·D) → (M, D)."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.chosen: dict[tuple[int, int], Implementation] = {}

    def __call__(self, qkv: Tensor, tokens: int) -> Tensor:
        """(M, 3·D) → (M, D); `tokens`: T, of one image."""
        key = round_up_rows(len(qkv)), tokens
        if (chosen := self.chosen.get(key)) is None:
            width = qkv.shape[1] // 3 // self.heads
            shape = "attention", qkv.shape[1], self.heads, *key
            candidates = self.list_implementations(key[0], width, tokens)
            chosen = self.chosen[key] = choose_fastest(shape, candidates, qkv, tokens, cold_cache=key[0] <= FEW)
        return chosen(qkv, tokens)

    def list_implementations(self, rows: int, width: int, tokens: int) -> dict[str, Implementation]:
        """Return what can compute it, by name.

        Plain products need memory for all scores: they are included only where they may be fast, or nothing else works.
        """
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        backends += [SDPBackend.MATH] if rows <= FEW or width > WIDEST_FLASH_HEAD else []
        candidates: dict[str, Implementation] = {
            backend.name: partial(self._run_torch, backend) for backend in backends
        }
        if supports_shape(tokens, width):
            for tile in ATTENTION_TILES:
                candidates[f"ours {tile}"] = lambda qkv, tokens, tile=tile: attention(qkv, tokens, self.heads, *tile)
        return candidates

    def _run_torch(self, backend: SDPBackend, qkv: Tensor, tokens: int) -> Tensor:
        q, k, v = qkv.view(-1, tokens, 3, self.heads, qkv.shape[1] // 3 // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        with sdpa_kernel(backend) if qkv.is_cuda else nullcontext():
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(qkv), -1)


class FusedHead:
    """The logits of a head that is one dense layer, in float32: for a few images by a kernel that starts early."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head
        self.chosen: dict[int, Implementation] = {}

    def __call__(self, y: Tensor) -> Tensor:
        """(B, D) → (B, K)."""
        count = len(y)
        if count > few_rows.MOST:
            return self.run_torch(y)
        if (chosen := self.chosen.get(count)) is None:
            shape = "head", *self.head.weight.shape, self.head.bias is None, count
            candidates = {"library": self.run_torch, "few rows": self.run_kernel}
            chosen = self.chosen[count] = choose_fastest(shape, candidates, y, cold_cache=True)
        return chosen(y)

    def run_torch(self, y: Tensor) -> Tensor:
        logits: Tensor = self.head(y)
        return logits

    def run_kernel(self, y: Tensor) -> Tensor:
        return few_rows.multiply_few_rows(y.contiguous(), self.head.weight, self.head.bias)
