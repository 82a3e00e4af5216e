"""`FusedEmbedder`: the embedding (images → y) of a Vision Transformer by fused kernels, in bf16 or FP8.

Used by `optimize` on an NVIDIA GPU. It computes the same function as the model, with less work:

- the residual sum and the norm after it are one pass over memory, which in FP8 also finds the scales;
- bias, GELU or SwiGLU, rotary positions, and in FP8 the rounding, are applied before the result of a product leaves
  the chip;
- attention uses the fastest kernel for its shape: cuDNN's, Flash Attention's, or our own for short sequences;
- the last block computes only what is read: keys and values of all tokens, everything else for the class token;
- for few tokens, where starting a kernel takes half of its time, sums and norms are merged into the products
  (merged_block.py).

Shapes: B images, T tokens, M = B·T, R tokens that are read, D width, H heads, d = D/H.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from functools import partial

import torch
from torch import Tensor, nn

from vitrail.errors import InputError, NotApplicableError
from vitrail.fast.gpu.autotune import Implementation, choose_fastest, find_fastest, round_up_rows
from vitrail.fast.gpu.fused_block import FusedBlock, FusedLastBlock, fuse_norm
from vitrail.fast.gpu.fused_layers import HALF, FusedLinear
from vitrail.fast.gpu.fused_pool import FusedAttentionPool
from vitrail.fast.gpu.kernels.gelu import SWIGLU, number_gelu
from vitrail.fast.gpu.kernels.norm import FP8, LARGEST, NormedTokens, assemble_norm
from vitrail.fast.gpu.kernels.patches import cut_patches
from vitrail.fast.gpu.merged_block import (
    MOST_ROWS,
    STREAM,
    TILING_CANDIDATES,
    BlockTilings,
    MergedBlock,
    supports_weights,
)
from vitrail.fast.known_parts import find_unfused_part
from vitrail.fast.last_block import count_read_tokens
from vitrail.model.base import ImageModel
from vitrail.model.encoder import EncoderBlock
from vitrail.model.pooling import AttentionPool
from vitrail.model.rotary import Rotation
from vitrail.model.vit import VisionTransformer

CALIBRATION_MARGIN = 2.0
"""Activations may become this many times larger than during calibration before FP8 saturates."""


class FusedEmbedder(nn.Module):
    """Images → y of a Vision Transformer on a GPU, in bf16 or FP8."""

    def __init__(self, model: ImageModel, fp8: bool = False, tries_merging: bool = False) -> None:
        """Take the weights of a model.

        Args:
            model: A Vision Transformer on a GPU.
            fp8: Multiply in FP8 where that is possible, else in bf16.
            tries_merging: For few tokens, try sums and norms inside the products: least time, but more memory.

        Raises:
            NotApplicableError: The kernels do not support this kind of model.
        """
        super().__init__()
        check_fusible(model)
        assert isinstance(model, VisionTransformer)
        a = model.architecture
        self.prefix, self.fp8 = model.prefix, fp8
        self.tokens = self.prefix + model.grid[0] * model.grid[1]
        self.plain = copy.deepcopy(model, {id(block): nn.Identity() for block in model.encoder.blocks}).eval()
        form = SWIGLU if a.mlp == "swiglu" else number_gelu(a.gelu)
        blocks = [block for block in model.encoder.blocks if isinstance(block, EncoderBlock)]
        rotations = _find_rotations(self.plain, next(model.parameters()))
        read = count_read_tokens(model)
        self.last = None if read is None else FusedLastBlock(blocks.pop(), form, read, rotations[-1])
        self.blocks = [FusedBlock(block, form, fp8, turn) for block, turn in zip(blocks, rotations, strict=False)]
        projection = model.patch_embed.projection
        self.embed_patches: FusedLinear | None = None
        if isinstance(projection, nn.Linear) and model.backbone is None:
            self.embed_patches = FusedLinear(projection)
        self.can_merge = tries_merging and not fp8 and bool(self.blocks)
        self.can_merge = self.can_merge and not (a.mlp == "swiglu" or a.attention_norm or a.mlp_norm)
        self.can_merge = self.can_merge and supports_weights(self.blocks[0].fc1.weight, self.blocks[0].fc2.weight)
        self.merged_blocks: list[MergedBlock] | None = None
        self.passes: dict[int, Implementation] = {}
        """The faster one of `run_separate` and `run_merged`, by number of tokens."""
        self.table = _make_token_table(model)
        self.patch_norm, self.input_norm = fuse_norm(model.patch_norm), fuse_norm(model.input_norm)
        self.last_norm = fuse_norm(model.encoder.norm)
        self.attention_pool = FusedAttentionPool(model.pool, HALF) if isinstance(model.pool, AttentionPool) else None
        self.pool_dtype = torch.float32 if self.attention_pool is None else HALF
        """Type of the normed tokens, where a pool reads all of them."""

    def calibrate(self, images: Tensor) -> None:
        """Fix the FP8 scales of the MLPs' hidden layers by images (B, C, H, W): faster than one scale per token."""
        if not self.fp8:
            return
        for block in self.blocks:
            block.hidden_scale, block.largest = None, torch.zeros((), device=images.device)
        self(images)
        for block in self.blocks:
            assert block.largest is not None
            block.hidden_scale = (block.largest * CALIBRATION_MARGIN / LARGEST).clamp_min(1e-12)
            block.largest = None

    @torch.inference_mode()
    def forward(self, images: Tensor) -> Tensor:
        """Normalised images (B, C, H, W) of the model's own size → y (B, D), float32."""
        self._check_images(images)
        normed = self.embed_tokens(images)
        z = self._choose_pass(normed)(normed.z, normed.y, normed.scales)
        with torch.autocast(z.device.type, HALF):
            pooled: Tensor = (self.plain.pool if self.attention_pool is None else self.attention_pool)(z)
            pooled = self.plain.pool_norm(pooled)
        return pooled.float()

    def run_separate(self, z: Tensor, y: Tensor, scales: Tensor | None = None) -> Tensor:
        """Run all blocks, one kernel per step: tokens and their norm (M, D) → what is pooled."""
        normed = NormedTokens(z, y, scales, None)
        norms = [block.norm1 for block in self.blocks[1:]] + ([] if self.last is None else [self.last.norm1])
        for block, norm in zip(self.blocks, norms, strict=False):
            is_last = norm is norms[-1] and self.last is not None
            normed = block.apply_mlp(block.attend(normed, self.tokens), norm, HALF if is_last else block.dtype)
        if self.last is not None:
            return self.last(normed, self.tokens, self.last_norm)
        last = self.blocks[-1]  # a pool that reads all tokens
        normed = last.attend(normed, self.tokens)
        if self.last_norm is not None:
            return last.apply_mlp(normed, self.last_norm, self.pool_dtype).y.view(-1, self.tokens, z.shape[1])
        branch = last.fc2(*last.compute_hidden(normed)).float()
        if branch.ndim == 3:
            branch = branch.sum(0)
        z = normed.z + (branch if last.factor2 is None else branch * last.factor2)
        return z.view(-1, self.tokens, z.shape[1])

    def run_merged(self, z: Tensor, y: Tensor, scales: Tensor | None = None, *, tilings: BlockTilings) -> Tensor:
        """Do the same with sums and norms merged into the products, for few tokens.

        The first call prepares the merged weights.
        """
        if self.merged_blocks is None:
            after = [*self.blocks[1:], self.last]
            self.merged_blocks = [MergedBlock(*pair) for pair in zip(self.blocks, after, strict=True)]
        qkv = self.blocks[0].qkv(y)
        for block in self.merged_blocks:
            stream = block(qkv, z, self.tokens, tilings)
            z = stream.z
            following = block.multiply_next(stream, tilings.qkv)
            qkv = qkv if following is None else following
        if self.last is not None:
            return self.last.run_from_qkv(qkv, z, self.tokens, self.last_norm)
        z = z.float() if self.last_norm is None else self.last_norm.normalise(z, self.pool_dtype).y
        return z.view(-1, self.tokens, z.shape[1])

    def _choose_pass(self, normed: NormedTokens) -> Implementation:
        """Return the faster one of the possible passes for so many tokens."""
        rows = round_up_rows(len(normed.z))
        if rows > MOST_ROWS or not self.can_merge:
            return self.run_separate
        if (chosen := self.passes.get(rows)) is None:
            chosen = self.passes[rows] = choose_fastest(self._key(rows), self.list_passes(normed), normed.z, normed.y)
            if all(each == self.run_separate for each in self.passes.values()):
                self.merged_blocks = None
        return chosen

    def list_passes(self, normed: NormedTokens) -> dict[str, Implementation]:
        """Return both passes by name; only the first where kernels or memory for the second are missing."""
        passes: dict[str, Implementation] = {"apart": self.run_separate}
        try:
            passes["joined"] = partial(self.run_merged, tilings=self._find_tilings(normed))
        except (NotApplicableError, torch.OutOfMemoryError):
            self.merged_blocks = None
        return passes

    def _key(self, rows: int) -> tuple[Hashable, ...]:
        """Return everything that the time of a pass depends on."""
        block = self.blocks[0]
        return (
            "pass", *block.qkv.describe(), *block.fc1.weight.shape, block.fc1.form, block.attention.heads,
            block.norm1.bias is None, block.factor1 is None, len(self.blocks),
            0 if self.last is None else self.last.read, self.tokens, rows,
        )  # fmt: skip

    def _find_tilings(self, normed: NormedTokens) -> BlockTilings:
        """Find the fastest tiling of each product in turn, within the whole pass: neighbours change a kernel's time."""
        best, key = BlockTilings(), self._key(round_up_rows(len(normed.z)))
        for name, tilings in TILING_CANDIDATES.items():
            options = {str(tuple(tiling)): best._replace(**{name: tiling}) for tiling in tilings}
            passes = {label: partial(self.run_merged, tilings=option) for label, option in options.items()}
            best = options[find_fastest((*key, name), passes, normed.z, normed.y)]
        return best

    def _check_images(self, images: Tensor) -> None:
        expected = (self.plain.in_channels, *self.plain.image_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected or not images.is_floating_point():
            raise InputError(
                f"fused kernels take normalised images of shape (batch, {', '.join(map(str, expected))})"
                f", not {images.dtype} of {tuple(images.shape)}: model.resize makes a model for images of another size"
            )

    def embed_tokens(self, images: Tensor) -> NormedTokens:
        """Return the tokens that go into the first block, and their norm."""
        if self.embed_patches is not None:
            patches = self.embed_patches(cut_patches(images, self.plain.architecture.patch_size, HALF))
        else:
            # A stem or a ResNet keeps float32 weights: a ResNet standardises them, for which bf16 is too coarse.
            with torch.autocast(images.device.type, HALF):
                features = images.float() if self.plain.backbone is None else self.plain.backbone(images.float())
                patches = self.plain.patch_embed(features).reshape(-1, self.plain.width).to(HALF)
        if self.patch_norm is not None:
            patches = self.patch_norm.normalise(patches, HALF).y
        first = self.blocks[0] if self.blocks else self.last
        assert first is not None
        dtype = FP8 if self.fp8 and self.blocks else HALF
        norm = first.norm1 if self.input_norm is None else self.input_norm
        normed = assemble_norm(
            self.table, patches, norm.weight, norm.bias, norm.eps,
            prefix=self.prefix, stream=STREAM, dtype=dtype if self.input_norm is None else STREAM,
        )  # fmt: skip
        return normed if self.input_norm is None else first.norm1.normalise(normed.y, dtype)


def check_fusible(model: ImageModel) -> None:
    """Raise a NotApplicableError, with the reason, for a model that the kernels do not support."""
    if not isinstance(model, VisionTransformer):
        raise NotApplicableError("fused kernels are made for Vision Transformers")
    if unknown := find_unfused_part(model.architecture):
        raise NotApplicableError(f"there are no fused kernels for {unknown}")


def _find_rotations(model: VisionTransformer, like: Tensor) -> list[Rotation | None]:
    """Return the rotation of each block, of a model in evaluation mode; `like`: a tensor on the device."""
    if model.rotary is None:
        return [None] * model.architecture.depth
    rotations: list[Rotation | None] = model.rotary(model.grid, like)
    return rotations


@torch.no_grad()
def _make_token_table(model: VisionTransformer) -> Tensor:
    """Return (T, D), which is added to every image's patches: positions, and first the class token and registers."""
    patches = next(model.encoder.parameters()).new_zeros(1, model.grid[0] * model.grid[1], model.width)
    z = model._prepend_prefix(patches)[0]
    for positions in model.position_embedding:
        z = z + model._make_table(positions, model.grid)
    return z.detach().float().contiguous()
