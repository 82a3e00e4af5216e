"""Training steps of a plain Vision Transformer by fused kernels: the same function and gradients as under autocast.

What is saved, against the compiled model:

- of the last block only what the class token needs is computed, and differentiated;
- a residual sum and the norm after it are one pass, forward and backward, with the sums over tokens that the gradients
  of norms and biases are made of;
- the gradient through a GELU, and the sum for the bias before it, are one pass;
- the gradients of queries, keys and values are put side by side in one pass, with their bias's sum.

Parameters stay whole (float32) and are cast for the products, as autocast does.

Shapes: B images, T tokens, M = B·T, D width, H heads, d = D/H.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.errors import NotApplicableError
from vitrail.fast.gpu.fused import check_fusible
from vitrail.fast.gpu.gradients import GELUS, AddNorm, AssembleNorm, Attend, Mix, Product, Read, Shape
from vitrail.fast.gpu.kernels.gelu import number_of
from vitrail.fast.gpu.kernels.patches import cut
from vitrail.fast.gpu.kernels.reading import MOST_TOKENS, read_by_library
from vitrail.fast.last_block import asked_tokens
from vitrail.model.base import ImageModel
from vitrail.model.cost import tokens
from vitrail.model.encoder import EncoderBlock
from vitrail.model.patches import PatchEmbed
from vitrail.model.positions import Grid
from vitrail.model.vit import VisionTransformer


class FusedLearning:
    """logits = model(images), with gradients, by fused kernels."""

    def __init__(
        self,
        model: ImageModel,
        dtype: torch.dtype = torch.bfloat16,
        stream: torch.dtype = torch.float32,
        fp8: bool = False,
    ) -> None:
        """How a model is trained.

        Args:
            dtype: of the products.
            stream: what z is kept in between blocks; float32 as under autocast.
            fp8: the products behind a norm, forward, in FP8 with scales of rows; all others, and gradients, in `dtype`.
        """
        check_learnable(model)
        assert isinstance(model, VisionTransformer)
        self.model, self.dtype, self.stream, self.fp8 = model, dtype, stream, fp8
        self.form = number_of(model.architecture.gelu)
        self.read = asked_tokens(model)

    def __call__(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K). While the model is not training, as it is written, so that one can look inside."""
        rows, columns = self.model.grid_of(images)
        if not self.model.training or not sound(self.model.prefix + rows * columns):
            return type(self.model).forward(self.model, images)
        y = self._pooled(images)
        with self._autocast(images):
            logits: Tensor = self.model.head(y)
        return logits

    def _pooled(self, pixels: Tensor) -> Tensor:
        model, images = self.model, len(pixels)
        blocks = [block for block in model.encoder.blocks if isinstance(block, EncoderBlock)]
        last = None if self.read is None else blocks.pop()
        norms = [block.norm1 for block in blocks] + [model.encoder.norm if last is None else last.norm1]
        rows, columns = model.grid_of(pixels)
        shape = images, model.prefix + rows * columns, model.architecture.num_heads
        z, y, scales, twin, link = self._assembled(pixels, (rows, columns), norms[0], bool(blocks))
        for block, norm in zip(blocks, norms[1:], strict=True):
            attention, mlp = block.attention, block.mlp
            y = Attend.apply(y, attention.qkv.weight, attention.qkv.bias, shape, twin, scales)
            branch = Product.apply(y, attention.out.weight)
            z, y, scales, twin, link = self._added(
                z, link, branch, attention.out.bias, block, block.norm2, shape, self.fp8
            )
            branch = Mix.apply(y, mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, self.form, twin, scales)
            z, y, scales, twin, link = self._added(
                z, link, branch, mlp.fc2.bias, block, norm, shape, self.fp8 and norm is not norms[-1]
            )
        with self._autocast(pixels):
            if last is None:
                pooled = model.pooled(y.view(images, shape[1], -1).float())
            else:
                assert self.read is not None
                pooled = model.pooled(model.encoder.norm(self._last(last, z, link, y, shape, self.read)))
        return pooled

    def _assembled(self, pixels: Tensor, grid: Grid, norm: nn.Module, twin: bool) -> Any:
        """The tokens that go into the first block, and their norm."""
        model, embed = self.model, self.model.patch_embed
        model.check_images(pixels)
        base = torch.zeros(1, grid[0] * grid[1], model.width, device=pixels.device)
        if isinstance(embed, PatchEmbed) and model.backbone is None:
            patches = Product.apply(cut(pixels, embed.patch_size, self.dtype), embed.projection.weight)
            if embed.projection.bias is not None:
                base = base + embed.projection.bias  # part of what every image begins from: no sum of its own
        else:
            with self._autocast(pixels):
                patches = model.tokens(pixels).flatten(0, 1).to(self.dtype)
        table = model._with_prefix(base)[0]
        for positions in model.position_embedding:
            table = table + model._table(positions, grid)
        assert isinstance(norm, nn.LayerNorm)
        return AssembleNorm.apply(
            table, patches, norm.weight, norm.bias, model.prefix, norm.eps, self.stream, self.dtype, self.fp8 and twin
        )

    def _added(
        self,
        z: Tensor,
        link: Tensor,
        branch: Tensor,
        bias: Tensor,
        block: EncoderBlock,
        norm: nn.Module,
        shape: Shape,
        twin: bool,
    ) -> Any:
        assert isinstance(norm, nn.LayerNorm)
        keep = _keep(block, shape[0], z)
        return AddNorm.apply(z, link, branch, bias, norm.weight, norm.bias, keep, shape[1], norm.eps, self.dtype, twin)

    def _last(self, block: EncoderBlock, z: Tensor, link: Tensor, y: Tensor, shape: Shape, read: int) -> Tensor:
        """(M, D) z, its link and norm1(z) → (B, R, D): what the last block gives out for the tokens that are read."""
        (images, tokens, heads), attention, width = shape, block.attention, z.shape[1]
        weight, bias = attention.qkv.weight, attention.qkv.bias
        y = y.view(images, tokens, width)
        q = F.linear(y[:, :read], weight[:width], bias[:width])
        kv = F.linear(y, weight[width:], bias[width:])
        attend = Read.apply if tokens <= MOST_TOKENS else read_by_library
        out = attention.out(attend(q, kv, heads))
        z, link = z.view(images, tokens, width), link.view(images, tokens, width)
        first = z[:, :read].float() + link[:, :read] + block.drop(out)
        given: Tensor = first + block.drop(block.mlp(block.norm2(first)))
        return given

    def _autocast(self, tensor: Tensor) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(tensor.device.type, self.dtype)


def check_learnable(model: ImageModel) -> None:
    """Refuse, with the reason, a model that cannot be trained by these kernels."""
    check_fusible(model)
    assert isinstance(model, VisionTransformer)
    a = model.architecture
    for wrong, why in (
        (a.dropout or a.attention_dropout, "dropout"),
        (a.layer_scale is not None, "layer scale"),
        (a.norm != "layer", "another norm than LayerNorm"),
        (not a.qkv_bias, "queries without a bias"),
        (number_of(a.gelu) not in GELUS, f"a {a.gelu} GELU"),
        (a.norm_after_pool and asked_tokens(model) is None, "a norm after a pool over all tokens"),
        (not sound(tokens(a)), f"{tokens(a)} tokens, of which cuDNN's attention has no sound gradient"),
        (a.width // a.num_heads > 128 or a.width // a.num_heads % 8, f"heads as wide as {a.width // a.num_heads}"),
    ):
        if wrong:
            raise NotApplicableError(f"training by fused kernels is not made for {why}")


def sound(count: int) -> bool:
    """Whether cuDNN's attention has a gradient for so many tokens: for odd multiples of 64 it may give no numbers
    (cuDNN 9.19, torch 2.11; pytorch issue 196678)."""
    return count % 128 != 64


def _keep(block: EncoderBlock, images: int, z: Tensor) -> Tensor | None:
    """(B,): 0 for images whose branch is dropped, and what makes up for it for the others."""
    rate = block.drop.rate
    if not rate or not block.training:
        return None
    return torch.empty(images, device=z.device).bernoulli_(1 - rate) / (1 - rate)
