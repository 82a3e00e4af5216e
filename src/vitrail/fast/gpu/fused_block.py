"""The encoder blocks of a fused model, in the form that the kernels take.

Shapes: B images, T tokens, M = B·T, R tokens that are read, D width, H heads, d = D/H.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.fast.gpu.fused_heads import FusedQkv
from vitrail.fast.gpu.fused_layers import HALF, DenseWeights, FusedAttention, FusedLinear, FusedNorm
from vitrail.fast.gpu.kernels.gelu import SWIGLU
from vitrail.fast.gpu.kernels.norm import FP8, NormedTokens
from vitrail.fast.gpu.kernels.product import FEW
from vitrail.fast.gpu.kernels.quantise import quantise
from vitrail.fast.gpu.kernels.read_attention import MOST_TOKENS, read_forward, read_with_torch
from vitrail.model.encoder import EncoderBlock, LayerScale
from vitrail.model.mlp import MlpBlock, SwigluBlock
from vitrail.model.rotary import Rotation


class FusedBlock:
    """An encoder block, in the form that the kernels take."""

    def __init__(self, block: EncoderBlock, form: int, fp8: bool, rotation: Rotation | None = None) -> None:
        """Take the weights of a block.

        Args:
            block: The plain block.
            form: Number of the GELU, or `SWIGLU`.
            fp8: Multiply in FP8 where that is possible.
            rotation: Turns its queries and keys.
        """
        self.norm1, self.norm2 = FusedNorm(block.norm1), FusedNorm(block.norm2)
        self.qkv, self.out = FusedQkv(block.attention, rotation, fp8), FusedLinear(block.attention.out, splits=True)
        self.attention = FusedAttention(block.attention.num_heads)
        self.attention_norm = fuse_norm(block.attention.norm)
        self.fc1, self.fc2 = fuse_fc1(block.mlp, form, fp8), FusedLinear(block.mlp.fc2, fp8=fp8, splits=True)
        self.mlp_norm = fuse_norm(block.mlp.norm)
        if form != SWIGLU and self.mlp_norm is None:
            self.fc1.next_weight = self.fc2.weight
        self.factor1, self.factor2 = layer_scale_factor(block.scale1), layer_scale_factor(block.scale2)
        self.dtype = FP8 if fp8 else HALF
        self.hidden_scale: Tensor | None = None
        """The scale of the MLP's hidden layer in FP8, after calibration; None: each token has its own scale."""
        self.largest: Tensor | None = None
        """The largest hidden activation so far, while calibrating."""

    def attend(self, normed: NormedTokens, tokens: int) -> NormedTokens:
        """Compute z' = MSA(LN(z)) + z and LN(z')."""
        mixed = self.attention(self.qkv(normed.y, normed.scales), tokens)
        if self.attention_norm is not None:
            mixed = self.attention_norm.normalise(mixed, HALF).y
        return self.norm2(normed.z, self.out(mixed), self.factor1, self.dtype)

    def compute_hidden(self, normed: NormedTokens) -> tuple[Tensor, Tensor | None]:
        """Return the MLP's hidden layer, and in FP8 its scales."""
        if self.mlp_norm is not None:
            hidden = self.mlp_norm.normalise(self.fc1(normed.y, normed.scales), self.dtype)
            return hidden.y, hidden.scales
        if not self.fc1.fp8 or self.hidden_scale is not None:
            return self.fc1(normed.y, normed.scales, self.hidden_scale), self.hidden_scale
        whole = self.fc1(normed.y, normed.scales)
        if self.largest is not None:
            self.largest = torch.maximum(self.largest, whole.abs().amax().float())
        return quantise(whole)

    def apply_mlp(self, normed: NormedTokens, norm: FusedNorm, dtype: torch.dtype) -> NormedTokens:
        """Compute z = MLP(LN(z')) + z' and the norm that follows."""
        return norm(normed.z, self.fc2(*self.compute_hidden(normed)), self.factor2, dtype)


class FusedLastBlock:
    """The last encoder block, computed only for the first R tokens: those that are read."""

    def __init__(self, block: EncoderBlock, form: int, read: int, rotation: Rotation | None = None) -> None:
        """Take the weights of a block; `read` is R, and at most the number of tokens before the patches."""
        self.read, self.heads = read, block.attention.num_heads
        self.norm1, self.norm2 = FusedNorm(block.norm1), FusedNorm(block.norm2)
        self.qkv = FusedQkv(block.attention, rotation)
        self.q = FusedQkv(block.attention, rotation, keys=False)
        self.kv = FusedQkv(block.attention, rotation, queries=False)
        self.attention_norm, self.mlp_norm = fuse_norm(block.attention.norm), fuse_norm(block.mlp.norm)
        self.out = FusedLinear(block.attention.out)
        self.fc1, self.fc2 = fuse_fc1(block.mlp, form), FusedLinear(block.mlp.fc2)
        self.factor1, self.factor2 = layer_scale_factor(block.scale1), layer_scale_factor(block.scale2)

    def __call__(self, normed: NormedTokens, tokens: int, norm: FusedNorm | None) -> Tensor:
        """z (M, D) and norm1(z) → (B, R, D), float32; `norm`: the norm after the block, applied if not None."""
        width = normed.z.shape[1]
        if len(normed.y) <= FEW:  # one kernel is faster than two, although it computes unneeded queries
            return self.run_from_qkv(self.qkv(normed.y), normed.z, tokens, norm)
        y = normed.y.view(-1, tokens, width)
        q = self.q(y[:, : self.read].reshape(-1, width).contiguous()).view(-1, self.read, width)
        return self._run_from_heads(q, self.kv(normed.y).view(-1, tokens, 2 * width), normed.z, norm)

    def run_from_qkv(self, qkv: Tensor, z: Tensor, tokens: int, norm: FusedNorm | None) -> Tensor:
        """Do the same from queries, keys and values side by side (M, 3·D), and z (M, D)."""
        width = z.shape[1]
        qkv = qkv.view(-1, tokens, 3 * width)
        return self._run_from_heads(qkv[:, : self.read, :width], qkv[:, :, width:], z, norm)

    def _run_from_heads(self, q: Tensor, kv: Tensor, z: Tensor, norm: FusedNorm | None) -> Tensor:
        """Do the same from queries (B, R, D), keys and values (B, T, 2·D), and z (M, D)."""
        tokens, width = kv.shape[1], z.shape[1]
        read = read_forward if tokens <= MOST_TOKENS else read_with_torch
        mixed = read(q, kv, self.heads).view(-1, width)
        if self.attention_norm is not None:
            mixed = self.attention_norm.normalise(mixed, HALF).y
        first = z.view(-1, tokens, width)[:, : self.read].reshape(-1, width).contiguous()
        normed = self.norm2(first, self.out(mixed), self.factor1, HALF)
        hidden = self.fc1(normed.y)
        branch = self.fc2(hidden if self.mlp_norm is None else self.mlp_norm.normalise(hidden, HALF).y)
        if norm is None:
            z = normed.z + (branch.float() if self.factor2 is None else branch * self.factor2)
        else:
            z = norm(normed.z, branch, self.factor2, torch.float32).y
        return z.view(-1, self.read, width)


def fuse_norm(norm: nn.Module) -> FusedNorm | None:
    """Return a norm for the kernels; None for the identity."""
    return None if isinstance(norm, nn.Identity) else FusedNorm(norm)


def fuse_fc1(mlp: MlpBlock | SwigluBlock, form: int, fp8: bool = False) -> FusedLinear:
    """Return the first layer of an MLP; for SwiGLU its outputs become gate, value, gate, value, …"""
    layer: nn.Linear | DenseWeights = mlp.fc1
    if form == SWIGLU:
        weight, bias = (
            None if each is None else each.detach().unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
            for each in (mlp.fc1.weight, mlp.fc1.bias)
        )
        assert weight is not None
        layer = DenseWeights(weight, bias)
    return FusedLinear(layer, form, fp8)


def layer_scale_factor(scale: nn.Module) -> Tensor | None:
    return scale.factor.detach().float() if isinstance(scale, LayerScale) else None
