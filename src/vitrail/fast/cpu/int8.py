"""A Vision Transformer whose products with weights are in int8, on a CPU.

Weights are symmetric, with a scale for each output channel; activations have a scale for each token, found at run time:
nothing is calibrated, and an image's answer does not depend on its neighbours in a batch. The residual stream, norms
and softmax stay in float32. What reads the image itself (patches, a stem, a backbone) and what follows the last norm
(pool, head) is not quantised. A factor of a residual branch (layer scale) is part of the weights before it.

Shapes: B images, T tokens, A of them asked for, R = B·T rows, D width.
"""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor, nn

from vitrail.errors import NotApplicableError
from vitrail.fast.cpu.int8_steps import CENTRE, LANES, LEAST, MOST, Bytes, Norm, Product, Steps, TorchSteps, steps_for
from vitrail.fast.cpu.packed import PackedLinear, pack
from vitrail.fast.last_block import asked_tokens
from vitrail.model.base import ImageModel
from vitrail.model.encoder import EncoderBlock, LayerScale, MlpBlock, QuickGELU
from vitrail.model.patches import PatchEmbed
from vitrail.model.vit import VisionTransformer

ROWS = 800
"""That go through a block at a time: enough for products to be at their best, few enough to stay in a cache."""
CLOSE = 1e-5
"""How far, of its largest output, a trial product may be from the exact one."""


class QuantisedLinear:
    """x · kernelᵀ with an int8 kernel, on bytes that are counted from `least` on, or else about the middle."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        steps: Steps,
        dtype: torch.dtype = torch.float32,
        least: float | None = None,
        factor: Tensor | None = None,
    ) -> None:
        """`dtype`: of the raw product. `factor`: of each output, which goes into the weights."""
        weight = weight.detach().double()
        offset = weight.new_zeros(len(weight)) if bias is None else bias.detach().double()
        if factor is not None:
            weight, offset = weight * factor.detach().double()[:, None], offset * factor.detach().double()
        scale = (weight.abs().amax(dim=1) / (MOST - CENTRE)).clamp(min=1e-30)
        kernel = (weight / scale[:, None]).round()
        sums = kernel.sum(dim=1) * scale
        # About the middle, the product is corrected before it is rounded to a short type.
        correction = -CENTRE * sums if least is None else torch.zeros_like(sums)
        self.bias = (offset if least is None else offset + least * sums).float()
        self._multiply = steps.product(kernel.to(torch.int8), scale.float(), correction.float(), dtype)

    def __call__(self, x: Bytes) -> Product:
        """(R, in) → (R, out)."""
        return Product(self._multiply(x.values), x.scale, self.bias)


class QuantisedBlock:
    """The parts of an encoder block: equations 2 and 3."""

    def __init__(self, block: EncoderBlock, steps: Steps, asked: int | None) -> None:
        """`asked`: how many tokens it gives out, where not all."""
        attention, mlp = block.attention, block.mlp
        self.steps, self.asked, self.num_heads = steps, asked, attention.num_heads
        self.norm1, self.norm2, self.gelu = Norm.of(block.norm1), Norm.of(block.norm2), _form(mlp)
        self.width = attention.qkv.in_features
        weight, bias, cut = attention.qkv.weight, attention.qkv.bias, 0 if asked is None else self.width
        self.query = (
            QuantisedLinear(weight[:cut], None if bias is None else bias[:cut], steps, steps.dtype) if cut else None
        )
        self.qkv = QuantisedLinear(weight[cut:], None if bias is None else bias[cut:], steps, steps.dtype)
        self.out = QuantisedLinear(attention.out.weight, attention.out.bias, steps, factor=_factor(block.scale1))
        self.fc1 = QuantisedLinear(mlp.fc1.weight, mlp.fc1.bias, steps, steps.dtype)
        self.fc2 = QuantisedLinear(mlp.fc2.weight, mlp.fc2.bias, steps, least=LEAST, factor=_factor(block.scale2))

    def __call__(self, z: Tensor, x: Bytes) -> tuple[Tensor, Product]:
        """z (B, T, D), changed in place, and its first norm → z (B, A, D) and what is still to be added to it."""
        images, tokens = z.shape[:2]
        everything = self.qkv(x)
        if self.query is None:
            queries, others = _columns(everything, 0, self.width), _columns(everything, self.width, None)
        else:
            assert self.asked is not None
            queries, others = self.query(x.first(self.asked, tokens)), everything
            z = z[:, : self.asked].contiguous()
        y = self.out(self.steps.attention(queries, others, images, self.num_heads))
        x = self.steps.add_and_norm(z.view(-1, self.width), y, self.norm2)
        return z, self.fc2(self.steps.gelu(self.fc1(x), self.gelu))


class Int8Embedder(nn.Module):
    """Images → y, with a quantised encoder. It can be used and no more: not trained, saved, moved or converted."""

    def __init__(self, model: VisionTransformer, steps: Steps | None = None) -> None:
        super().__init__()
        first = _plain(model.encoder.blocks[0])
        if steps is None:
            steps = steps_for(model.width, first.mlp.fc1.out_features, first.attention.num_heads)
        if isinstance(steps, TorchSteps):
            _try_a_product()
        self.steps, asked = steps, asked_tokens(model)
        blocks = list(model.encoder.blocks)
        self.blocks = [QuantisedBlock(_plain(block), steps, asked if block is blocks[-1] else None) for block in blocks]
        # All else is the model's own, without a copy of what is not needed.
        self.rest: VisionTransformer = copy.deepcopy(
            model, {id(model.encoder.blocks): nn.ModuleList(), id(model.head): nn.Identity()}
        ).eval()
        self.patches = self._patches() if steps.dtype == torch.bfloat16 else None
        pack(self.rest)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W), normalised → (B, D)."""
        self.rest.check_images(images)
        grid = self.rest.grid_of(images)
        at_once = max(1, round(ROWS / (self.rest.prefix + grid[0] * grid[1])))
        found = [self._embed(part, grid) for part in images.split(at_once)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _embed(self, images: Tensor, grid: tuple[int, int]) -> Tensor:
        model = self.rest
        tables = [model._table(positions, grid) for positions in model.position_embedding]
        z = model.input_norm(self._tokens(images, tables[0] if tables else None)).contiguous()
        again = (tables * len(self.blocks))[: len(self.blocks)] if model.position_in_every_layer else []
        x = self.steps.norm(z.view(-1, model.width), self.blocks[0].norm1)
        for index, block in enumerate(self.blocks):
            z, y = block(z, x)
            rows = z.view(-1, model.width)
            if index + 1 == len(self.blocks):
                self.steps.add(rows, y)
            elif again:
                self.steps.add(rows, y)
                z += again[index + 1]
                x = self.steps.norm(rows, self.blocks[index + 1].norm1)
            else:
                x = self.steps.add_and_norm(rows, y, self.blocks[index + 1].norm1)
        return model.pooled(model.encoder.norm(z))

    def _tokens(self, images: Tensor, table: Tensor | None) -> Tensor:
        """(B, C, H, W) → (B, T, D): prefix and patches, with their positions."""
        model = self.rest
        if self.patches is None:
            z = model._with_prefix(model.tokens(images))
            return z if table is None else z + table
        assert isinstance(model.patch_embed, PatchEmbed)
        tokens = self.patches(model.patch_embed.patches(images.bfloat16()))
        z = torch.empty(len(images), model.prefix + tokens.shape[1], model.width)
        z[:, model.prefix :] = tokens
        for place, token in ((0, model.class_token), (model.prefix - model.architecture.registers, model.registers)):
            if token is not None:
                z[:, place : place + len(token)] = token
        return z if table is None else z.add_(table)

    def _patches(self) -> PackedLinear | None:
        """The projection of patches in bf16, which has more digits than pixels do."""
        embed = self.rest.patch_embed
        if self.rest.backbone is not None or not isinstance(embed, PatchEmbed):
            return None
        return PackedLinear(copy.deepcopy(embed.projection).bfloat16())


def int8_embedder(model: ImageModel) -> Int8Embedder:
    """The model's embedding with int8 products; a NotApplicableError where that cannot be."""
    if not isinstance(model, VisionTransformer):
        raise NotApplicableError("int8 on a CPU is for Vision Transformers: use --precision fp32 or bf16")
    if any(
        not isinstance(block, EncoderBlock) or block.attention.relative is not None for block in model.encoder.blocks
    ):
        raise NotApplicableError(
            "int8 on a CPU is not for axial attention or relative positions: use --precision fp32 or bf16"
        )
    weight = next(model.parameters())
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise NotApplicableError(f"int8 is made of a float32 model on a CPU, not of {weight.dtype} on {weight.device}")
    return Int8Embedder(model)


@functools.cache
def _try_a_product() -> None:
    """Multiply the largest numbers there are: older processors add up pairs of products in too few bits."""
    kernel = torch.full((LANES, 4 * LANES), -1.0)
    kernel[::2] = 1.0
    values = torch.full((3, 4 * LANES), MOST, dtype=torch.uint8)
    values[1], values[2, ::2] = 0, 0
    exact = (values.float() - CENTRE) @ kernel.T
    try:
        found = QuantisedLinear(kernel, None, TorchSteps())(Bytes(values, torch.ones(3))).raw
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:  # not torch's public operators
        raise NotApplicableError(f"this torch has no int8 products for this processor: {error}") from error
    if (found - exact).abs().max() > CLOSE * exact.abs().max():
        raise NotApplicableError("int8 products on this processor are not exact: use --precision fp32 or bf16")


def _plain(block: nn.Module) -> EncoderBlock:
    assert isinstance(block, EncoderBlock)
    return block


def _form(mlp: MlpBlock) -> str:
    if isinstance(mlp.gelu, QuickGELU):
        return "quick"
    assert isinstance(mlp.gelu, nn.GELU)
    return mlp.gelu.approximate


def _factor(scale: nn.Module) -> Tensor | None:
    return scale.factor if isinstance(scale, LayerScale) else None


def _columns(product: Product, start: int, end: int | None) -> Product:
    return Product(product.raw[:, start:end], product.scale, product.bias[start:end])
