"""`FusedTraining`: training steps of a plain Vision Transformer by fused kernels, for wide models on an NVIDIA GPU.

Function and gradients are those of the model under autocast, with less work than the compiled model:

- the last block computes and differentiates only what the class token needs;
- a residual sum and the norm after it are one pass, forward and backward; the backward pass also sums over tokens for
  the gradients of norms and biases;
- the gradient through a GELU and the gradient of the bias before it are one pass;
- one pass puts the gradients of queries, keys and values side by side and sums them for the bias.

Parameters stay in float32 and are cast for the products, as autocast does.

Shapes: B images, T tokens, R tokens that are read, M = B·T, D width, H heads, d = D/H.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.errors import NotApplicableError
from vitrail.fast.gpu.fused_embedder import check_fusible
from vitrail.fast.gpu.gradients import (
    GELUS,
    AddNorm,
    AssembleNorm,
    MatrixProduct,
    MlpProducts,
    QkvAttention,
    ReadAttention,
    Shape,
)
from vitrail.fast.gpu.kernels.gelu import number_gelu
from vitrail.fast.gpu.kernels.patches import cut_patches
from vitrail.fast.gpu.kernels.read_attention import MOST_TOKENS, read_with_torch
from vitrail.fast.last_block import count_read_tokens
from vitrail.model.base import ImageModel
from vitrail.model.cost import count_tokens
from vitrail.model.encoder import EncoderBlock
from vitrail.model.patches import PatchEmbed
from vitrail.model.positions import Grid
from vitrail.model.vit import VisionTransformer


class FusedTraining:
    """logits = model(images), with gradients, by fused kernels. It trains the parameters of the model itself."""

    def __init__(
        self,
        model: ImageModel,
        dtype: torch.dtype = torch.bfloat16,
        stream: torch.dtype = torch.float32,
        fp8: bool = False,
    ) -> None:
        """Wrap a model.

        Args:
            model: A Vision Transformer.
            dtype: Type of the products.
            stream: Type of z between blocks; float32 under autocast.
            fp8: Compute the forward products after a norm in FP8, with a scale per row; everything else in `dtype`.

        Raises:
            NotApplicableError: The kernels cannot train this model.
        """
        check_trainable(model)
        assert isinstance(model, VisionTransformer)
        self.model, self.dtype, self.stream, self.fp8 = model, dtype, stream, fp8
        self.form = number_gelu(model.architecture.gelu)
        self.read = count_read_tokens(model)

    def __call__(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K). In evaluation mode the plain model runs, so that its inside can be inspected."""
        rows, columns = self.model.measure_grid(images)
        if not self.model.training or not has_reliable_gradient(self.model.prefix + rows * columns):
            return type(self.model).forward(self.model, images)
        y = self._embed(images)
        with self._autocast(images):
            logits: Tensor = self.model.head(y)
        return logits

    def _embed(self, pixels: Tensor) -> Tensor:
        model, images = self.model, len(pixels)
        blocks = [block for block in model.encoder.blocks if isinstance(block, EncoderBlock)]
        last = None if self.read is None else blocks.pop()
        norms = [block.norm1 for block in blocks] + [model.encoder.norm if last is None else last.norm1]
        rows, columns = model.measure_grid(pixels)
        shape = images, model.prefix + rows * columns, model.architecture.num_heads
        z, y, scales, twin, link = self._embed_tokens(pixels, (rows, columns), norms[0], bool(blocks))
        for block, norm in zip(blocks, norms[1:], strict=True):
            attention, mlp = block.attention, block.mlp
            y = QkvAttention.apply(y, attention.qkv.weight, attention.qkv.bias, shape, twin, scales)
            branch = MatrixProduct.apply(y, attention.out.weight)
            drop = _draw_drop(block, images, z)
            z, y, scales, twin, link = self._add_branch(
                (z, link), branch, attention.out.bias, drop, block.norm2, shape[1], self.fp8
            )
            branch = MlpProducts.apply(y, mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, self.form, twin, scales)
            drop, uses_fp8 = _draw_drop(block, images, z), self.fp8 and norm is not norms[-1]
            z, y, scales, twin, link = self._add_branch((z, link), branch, mlp.fc2.bias, drop, norm, shape[1], uses_fp8)
        with self._autocast(pixels):
            if last is None:
                pooled = model.pool_features(y.view(images, shape[1], -1).float())
            else:
                assert self.read is not None
                pooled = model.pool_features(
                    model.encoder.norm(self._run_last_block(last, z, link, y, shape, self.read))
                )
        return pooled

    def _embed_tokens(self, pixels: Tensor, grid: Grid, norm: nn.Module, twin: bool) -> Any:
        """Return the tokens that go into the first block, and their norm, as `AssembleNorm` does."""
        model, embed = self.model, self.model.patch_embed
        model.check_images(pixels)
        base = torch.zeros(1, grid[0] * grid[1], model.width, device=pixels.device)
        if isinstance(embed, PatchEmbed) and model.backbone is None:
            patches = MatrixProduct.apply(cut_patches(pixels, embed.patch_size, self.dtype), embed.projection.weight)
            if embed.projection.bias is not None:
                base = base + embed.projection.bias  # in the table of every image: needs no pass of its own
        else:
            with self._autocast(pixels):
                patches = model.tokens(pixels).flatten(0, 1).to(self.dtype)
        table = model._prepend_prefix(base)[0]
        for positions in model.position_embedding:
            table = table + model._make_table(positions, grid)
        assert isinstance(norm, nn.LayerNorm)
        return AssembleNorm.apply(
            table, patches, norm.weight, norm.bias, model.prefix, norm.eps, self.stream, self.dtype, self.fp8 and twin
        )

    def _add_branch(
        self, stream: tuple[Tensor, Tensor], branch: Tensor, bias: Tensor, drop: Tensor | None, norm: nn.Module,
        tokens: int, twin: bool,
    ) -> Any:  # fmt: skip
        """Add a branch to the stream (z and its link), and return the sum and its norm, as `AddNorm` does."""
        assert isinstance(norm, nn.LayerNorm)
        return AddNorm.apply(*stream, branch, bias, norm.weight, norm.bias, drop, tokens, norm.eps, self.dtype, twin)

    def _run_last_block(
        self, block: EncoderBlock, z: Tensor, link: Tensor, y: Tensor, shape: Shape, read: int
    ) -> Tensor:
        """z, its link and norm1(z), all (M, D) → the last block's output for the tokens that are read (B, R, D)."""
        (images, count_tokens, heads), attention, width = shape, block.attention, z.shape[1]
        weight, bias = attention.qkv.weight, attention.qkv.bias
        y = y.view(images, count_tokens, width)
        q = F.linear(y[:, :read], weight[:width], bias[:width])
        kv = F.linear(y, weight[width:], bias[width:])
        attend = ReadAttention.apply if count_tokens <= MOST_TOKENS else read_with_torch
        out = attention.out(attend(q, kv, heads))
        z, link = z.view(images, count_tokens, width), link.view(images, count_tokens, width)
        first = z[:, :read].float() + link[:, :read] + block.drop(out)
        result: Tensor = first + block.drop(block.mlp(block.norm2(first)))
        return result

    def _autocast(self, tensor: Tensor) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(tensor.device.type, self.dtype)


def check_trainable(model: ImageModel) -> None:
    """Raise a NotApplicableError, with the reason, for a model that these kernels cannot train."""
    check_fusible(model)
    assert isinstance(model, VisionTransformer)
    a = model.architecture
    for is_unsupported, feature in (
        (a.dropout or a.attention_dropout, "dropout"),
        (a.layer_scale is not None, "layer scale"),
        (a.norm != "layer", "another norm than LayerNorm"),
        (not a.qkv_bias, "queries without a bias"),
        (number_gelu(a.gelu) not in GELUS, f"a {a.gelu} GELU"),
        (a.norm_after_pool and count_read_tokens(model) is None, "a norm after a pool over all tokens"),
        (
            not has_reliable_gradient(count_tokens(a)),
            f"{count_tokens(a)} tokens, for which cuDNN's attention has no reliable gradient",
        ),
        (a.width // a.num_heads > 128 or a.width // a.num_heads % 8, f"heads as wide as {a.width // a.num_heads}"),
    ):
        if is_unsupported:
            raise NotApplicableError(f"the fused kernels cannot train a model with {feature}")


def has_reliable_gradient(count: int) -> bool:
    """Return whether cuDNN's attention has a correct gradient for so many tokens.

    For odd multiples of 64 the gradient may be NaN (cuDNN 9.19, torch 2.11; pytorch issue 196678).
    """
    return count % 128 != 64


def _draw_drop(block: EncoderBlock, images: int, z: Tensor) -> Tensor | None:
    """Draw stochastic depth: (B,), 0 for images whose branch is dropped, 1 / (1 - rate) for the others; None if off."""
    rate = block.drop.rate
    if not rate or not block.training:
        return None
    return torch.empty(images, device=z.device).bernoulli_(1 - rate) / (1 - rate)
