"""A Vision Transformer for the CPU whose encoder multiplies in int8.

Weights are quantised symmetrically, with one scale per output channel. Activations get one scale per token at run time:
no calibration is needed, and the result for an image does not depend on the rest of its batch. The residual stream,
norms and softmax stay in float32. Layers before the encoder (patches, stem, backbone) and after it (pool, head) are not
quantised. The factors of a layer scale are multiplied into the weights before it.

Shapes: B images, T tokens, A tokens that are read from the last block, R = B·T rows, D width.
"""

from __future__ import annotations

import copy
import functools
import math

import torch
from torch import Tensor, nn

from vitrail.errors import NotApplicableError
from vitrail.fast.cpu.int8_operations import (
    LANES,
    MOST,
    Int8Operations,
    Int8Weight,
    Multiply,
    NormWeights,
    QuantisedRows,
    TorchOperations,
    choose_operations,
)
from vitrail.fast.cpu.packed import PackedLinear, pack_layers
from vitrail.fast.known_parts import find_unknown_part
from vitrail.fast.last_block import count_read_tokens
from vitrail.model.base import ImageModel
from vitrail.model.encoder import EncoderBlock, LayerScale
from vitrail.model.mlp import MlpBlock, QuickGELU, SwigluBlock
from vitrail.model.patches import PatchEmbed
from vitrail.model.vit import VisionTransformer

ROWS = 1600
"""Tokens that go through a block together: enough for fast products, few enough to stay in the last cache."""
BYTE = 127
"""Largest whole number of a weight."""
SHARES = (1.0, 0.98, 0.96, 0.94, 0.92, 0.9)
"""Scales that are tried for the weights of an output, as shares of the one that reaches the largest weight."""
CLOSE = 1e-5
"""Largest allowed error of the trial product, as a share of its largest output."""


def quantise_weight(weight: Tensor, bias: Tensor | None, factor: Tensor | None = None) -> Int8Weight:
    """Quantise a weight, with one scale per output: of some, the one that rounds its weights best.

    Args:
        weight: (out, in).
        bias: (out,) or None.
        factor: (out,), multiplied into weight and bias.
    """
    weight = weight.detach()
    offset = weight.new_zeros(len(weight)) if bias is None else bias.detach()
    if factor is not None:
        weight, offset = weight * factor.detach()[:, None], offset * factor.detach()
    largest = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / BYTE
    scale, kernel, least_error = largest, weight, torch.full_like(largest, math.inf)
    for share in SHARES:
        trial = (weight / (share * largest)).round_().clamp_(-BYTE, BYTE)
        error = (trial * (share * largest)).sub_(weight).square_().sum(dim=1, keepdim=True)
        is_better = error < least_error
        kernel, scale = torch.where(is_better, trial, kernel), torch.where(is_better, share * largest, scale)
        least_error = torch.minimum(error, least_error)
    sums = kernel.double().sum(dim=1) * scale.double().flatten()
    return Int8Weight(kernel.to(torch.int8), scale.flatten(), sums.float(), offset.float())


class QuantisedBlock:
    """An encoder block (equations 2 and 3 of the paper) with quantised weights."""

    def __init__(self, block: EncoderBlock, operations: Int8Operations, read_count: int | None) -> None:
        attention, mlp = block.attention, block.mlp
        self.operations, self.read_count, self.num_heads = operations, read_count, attention.num_heads
        self.norm1, self.norm2, self.gelu = (
            NormWeights.from_module(block.norm1),
            NormWeights.from_module(block.norm2),
            _gelu_form(mlp),
        )
        self.width = attention.qkv.in_features
        weight, bias, cut = attention.qkv.weight, attention.qkv.bias, 0 if read_count is None else self.width

        def prepare(part: slice) -> Multiply:
            quantised = quantise_weight(weight[part], None if bias is None else bias[part])
            return operations.prepare_product(quantised, operations.dtype)

        self.query = prepare(slice(cut)) if cut else None
        self.qkv = prepare(slice(cut, None))
        self.add_out = operations.prepare_addition(
            quantise_weight(attention.out.weight, attention.out.bias, factor=_factor(block.scale1))
        )
        self.fc1 = operations.prepare_product(quantise_weight(mlp.fc1.weight, mlp.fc1.bias), operations.dtype)
        self.add_fc2 = operations.prepare_addition(
            quantise_weight(mlp.fc2.weight, mlp.fc2.bias, factor=_factor(block.scale2))
        )

    def __call__(self, z: Tensor) -> Tensor:
        """(B, T, D), changed in place → (B, A, D)."""
        images, tokens = z.shape[:2]
        x = self.operations.norm(z.view(-1, self.width), self.norm1)
        everything = self.qkv(x)
        if self.query is None:
            queries, others = everything[:, : self.width], everything[:, self.width :]
        else:
            assert self.read_count is not None
            queries, others = self.query(x.take_first(self.read_count, tokens)), everything
            z = z[:, : self.read_count].contiguous()
        rows = z.view(-1, self.width)
        self.add_out(self.operations.attention(queries, others, images, self.num_heads), rows)
        hidden = self.fc1(self.operations.norm(rows, self.norm2))
        self.add_fc2(self.operations.gelu(hidden, self.gelu), rows)
        return z


class Int8Embedder(nn.Module):
    """Images → y with a quantised encoder. It cannot be trained, saved, moved or converted."""

    def __init__(self, model: VisionTransformer, operations: Int8Operations | None = None) -> None:
        super().__init__()
        first = _as_plain(model.encoder.blocks[0])
        if operations is None:
            operations = choose_operations(model.width, first.mlp.fc1.out_features, first.attention.num_heads)
        if isinstance(operations, TorchOperations):
            check_int8_product()
        self.operations, read_count = operations, count_read_tokens(model)
        blocks = list(model.encoder.blocks)
        self.blocks = [
            QuantisedBlock(_as_plain(block), operations, read_count if block is blocks[-1] else None)
            for block in blocks
        ]
        # A copy of everything outside the encoder blocks and the head.
        self.rest: VisionTransformer = copy.deepcopy(
            model, {id(model.encoder.blocks): nn.ModuleList(), id(model.head): nn.Identity()}
        ).eval()
        self.patch_projection = self._pack_patch_projection() if operations.dtype == torch.bfloat16 else None
        pack_layers(self.rest)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W), normalised → (B, D)."""
        self.rest.check_images(images)
        grid = self.rest.measure_grid(images)
        at_once = max(1, round(ROWS / (self.rest.prefix + grid[0] * grid[1])))
        parts = [self._embed(part, grid) for part in images.split(at_once)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _embed(self, images: Tensor, grid: tuple[int, int]) -> Tensor:
        model = self.rest
        tables = [model._make_table(positions, grid) for positions in model.position_embedding]
        z = model.input_norm(self._embed_patches(images, tables[0] if tables else None)).contiguous()
        again = (tables * len(self.blocks))[: len(self.blocks)] if model.position_in_every_layer else []
        for index, block in enumerate(self.blocks):
            if again and index:
                z += again[index]
            z = block(z)
        return model.pool_features(model.encoder.norm(z))

    def _embed_patches(self, images: Tensor, table: Tensor | None) -> Tensor:
        """(B, C, H, W) → (B, T, D): class token, registers and embedded patches, with their positions added."""
        model = self.rest
        if self.patch_projection is None:
            z = model._prepend_prefix(model.tokens(images))
            return z if table is None else z + table
        assert isinstance(model.patch_embed, PatchEmbed)
        tokens = self.patch_projection(model.patch_embed.split_patches(images.bfloat16()))
        z = torch.empty(len(images), model.prefix + tokens.shape[1], model.width)
        z[:, model.prefix :] = tokens
        for place, token in ((0, model.class_token), (model.prefix - model.architecture.registers, model.registers)):
            if token is not None:
                z[:, place : place + len(token)] = token
        return z if table is None else z.add_(table)

    def _pack_patch_projection(self) -> PackedLinear | None:
        """Return the patch projection in bf16, which is more exact than the pixels are; None for a stem or backbone."""
        embed = self.rest.patch_embed
        if self.rest.backbone is not None or not isinstance(embed, PatchEmbed):
            return None
        return PackedLinear(copy.deepcopy(embed.projection).bfloat16())


def create_int8_embedder(model: ImageModel) -> Int8Embedder:
    """Make an int8 embedder of a float32 Vision Transformer with plain blocks on the CPU.

    Raises:
        NotApplicableError: The model is of another kind, or this processor has no exact int8 products.
    """
    vit = check_int8_weights(model)
    if obstacle := find_obstacle(vit):
        raise NotApplicableError(f"int8 from product to product is not for {obstacle}: use --precision fp32 or bf16")
    return Int8Embedder(vit)


def find_obstacle(model: VisionTransformer) -> str | None:
    """Return in words the first part that `Int8Embedder` does not know; None if it knows all parts."""
    for block in model.encoder.blocks:
        if not isinstance(block, EncoderBlock):
            return "axial attention"
        if block.attention.relative is not None:
            return "relative positions"
    return find_unknown_part(model.architecture)


def check_int8_weights(model: ImageModel) -> VisionTransformer:
    """Return the model if its encoder can be quantised; else raise a NotApplicableError."""
    if not isinstance(model, VisionTransformer):
        raise NotApplicableError("int8 on a CPU is for Vision Transformers: use --precision fp32 or bf16")
    weight = next(model.parameters())
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise NotApplicableError(f"int8 needs a float32 model on the CPU, not {weight.dtype} on {weight.device}")
    return model


@functools.cache
def check_int8_product() -> None:
    """Try a product of the largest numbers: older processors add up pairs of products in too few bits."""
    kernel = torch.full((LANES, 4 * LANES), -1.0)
    kernel[::2] = 1.0
    values = torch.full((3, 4 * LANES), MOST, dtype=torch.uint8)
    values[1], values[2, ::2] = 0, 0
    exact = (values.float() - 128) @ kernel.T
    try:
        multiply = TorchOperations().prepare_product(quantise_weight(kernel, None), torch.float32)
        found = multiply(QuantisedRows(values, torch.ones(3), torch.full((3,), -128.0)))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:  # not torch's public operators
        raise NotApplicableError(f"this torch has no int8 products for this processor: {error}") from error
    if (found - exact).abs().max() > CLOSE * exact.abs().max():
        raise NotApplicableError("int8 products on this processor are not exact: use --precision fp32 or bf16")


def _as_plain(block: nn.Module) -> EncoderBlock:
    assert isinstance(block, EncoderBlock)
    return block


def _gelu_form(mlp: MlpBlock | SwigluBlock) -> str:
    assert isinstance(mlp, MlpBlock)
    if isinstance(mlp.gelu, QuickGELU):
        return "quick"
    assert isinstance(mlp.gelu, nn.GELU)
    return mlp.gelu.approximate


def _factor(scale: nn.Module) -> Tensor | None:
    return scale.factor if isinstance(scale, LayerScale) else None
