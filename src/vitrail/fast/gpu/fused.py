"""A plain Vision Transformer on an NVIDIA GPU, by fused kernels: the same function, in bf16 or FP8.

What is saved, against the model as it is written:

- the residual sum and the norm after it are one pass over memory, which in FP8 also finds the scales;
- bias and GELU are applied before a product's result leaves the chip, in FP8 the rounding of it too;
- attention is by the fastest kernel for its shape: cuDNN's, Flash Attention's, or our own for short sequences;
- of the last block only what is read is computed: keys and values of all tokens, the rest for the class token;
- for few tokens, where starting a kernel is half its time, sum and norm are in the products before and after them.

Products are by the library's kernels or by our own, whichever is faster for their size when it first comes along.

Shapes: B images, T tokens, M = B·T, D width, H heads, d = D/H.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.errors import InputError, NotApplicableError
from vitrail.fast.gpu.choice import Way, bucket, choose, fastest
from vitrail.fast.gpu.joined import MOST_ROWS, STREAM, TRIED, JoinedBlock, Tilings, takes
from vitrail.fast.gpu.kernels import few_rows
from vitrail.fast.gpu.kernels.attention import applies, attention
from vitrail.fast.gpu.kernels.gelu import number_of
from vitrail.fast.gpu.kernels.norm import FP8, LARGEST, Normed, add_norm, assemble_norm
from vitrail.fast.gpu.kernels.patches import cut
from vitrail.fast.gpu.kernels.product import FEW, Tiling, named, product
from vitrail.fast.gpu.kernels.quantise import quantise, quantise_rows
from vitrail.fast.gpu.kernels.reading import MOST_TOKENS, read_by_library, read_forward
from vitrail.fast.last_block import asked_tokens
from vitrail.model.base import ImageModel
from vitrail.model.encoder import EncoderBlock, LayerScale
from vitrail.model.vit import VisionTransformer

HALF = torch.bfloat16
MARGIN = 2.0
"""From the largest activation that calibration met to the largest that FP8 holds: free, with a floating point."""

WIDE = named(Tiling(128, 128, 64, 4, 3, programs=2, parts=2), Tiling(128, 256, 64, 8, 4, parts=2))
NARROW = named(
    Tiling(64, 32, 256, 4, 3), Tiling(64, 64, 128, 4, 3), Tiling(64, 64, 128, 4, 4), Tiling(64, 128, 128, 4, 3),
    Tiling(128, 64, 128, 4, 3), Tiling(128, 64, 128, 4, 3, splits=2), Tiling(128, 64, 128, 4, 3, splits=3),
)  # fmt: skip
BYTES = named(Tiling(128, 256, 128, 8, 3), Tiling(128, 128, 128, 4, 3, programs=2))
NARROW_BYTES = named(Tiling(64, 64, 128, 4, 4), Tiling(64, 128, 128, 4, 4), Tiling(64, 64, 256, 4, 3, splits=2))
"""Those that were fastest for some product on an H200, of many that were tried (docs/speed-log.md)."""
WIDEST = 256
"""Heads that Flash Attention takes."""
CUTS = [(64, 4), (128, 8)]
"""Of attention: queries of a tile, and warps."""


class Norm:
    """Weights of a norm."""

    def __init__(self, norm: nn.Module) -> None:
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        assert norm.eps is not None
        self.weight = norm.weight.detach().float()
        self.bias = norm.bias.detach().float() if isinstance(norm, nn.LayerNorm) else None
        self.eps = norm.eps

    def __call__(self, z: Tensor, branch: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Normed:
        """Of z + factor · branch."""
        return add_norm(z, branch, self.weight, self.bias, self.eps, factor=factor, dtype=dtype)


class Layer:
    """x · Wᵀ + bias, then a GELU if its form is not 0: in bf16, or in FP8 where x has scales."""

    def __init__(
        self, layer: nn.Linear, form: int = 0, fp8: bool = False, rows: slice = slice(None), splits: bool = False
    ) -> None:
        """`rows`: some of the outputs. `splits`: it may give them in parts to be added up, as `add_norm` does."""
        self.fp8, self.form, self.splits = fp8, form, splits
        self.chosen: dict[tuple[Hashable, ...], Way] = {}
        self.following: Tensor | None = None
        """The weights of the product right after this one."""
        self.scales: Tensor | None = None
        self.weight = layer.weight.detach()[rows].to(HALF)
        if fp8:
            self.weight, self.scales = quantise_rows(layer.weight[rows])
        self.bias = None if layer.bias is None else layer.bias.detach()[rows].to(HALF)

    def __call__(self, x: Tensor, scales: Tensor | None = None, out_scale: Tensor | None = None) -> Tensor:
        """(M, K), in FP8 with scales (M, 1) or () → (M, N) in bf16, or in FP8 in units of `out_scale`."""
        key = bucket(len(x)), scales is not None and scales.numel() > 1, out_scale is not None
        if (chosen := self.chosen.get(key)) is None:
            what = "product", self.fp8, *self.weight.shape, self.form, self.splits, *key
            ways = self.ways(*key)
            chosen = self.chosen[key] = choose(what, ways, x, scales, out_scale, in_line=key[0] <= FEW)
        return chosen(x, scales, out_scale)

    def ways(self, rows: int, by_row: bool, to_fp8: bool) -> dict[str, Way]:
        """That can compute it: torch has FP8 only with scales of rows, and without a GELU."""
        ways: dict[str, Way] = {}
        if not self.fp8 or (by_row and not to_fp8 and not self.form):
            ways["library"] = lambda x, scales, out_scale: self.by_library(x, scales)
        if rows <= few_rows.MOST and not self.fp8:
            ways["few rows"] = lambda x, scales, out_scale: few_rows.few_rows(x, self.weight, self.bias, self.form)
        return ways | {name: partial(self.by_ours, tiling) for name, tiling in self.tilings(rows).items()}

    def tilings(self, rows: int) -> dict[str, Tiling]:
        """That are worth trying."""
        if self.weight.shape[1] * self.weight.element_size() % 16:  # the copy engine takes rows of whole 16 bytes
            return {}
        wide, narrow = (BYTES, NARROW_BYTES) if self.fp8 else (WIDE, NARROW)
        found = wide if rows > FEW else narrow
        return {
            name: tiling
            for name, tiling in found.items()
            if tiling.splits == 1 or (self.splits and self.weight.shape[1] % (tiling.splits * tiling.depth) == 0)
        }

    def by_ours(self, tiling: Tiling, x: Tensor, scales: Tensor | None, out_scale: Tensor | None) -> Tensor:
        """By our own kernel."""
        return product(
            x, self.weight, self.bias, tiling,
            form=self.form, row_scales=scales, column_scales=self.scales, out_scale=out_scale,
            following=self.following,
        )  # fmt: skip

    def by_library(self, x: Tensor, scales: Tensor | None) -> Tensor:
        """By what torch calls."""
        y: Tensor
        if self.scales is not None:
            assert scales is not None
            y = torch._scaled_mm(
                x, self.weight.t(), scales, self.scales[None], bias=self.bias, out_dtype=HALF, use_fast_accum=True
            )
            return y
        if self.form == number_of("tanh") and self.bias is not None and x.is_cuda:
            y = torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)
            return y
        y = F.linear(x, self.weight, self.bias)
        if self.form == number_of("quick"):
            return y * torch.sigmoid(1.702 * y)
        return F.gelu(y, approximate="tanh" if self.form == number_of("tanh") else "none") if self.form else y


class Attention:
    """(M, 3·D) → (M, D), by the kernel that is fastest for as many images."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.chosen: dict[tuple[int, int], Way] = {}

    def __call__(self, qkv: Tensor, tokens: int) -> Tensor:
        """Queries, keys and values side by side."""
        key = bucket(len(qkv)), tokens
        if (chosen := self.chosen.get(key)) is None:
            width = qkv.shape[1] // 3 // self.heads
            what = "attention", qkv.shape[1], self.heads, *key
            ways = self.ways(key[0], width, tokens)
            chosen = self.chosen[key] = choose(what, ways, qkv, tokens, in_line=key[0] <= FEW)
        return chosen(qkv, tokens)

    def ways(self, rows: int, width: int, tokens: int) -> dict[str, Way]:
        """That can compute it. Plain products, whose results take memory, where they may be fast or others cannot."""
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        backends += [SDPBackend.MATH] if rows <= FEW or width > WIDEST else []
        ways: dict[str, Way] = {backend.name: partial(self._by_library, backend) for backend in backends}
        if applies(tokens, width):
            for cut in CUTS:
                ways[f"ours {cut}"] = lambda qkv, tokens, cut=cut: attention(qkv, tokens, self.heads, *cut)
        return ways

    def _by_library(self, backend: SDPBackend, qkv: Tensor, tokens: int) -> Tensor:
        q, k, v = qkv.view(-1, tokens, 3, self.heads, qkv.shape[1] // 3 // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        with sdpa_kernel(backend) if qkv.is_cuda else nullcontext():
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(qkv), -1)


class Block:
    """An encoder block's weights, as the kernels take them."""

    def __init__(self, block: EncoderBlock, form: int, fp8: bool) -> None:
        self.norm1, self.norm2 = Norm(block.norm1), Norm(block.norm2)
        self.qkv, self.out = Layer(block.attention.qkv, fp8=fp8), Layer(block.attention.out, splits=True)
        self.attention = Attention(block.attention.num_heads)
        self.fc1, self.fc2 = Layer(block.mlp.fc1, form, fp8), Layer(block.mlp.fc2, fp8=fp8, splits=True)
        self.fc1.following = self.fc2.weight
        self.factor1, self.factor2 = _factor(block.scale1), _factor(block.scale2)
        self.dtype = FP8 if fp8 else HALF
        self.hidden_scale: Tensor | None = None
        """Of the MLP's hidden layer in FP8, where it was calibrated; else each token has its own."""
        self.largest: Tensor | None = None
        """Of the hidden layer, while calibrating."""

    def attended(self, normed: Normed, tokens: int) -> Normed:
        """z' = MSA(LN(z)) + z, and LN(z')."""
        mixed = self.attention(self.qkv(normed.y, normed.scales), tokens)
        return self.norm2(normed.z, self.out(mixed), self.factor1, self.dtype)

    def hidden(self, normed: Normed) -> tuple[Tensor, Tensor | None]:
        """The MLP's hidden layer, and in FP8 its scales."""
        if not self.fc1.fp8 or self.hidden_scale is not None:
            return self.fc1(normed.y, normed.scales, self.hidden_scale), self.hidden_scale
        hidden = self.fc1(normed.y, normed.scales)
        if self.largest is not None:
            self.largest = torch.maximum(self.largest, hidden.abs().amax().float())
        return quantise(hidden)

    def mixed(self, normed: Normed, norm: Norm, dtype: torch.dtype) -> Normed:
        """z = MLP(LN(z')) + z', and the norm that follows."""
        return norm(normed.z, self.fc2(*self.hidden(normed)), self.factor2, dtype)


class ReadBlock:
    """The last block, for the first tokens alone: those that are read."""

    def __init__(self, block: EncoderBlock, form: int, read: int) -> None:
        width = block.attention.qkv.in_features
        self.read, self.heads = read, block.attention.num_heads
        self.norm1, self.norm2 = Norm(block.norm1), Norm(block.norm2)
        self.qkv = Layer(block.attention.qkv)
        self.q = Layer(block.attention.qkv, rows=slice(0, width))
        self.kv = Layer(block.attention.qkv, rows=slice(width, None))
        self.out = Layer(block.attention.out)
        self.fc1, self.fc2 = Layer(block.mlp.fc1, form), Layer(block.mlp.fc2)
        self.factor1, self.factor2 = _factor(block.scale1), _factor(block.scale2)

    def __call__(self, normed: Normed, tokens: int, norm: Norm | None) -> Tensor:
        """(M, D) z and norm1(z) → (B, read, D), float32; of it the norm, if there is one."""
        width = normed.z.shape[1]
        if len(normed.y) <= FEW:  # one kernel takes less time than two, even for queries that nobody asks for
            return self.of_qkv(self.qkv(normed.y), normed.z, tokens, norm)
        y = normed.y.view(-1, tokens, width)
        q = self.q(y[:, : self.read].reshape(-1, width).contiguous()).view(-1, self.read, width)
        return self.of(q, self.kv(normed.y).view(-1, tokens, 2 * width), normed.z, norm)

    def of_qkv(self, qkv: Tensor, z: Tensor, tokens: int, norm: Norm | None) -> Tensor:
        """The same from (M, 3·D), queries, keys and values side by side, and z."""
        width = z.shape[1]
        qkv = qkv.view(-1, tokens, 3 * width)
        return self.of(qkv[:, : self.read, :width], qkv[:, :, width:], z, norm)

    def of(self, q: Tensor, kv: Tensor, z: Tensor, norm: Norm | None) -> Tensor:
        """The same from (B, read, D) queries, (B, T, 2·D) keys and values, and z."""
        tokens, width = kv.shape[1], z.shape[1]
        read = read_forward if tokens <= MOST_TOKENS else read_by_library
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
    """(B, C, H, W) → (B, D): the representation of a plain Vision Transformer, in bf16 or FP8, on a GPU."""

    def __init__(self, model: ImageModel, fp8: bool = False, joins: bool = False) -> None:
        """`joins`: for few tokens, try sums and norms inside the products: for least time, at the price of memory."""
        super().__init__()
        check_fusible(model)
        assert isinstance(model, VisionTransformer)
        self.prefix, self.fp8 = model.prefix, fp8
        self.tokens = self.prefix + model.grid[0] * model.grid[1]
        form = number_of(model.architecture.gelu)
        blocks = [block for block in model.encoder.blocks if isinstance(block, EncoderBlock)]
        read = asked_tokens(model)
        self.last = None if read is None else ReadBlock(blocks.pop(), form, read)
        self.blocks = [Block(block, form, fp8) for block in blocks]
        projection = model.patch_embed.projection
        self.embed_patches: Layer | None = None
        if isinstance(projection, nn.Linear) and model.backbone is None:
            self.embed_patches = Layer(projection)
        self.joinable = joins and not fp8 and bool(self.blocks)
        self.joinable = self.joinable and takes(self.blocks[0].fc1.weight, self.blocks[0].fc2.weight)
        self.joined_blocks: list[JoinedBlock] | None = None
        self.passes: dict[int, Way] = {}
        """By which of the two, for as many tokens."""
        self.table = _table(model)
        self.last_norm = None if isinstance(model.encoder.norm, nn.Identity) else Norm(model.encoder.norm)
        self.plain = copy.deepcopy(model, {id(block): nn.Identity() for block in model.encoder.blocks}).eval()

    def calibrate(self, images: Tensor) -> None:
        """Fix the scales of the MLPs' hidden layers by some images: faster than scales of each token."""
        if not self.fp8:
            return
        for block in self.blocks:
            block.hidden_scale, block.largest = None, torch.zeros((), device=images.device)
        self(images)
        for block in self.blocks:
            assert block.largest is not None
            block.hidden_scale = (block.largest * MARGIN / LARGEST).clamp_min(1e-12)
            block.largest = None

    @torch.inference_mode()
    def forward(self, images: Tensor) -> Tensor:
        """Normalised images of the model's own size → y, float32."""
        self._check(images)
        normed = self._assembled(images)
        z = self._pass(normed)(normed.z, normed.y, normed.scales)
        return self._pooled(z, is_normed=self.last is not None)

    def apart(self, z: Tensor, y: Tensor, scales: Tensor | None = None) -> Tensor:
        """(M, D) assembled tokens and their norm → (B, T or as many as are read, D), by a kernel for every step."""
        normed = Normed(z, y, scales, None)
        norms = [block.norm1 for block in self.blocks[1:]] + ([] if self.last is None else [self.last.norm1])
        for block, norm in zip(self.blocks, norms, strict=False):
            is_last = norm is norms[-1] and self.last is not None
            normed = block.mixed(block.attended(normed, self.tokens), norm, HALF if is_last else block.dtype)
        if self.last is not None:
            return self.last(normed, self.tokens, self.last_norm)
        last = self.blocks[-1]  # all tokens are read, by a pool of any kind
        normed = last.attended(normed, self.tokens)
        branch = last.fc2(*last.hidden(normed)).float()
        if branch.ndim == 3:
            branch = branch.sum(0)
        z = normed.z + (branch if last.factor2 is None else branch * last.factor2)
        return z.view(-1, self.tokens, z.shape[1])

    def joined(self, z: Tensor, y: Tensor, scales: Tensor | None = None, *, tilings: Tilings) -> Tensor:
        """The same for few tokens, with sums and norms in the products; their weights are made when it first runs."""
        if self.joined_blocks is None:
            after = [*self.blocks[1:], self.last]
            self.joined_blocks = [JoinedBlock(*pair) for pair in zip(self.blocks, after, strict=True)]
        qkv = self.blocks[0].qkv(y)
        for block in self.joined_blocks:
            stream = block(qkv, z, self.tokens, tilings)
            z = stream.z
            if block.next_qkv is not None:
                qkv = block.next_qkv(stream, tilings.qkv)
        if self.last is not None:
            return self.last.of_qkv(qkv, z, self.tokens, self.last_norm)
        return z.float().view(-1, self.tokens, z.shape[1])

    def _pass(self, normed: Normed) -> Way:
        """The faster one, of those that can be."""
        rows = bucket(len(normed.z))
        if rows > MOST_ROWS or not self.joinable:
            return self.apart
        if (chosen := self.passes.get(rows)) is None:
            chosen = self.passes[rows] = choose(self._shape(rows), self.ways(normed), normed.z, normed.y)
            if all(way == self.apart for way in self.passes.values()):
                self.joined_blocks = None
        return chosen

    def ways(self, normed: Normed) -> dict[str, Way]:
        """Both passes, where there are kernels and memory for the second."""
        ways: dict[str, Way] = {"apart": self.apart}
        try:
            ways["joined"] = partial(self.joined, tilings=self._tilings(normed))
        except (NotApplicableError, torch.OutOfMemoryError):
            self.joined_blocks = None
        return ways

    def _shape(self, rows: int) -> tuple[Hashable, ...]:
        """What the time of a pass depends on."""
        block = self.blocks[0]
        return (
            "pass", *block.fc1.weight.shape, block.fc1.form, block.attention.heads, block.norm1.bias is None,
            block.factor1 is None, len(self.blocks), 0 if self.last is None else self.last.read, self.tokens, rows,
        )  # fmt: skip

    def _tilings(self, normed: Normed) -> Tilings:
        """The fastest, one product after the other, in the pass itself: a kernel's time depends on its neighbours."""
        best, shape = Tilings(), self._shape(bucket(len(normed.z)))
        for name, tried in TRIED.items():
            options = {str(tuple(each)): best._replace(**{name: each}) for each in tried}
            ways = {label: partial(self.joined, tilings=option) for label, option in options.items()}
            best = options[fastest((*shape, name), ways, normed.z, normed.y)]
        return best

    def _check(self, images: Tensor) -> None:
        expected = (self.plain.in_channels, *self.plain.image_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected or not images.is_floating_point():
            raise InputError(
                f"fused kernels take normalised images of shape (batch, {', '.join(map(str, expected))}), and not "
                f"{images.dtype} of {tuple(images.shape)}: model.resize makes a model for images of another size"
            )

    def _assembled(self, images: Tensor) -> Normed:
        """The tokens that go into the first block, and their norm."""
        if self.embed_patches is not None:
            patches = self.embed_patches(cut(images, self.plain.architecture.patch_size, HALF))
        else:
            # A stem or a ResNet keeps its weights whole: a ResNet standardises them, which bf16 would blur.
            with torch.autocast(images.device.type, HALF):
                features = images.float() if self.plain.backbone is None else self.plain.backbone(images.float())
                patches = self.plain.patch_embed(features).reshape(-1, self.plain.width).to(HALF)
        first = self.blocks[0] if self.blocks else self.last
        assert first is not None
        return assemble_norm(
            self.table, patches, first.norm1.weight, first.norm1.bias, first.norm1.eps,
            prefix=self.prefix, stream=STREAM, dtype=FP8 if self.fp8 and self.blocks else HALF,
        )  # fmt: skip

    def _pooled(self, z: Tensor, is_normed: bool) -> Tensor:
        with torch.autocast(z.device.type, HALF, enabled=not is_normed):
            y: Tensor = self.plain.pooled(z if is_normed else self.plain.encoder.norm(z))
        return y.float()


def check_fusible(model: ImageModel) -> None:
    """Refuse, with the reason, a model that the kernels are not made for."""
    if not isinstance(model, VisionTransformer):
        raise NotApplicableError("fused kernels are made for Vision Transformers")
    a = model.architecture
    for wrong, why in (
        (a.block == "axial", "axial attention"),
        (a.position == "relative", "relative positions"),
        (a.position_at != "input", "positions in every layer"),
        (a.input_norm, "a norm before the encoder"),
    ):
        if wrong:
            raise NotApplicableError(f"there are no fused kernels for {why}")


def _factor(scale: nn.Module) -> Tensor | None:
    return scale.factor.detach().float() if isinstance(scale, LayerScale) else None


@torch.no_grad()
def _table(model: VisionTransformer) -> Tensor:
    """(T, D): what is added to the patches: positions, and in the first rows the class token and registers."""
    patches = next(model.encoder.parameters()).new_zeros(1, model.grid[0] * model.grid[1], model.width)
    z = model._with_prefix(patches)[0]
    for positions in model.position_embedding:
        z = z + model._table(positions, model.grid)
    return z.detach().float().contiguous()
