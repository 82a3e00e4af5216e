"""`FusedEmbedder`: the embedding (images → y) of a plain Vision Transformer by fused kernels, in bf16 or FP8.

Used by `optimize` on an NVIDIA GPU. It computes the same function as the model, with less work:

- the residual sum and the norm after it are one pass over memory, which in FP8 also finds the scales;
- bias and GELU, and in FP8 the rounding, are applied before the result of a product leaves the chip;
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
from vitrail.fast.gpu.fused_layers import HALF, FusedAttention, FusedLinear, FusedNorm
from vitrail.fast.gpu.kernels.gelu import number_gelu
from vitrail.fast.gpu.kernels.norm import FP8, LARGEST, NormedTokens, assemble_norm
from vitrail.fast.gpu.kernels.patches import cut_patches
from vitrail.fast.gpu.kernels.product import FEW
from vitrail.fast.gpu.kernels.quantise import quantise
from vitrail.fast.gpu.kernels.read_attention import MOST_TOKENS, read_forward, read_with_torch
from vitrail.fast.gpu.merged_block import (
    MOST_ROWS,
    STREAM,
    TILING_CANDIDATES,
    BlockTilings,
    MergedBlock,
    supports_weights,
)
from vitrail.fast.known_parts import find_unknown_part
from vitrail.fast.last_block import count_read_tokens
from vitrail.model.base import ImageModel
from vitrail.model.encoder import EncoderBlock, LayerScale
from vitrail.model.vit import VisionTransformer

CALIBRATION_MARGIN = 2.0
"""Activations may become this many times larger than during calibration before FP8 saturates."""


class FusedBlock:
    """An encoder block, in the form that the kernels take."""

    def __init__(self, block: EncoderBlock, form: int, fp8: bool) -> None:
        self.norm1, self.norm2 = FusedNorm(block.norm1), FusedNorm(block.norm2)
        self.qkv, self.out = FusedLinear(block.attention.qkv, fp8=fp8), FusedLinear(block.attention.out, splits=True)
        self.attention = FusedAttention(block.attention.num_heads)
        self.fc1, self.fc2 = FusedLinear(block.mlp.fc1, form, fp8), FusedLinear(block.mlp.fc2, fp8=fp8, splits=True)
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
        return self.norm2(normed.z, self.out(mixed), self.factor1, self.dtype)

    def compute_hidden(self, normed: NormedTokens) -> tuple[Tensor, Tensor | None]:
        """Return the MLP's hidden layer, and in FP8 its scales."""
        if not self.fc1.fp8 or self.hidden_scale is not None:
            return self.fc1(normed.y, normed.scales, self.hidden_scale), self.hidden_scale
        hidden = self.fc1(normed.y, normed.scales)
        if self.largest is not None:
            self.largest = torch.maximum(self.largest, hidden.abs().amax().float())
        return quantise(hidden)

    def apply_mlp(self, normed: NormedTokens, norm: FusedNorm, dtype: torch.dtype) -> NormedTokens:
        """Compute z = MLP(LN(z')) + z' and the norm that follows."""
        return norm(normed.z, self.fc2(*self.compute_hidden(normed)), self.factor2, dtype)


class FusedLastBlock:
    """The last encoder block, computed only for the first R tokens: those that are read."""

    def __init__(self, block: EncoderBlock, form: int, read: int) -> None:
        width = block.attention.qkv.in_features
        self.read, self.heads = read, block.attention.num_heads
        self.norm1, self.norm2 = FusedNorm(block.norm1), FusedNorm(block.norm2)
        self.qkv = FusedLinear(block.attention.qkv)
        self.q = FusedLinear(block.attention.qkv, rows=slice(0, width))
        self.kv = FusedLinear(block.attention.qkv, rows=slice(width, None))
        self.out = FusedLinear(block.attention.out)
        self.fc1, self.fc2 = FusedLinear(block.mlp.fc1, form), FusedLinear(block.mlp.fc2)
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
        first = z.view(-1, tokens, width)[:, : self.read].reshape(-1, width).contiguous()
        normed = self.norm2(first, self.out(mixed), self.factor1, HALF)
        branch = self.fc2(self.fc1(normed.y))
        if norm is None:
            z = normed.z + (branch.float() if self.factor2 is None else branch * self.factor2)
        else:
            z = norm(normed.z, branch, self.factor2, torch.float32).y
        return z.view(-1, self.read, width)


class FusedEmbedder(nn.Module):
    """Images → y of a plain Vision Transformer on a GPU, in bf16 or FP8."""

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
        self.prefix, self.fp8 = model.prefix, fp8
        self.tokens = self.prefix + model.grid[0] * model.grid[1]
        form = number_gelu(model.architecture.gelu)
        blocks = [block for block in model.encoder.blocks if isinstance(block, EncoderBlock)]
        read = count_read_tokens(model)
        self.last = None if read is None else FusedLastBlock(blocks.pop(), form, read)
        self.blocks = [FusedBlock(block, form, fp8) for block in blocks]
        projection = model.patch_embed.projection
        self.embed_patches: FusedLinear | None = None
        if isinstance(projection, nn.Linear) and model.backbone is None:
            self.embed_patches = FusedLinear(projection)
        self.can_merge = tries_merging and not fp8 and bool(self.blocks)
        self.can_merge = self.can_merge and supports_weights(self.blocks[0].fc1.weight, self.blocks[0].fc2.weight)
        self.merged_blocks: list[MergedBlock] | None = None
        self.passes: dict[int, Implementation] = {}
        """The faster one of `run_separate` and `run_merged`, by number of tokens."""
        self.table = _make_token_table(model)
        self.last_norm = None if isinstance(model.encoder.norm, nn.Identity) else FusedNorm(model.encoder.norm)
        self.plain = copy.deepcopy(model, {id(block): nn.Identity() for block in model.encoder.blocks}).eval()

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
        return self._pool(z, is_normed=self.last is not None)

    def run_separate(self, z: Tensor, y: Tensor, scales: Tensor | None = None) -> Tensor:
        """Run all blocks, one kernel per step: tokens and their norm (M, D) → (B, R, D), or (B, T, D)."""
        normed = NormedTokens(z, y, scales, None)
        norms = [block.norm1 for block in self.blocks[1:]] + ([] if self.last is None else [self.last.norm1])
        for block, norm in zip(self.blocks, norms, strict=False):
            is_last = norm is norms[-1] and self.last is not None
            normed = block.apply_mlp(block.attend(normed, self.tokens), norm, HALF if is_last else block.dtype)
        if self.last is not None:
            return self.last(normed, self.tokens, self.last_norm)
        last = self.blocks[-1]  # a pool that reads all tokens
        normed = last.attend(normed, self.tokens)
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
            if block.next_qkv is not None:
                qkv = block.next_qkv(stream, tilings.qkv)
        if self.last is not None:
            return self.last.run_from_qkv(qkv, z, self.tokens, self.last_norm)
        return z.float().view(-1, self.tokens, z.shape[1])

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
            "pass", *block.fc1.weight.shape, block.fc1.form, block.attention.heads, block.norm1.bias is None,
            block.factor1 is None, len(self.blocks), 0 if self.last is None else self.last.read, self.tokens, rows,
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
        first = self.blocks[0] if self.blocks else self.last
        assert first is not None
        return assemble_norm(
            self.table, patches, first.norm1.weight, first.norm1.bias, first.norm1.eps,
            prefix=self.prefix, stream=STREAM, dtype=FP8 if self.fp8 and self.blocks else HALF,
        )  # fmt: skip

    def _pool(self, z: Tensor, is_normed: bool) -> Tensor:
        with torch.autocast(z.device.type, HALF, enabled=not is_normed):
            y: Tensor = self.plain.pool_features(z if is_normed else self.plain.encoder.norm(z))
        return y.float()


def check_fusible(model: ImageModel) -> None:
    """Raise a NotApplicableError, with the reason, for a model that the kernels do not support."""
    if not isinstance(model, VisionTransformer):
        raise NotApplicableError("fused kernels are made for Vision Transformers")
    a = model.architecture
    unknown = find_unknown_part(a)
    for is_unsupported, feature in (
        (unknown is not None, unknown),
        (a.block == "axial", "axial attention"),
        (a.position == "relative", "relative positions"),
        (a.position_at != "input", "positions in every layer"),
        (a.input_norm, "a norm before the encoder"),
    ):
        if is_unsupported:
            raise NotApplicableError(f"there are no fused kernels for {feature}")


def layer_scale_factor(scale: nn.Module) -> Tensor | None:
    return scale.factor.detach().float() if isinstance(scale, LayerScale) else None


@torch.no_grad()
def _make_token_table(model: VisionTransformer) -> Tensor:
    """Return (T, D), which is added to every image's patches: positions, and first the class token and registers."""
    patches = next(model.encoder.parameters()).new_zeros(1, model.grid[0] * model.grid[1], model.width)
    z = model._prepend_prefix(patches)[0]
    for positions in model.position_embedding:
        z = z + model._make_table(positions, model.grid)
    return z.detach().float().contiguous()
