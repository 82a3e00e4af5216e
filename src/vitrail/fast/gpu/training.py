"""`FusedTraining`: training steps of a plain Vision Transformer by fused kernels, for wide models on an NVIDIA GPU.

Function and gradients are those of the model under autocast, with less work than the compiled model:

- the last block computes and differentiates only what the class token needs;
- a residual sum and the norm after it are one pass, forward and backward; the backward pass also sums over tokens for
  the gradients of norms and biases;
- the gradient through a GELU and the gradient of the bias before it are one pass;
- the passes that exist compute the masks of dropout (masks.py), so that none is written or read;
- layer scale is multiplied into the weights of the layer before it;
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
from vitrail.fast.gpu.encoder_gradients import attend, has_own_attention, uses_short_attention
from vitrail.fast.gpu.fused_embedder import check_fusible
from vitrail.fast.gpu.gradients import (
    GELUS,
    AddNorm,
    AssembleNorm,
    MatrixProduct,
    MlpProducts,
    ReadAttention,
    Shape,
)
from vitrail.fast.gpu.kernels.dropout import DropoutMask
from vitrail.fast.gpu.kernels.gelu import number_gelu
from vitrail.fast.gpu.kernels.patches import cut_patches
from vitrail.fast.gpu.kernels.read_attention import MOST_TOKENS, read_with_torch
from vitrail.fast.gpu.masks import Place, StepMasks, draw_key, make_key
from vitrail.fast.last_block import count_read_tokens
from vitrail.model.architecture import VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.cost import count_tokens
from vitrail.model.encoder import EncoderBlock, LayerScale
from vitrail.model.mlp import MlpBlock
from vitrail.model.patches import PatchEmbed
from vitrail.model.positions import Grid
from vitrail.model.vit import VisionTransformer
from vitrail.system.device import send_to_device


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
        self.read = count_trained_tokens(model)
        self.key: Tensor | None = None
        """What masks depend on, as `StepMasks` takes it; if None, torch's generator draws it for every call."""

    def set_step(self, key: int, first_image: int) -> None:
        """Set what the masks of the next call depend on; see `make_key`."""
        self.key = send_to_device(make_key(key, first_image), next(self.model.parameters()).device)

    def __call__(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K). In evaluation mode the plain model runs, so that its inside can be inspected."""
        rows, columns = self.model.measure_grid(images)
        if not self.model.training or not has_reliable_gradient(
            self.model.architecture, self.model.prefix + rows * columns
        ):
            return type(self.model).forward(self.model, images)
        y = self._embed(images)
        with self._autocast(images):
            logits: Tensor = self.model.head(y)
        return logits

    def _embed(self, pixels: Tensor) -> Tensor:
        model, images = self.model, len(pixels)
        masks = StepMasks(draw_key(pixels.device) if self.key is None else self.key)
        blocks = [block for block in model.encoder.blocks if isinstance(block, EncoderBlock)]
        last = None if self.read is None else blocks.pop()
        norms = [block.norm1 for block in blocks] + [model.encoder.norm if last is None else last.norm1]
        rows, columns = model.measure_grid(pixels)
        rotations = [None] * len(blocks) if model.rotary is None else model.rotary((rows, columns), pixels)
        shape = images, model.prefix + rows * columns, model.architecture.num_heads
        mask = masks.mask_tokens(model.dropout)
        z, y, scales, twin, link = self._embed_tokens(pixels, (rows, columns), mask, norms[0], bool(blocks))
        for number, (block, norm, rotation) in enumerate(zip(blocks, norms[1:], rotations, strict=True)):
            attention, mlp = block.attention, block.mlp
            y = attend(y, attention, rotation, shape, twin, scales)
            weight, bias = scale_outputs(attention.out, block.scale1)
            branch = MatrixProduct.apply(y, weight)
            mask = masks.mask_in_block(block.dropout, number, Place.ATTENTION)
            keep = masks.draw_depth(block.drop, number, Place.ATTENTION_DEPTH, images)
            z, y, scales, twin, link = self._add_branch(
                (z, link), branch, bias, keep, mask, block.norm2, shape[1], self.fp8
            )
            weight, bias = scale_outputs(mlp.fc2, block.scale2)
            mask = masks.mask_in_block(mlp.dropout, number, Place.HIDDEN)
            branch = MlpProducts.apply(y, mlp.fc1.weight, mlp.fc1.bias, weight, self.form, twin, scales, mask, shape[1])
            mask = masks.mask_in_block(mlp.dropout, number, Place.MLP)
            keep = masks.draw_depth(block.drop, number, Place.MLP_DEPTH, images)
            uses_fp8 = self.fp8 and norm is not norms[-1]
            z, y, scales, twin, link = self._add_branch((z, link), branch, bias, keep, mask, norm, shape[1], uses_fp8)
        with self._autocast(pixels):
            if last is None:
                pooled = model.pool_features(y.view(images, shape[1], -1).float())
            else:
                read = self._run_last_block(last, z, link, y, shape, masks)
                pooled = model.pool_features(model.encoder.norm(read))
        return pooled

    def _embed_tokens(self, pixels: Tensor, grid: Grid, mask: DropoutMask | None, norm: nn.Module, twin: bool) -> Any:
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
            table, patches, norm.weight, norm.bias, mask,
            model.prefix, norm.eps, self.stream, self.dtype, self.fp8 and twin,
        )  # fmt: skip

    def _add_branch(
        self, stream: tuple[Tensor, Tensor], branch: Tensor, bias: Tensor, keep: Tensor | None,
        mask: DropoutMask | None, norm: nn.Module, tokens: int, twin: bool,
    ) -> Any:  # fmt: skip
        """Add a branch to the stream (z and its link), and return the sum and its norm, as `AddNorm` does."""
        assert isinstance(norm, nn.LayerNorm)
        return AddNorm.apply(
            *stream, branch, bias, norm.weight, norm.bias, keep, mask, tokens, norm.eps, self.dtype, twin
        )

    def _run_last_block(
        self, block: EncoderBlock, z: Tensor, link: Tensor, y: Tensor, shape: Shape, masks: StepMasks
    ) -> Tensor:
        """z, its link and norm1(z), all (M, D) → the last block's output for the tokens that are read (B, R, D)."""
        (images, count_tokens, heads), attention, mlp = shape, block.attention, block.mlp
        assert isinstance(mlp, MlpBlock)
        read, width, number = self.read, z.shape[1], len(self.model.encoder.blocks) - 1
        weight, bias = attention.qkv.weight, attention.qkv.bias
        y = y.view(images, count_tokens, width)
        q = F.linear(y[:, :read], weight[:width], bias[:width])
        kv = F.linear(y, weight[width:], bias[width:])
        read_all = ReadAttention.apply if count_tokens <= MOST_TOKENS else read_with_torch
        out = masks.drop_read_tokens(attention.out(read_all(q, kv, heads)), block.dropout, number, Place.ATTENTION)
        keep = masks.draw_depth(block.drop, number, Place.ATTENTION_DEPTH, images)
        z, link = z.view(images, count_tokens, width), link.view(images, count_tokens, width)
        first = z[:, :read].float() + link[:, :read] + _scale_images(block.scale1(out), keep)
        hidden = masks.drop_read_tokens(mlp.gelu(mlp.fc1(block.norm2(first))), mlp.dropout, number, Place.HIDDEN)
        out = masks.drop_read_tokens(mlp.fc2(hidden), mlp.dropout, number, Place.MLP)
        keep = masks.draw_depth(block.drop, number, Place.MLP_DEPTH, images)
        return first + _scale_images(block.scale2(out), keep)

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
        (a.attention_dropout, "dropout of attention weights"),
        (a.norm != "layer", "another norm than LayerNorm"),
        (number_gelu(a.gelu) not in GELUS, f"a {a.gelu} GELU"),
        (a.norm_after_pool and count_trained_tokens(model) is None, "a norm after a pool over all tokens"),
        (
            not has_reliable_gradient(a, count_tokens(a)),
            f"{count_tokens(a)} tokens, for which cuDNN's attention has no reliable gradient",
        ),
        (a.width // a.num_heads > 128 or a.width // a.num_heads % 8, f"heads as wide as {a.width // a.num_heads}"),
        (a.rotary is not None and a.rotary.learned, "learned rotary positions"),
        (a.mlp == "swiglu", "SwiGLU"),
        (a.attention_norm, "a norm inside attention"),
        (a.mlp_norm, "a norm inside the MLP"),
        (not a.out_bias or not a.mlp_bias, "layers without a bias"),
        (not a.final_norm, "a model without a last norm"),
        (a.patch_norm, "a norm on patches"),
        (a.input_norm, "a norm before the encoder"),
    ):
        if is_unsupported:
            raise NotApplicableError(f"the fused kernels cannot train a model with {feature}")


def count_trained_tokens(model: ImageModel) -> int | None:
    """Return how many tokens the last block computes in training; None for all: it is shortened for plain attention."""
    assert isinstance(model, VisionTransformer)
    return None if has_own_attention(model.architecture) else count_read_tokens(model)


def has_reliable_gradient(a: VitArchitecture, count: int) -> bool:
    """Return whether attention has a correct gradient for so many tokens.

    Our own kernels for few tokens have one. cuDNN's may be NaN for odd multiples of 64 (cuDNN 9.19, torch 2.11; pytorch
    issue 196678).
    """
    return uses_short_attention(a, count) or count % 128 != 64


def scale_outputs(layer: nn.Linear, scale: nn.Module) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a layer with the layer scale behind it multiplied into them.

    The factor's gradient is then a sum over weights. Otherwise it would be a sum over tokens, for which the branch
    would have to be kept and read again.
    """
    if not isinstance(scale, LayerScale):
        return layer.weight, layer.bias
    return layer.weight * scale.factor[:, None], layer.bias * scale.factor


def _scale_images(x: Tensor, keep: Tensor | None) -> Tensor:
    """Multiply every image of x (B, R, D) by its number in `keep` (B,), if given."""
    return x if keep is None else x * keep[:, None, None]
