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

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from vitrail.errors import NotApplicableError
from vitrail.fast.choice import choose
from vitrail.fast.fused import BYTES, WIDE, check_fusible
from vitrail.fast.kernels.backward import gelu_backward, norm_backward, pack
from vitrail.fast.kernels.gelu import number_of
from vitrail.fast.kernels.norm import Normed, add_norm, assemble_norm
from vitrail.fast.kernels.patches import cut
from vitrail.fast.kernels.product import Tiling, product
from vitrail.fast.kernels.quantise import quantise
from vitrail.fast.kernels.reading import MOST_TOKENS, read_backward, read_by_library, read_forward
from vitrail.fast.last_block import asked_tokens
from vitrail.model.base import ImageModel
from vitrail.model.cost import tokens
from vitrail.model.encoder import EncoderBlock
from vitrail.model.patches import PatchEmbed
from vitrail.model.positions import Grid
from vitrail.model.vit import VisionTransformer

GELUS = {1: "tanh", 2: "none"}
Shape = tuple[int, int, int]
"""B, T, H"""


class AddNorm(torch.autograd.Function):
    """z + keep · (branch + its bias), and the norm of it; with a twin in FP8, if asked for, and its scales."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, branch: Tensor, branch_bias: Tensor, weight: Tensor, bias: Tensor,
        keep: Tensor | None, count: int, eps: float, dtype: torch.dtype, twin: bool,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """(M, D) all → the sum, in z's type, and the norm, in `dtype`."""
        made = add_norm(
            z, branch, weight, bias, eps, branch_bias=branch_bias, keep=keep, tokens=count, dtype=dtype, twin=twin
        )
        ctx.save_for_backward(made.z, weight, keep)
        ctx.tokens, ctx.eps = count, eps
        _mark(ctx, made)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor, dy: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        """Of what went in."""
        z, weight, keep = ctx.saved_tensors
        found = norm_backward(dy.contiguous(), dz.contiguous(), z, weight, ctx.eps, keep=keep, tokens=ctx.tokens)
        return found.z, found.branch, found.branch_bias, found.weight, found.bias, None, None, None, None, None


class AssembleNorm(torch.autograd.Function):
    """The prefix and the embedded patches, with positions, as tokens, and the norm of them."""

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, patches: Tensor, weight: Tensor, bias: Tensor,
        prefix: int, eps: float, stream: torch.dtype, dtype: torch.dtype, twin: bool,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """(T, D) that every image begins from, (B·N, D) → (B·T, D)."""
        made = assemble_norm(table, patches, weight, bias, eps, prefix=prefix, stream=stream, dtype=dtype, twin=twin)
        ctx.save_for_backward(made.z, weight)
        ctx.tokens, ctx.prefix, ctx.eps = len(table), prefix, eps
        _mark(ctx, made)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor, dy: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        """Of what went in."""
        z, weight = ctx.saved_tensors
        found = norm_backward(dy.contiguous(), dz.contiguous(), z, weight, ctx.eps)
        by_token = found.branch.view(-1, ctx.tokens, z.shape[1])
        patches = by_token[:, ctx.prefix :].flatten(0, 1)
        return by_token.sum(0, dtype=torch.float32), patches, found.weight, found.bias, None, None, None, None, None


def _mark(ctx: Any, made: Normed) -> None:
    """What has no gradient."""
    ctx.mark_non_differentiable(*(each for each in made[2:] if each is not None))
    ctx.set_materialize_grads(True)


class Read(torch.autograd.Function):
    """Attention of the tokens that are read to all."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, heads: int) -> Tensor:
        """(B, R, D), (B, T, 2·D) → (B, R, D)."""
        ctx.save_for_backward(q, kv)
        ctx.heads = heads
        return read_forward(q, kv, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Of both."""
        q, kv = ctx.saved_tensors
        return *read_backward(dy, q, kv, ctx.heads), None


class Product(torch.autograd.Function):
    """x · Wᵀ, of a whole W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """(M, K), (N, K) → (M, N)."""
        cast = weight.to(x.dtype)
        ctx.save_for_backward(x, cast)
        return x @ cast.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor]:
        """Of both."""
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        return dy @ weight if ctx.needs_input_grad[0] else None, outer(dy, x)


class Attend(torch.autograd.Function):
    """The product with queries, keys and values, and attention: x → softmax(q kᵀ / √d) v."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, shape: Shape, twin: Tensor | None, scales: Tensor | None
    ) -> Tensor:
        """(M, D), and the same in FP8 with its scales, where the product is to be in that → (M, D)."""
        cast = weight.to(x.dtype)
        qkv = dense(x, cast, bias, twin, scales)
        q, k, v = heads(qkv, shape)
        y, *kept = attention_forward(q, k, v)
        ctx.save_for_backward(x, cast, qkv, y, *(each for each in kept if isinstance(each, Tensor)))
        ctx.shape, ctx.kept = shape, [None if isinstance(each, Tensor) else (each,) for each in kept]
        mixed: Tensor = y.transpose(1, 2).reshape(x.shape)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Of x, the weight and the bias."""
        x, weight, qkv, y, *tensors = ctx.saved_tensors
        waiting = iter(tensors)
        kept = [next(waiting) if each is None else each[0] for each in ctx.kept]
        images, tokens, count = ctx.shape
        dy = dy.contiguous().view(images, tokens, count, -1).transpose(1, 2)
        dq, dk, dv = attention_backward(dy, *heads(qkv, ctx.shape), y, kept)
        dqkv, d_bias = pack(dq, dk, dv)
        return dqkv @ weight, outer(dqkv, x), d_bias, None, None, None


class Mix(torch.autograd.Function):
    """The MLP without its last bias: gelu(x · W₁ᵀ + b₁) · W₂ᵀ."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, form: int,
        twin: Tensor | None, scales: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """(M, D), and the same in FP8 with its scales, where the first product is to be in that → (M, D)."""
        cast1, cast2 = weight1.to(x.dtype), weight2.to(x.dtype)
        before, hidden = activated(x, cast1, bias1.to(x.dtype), form, twin, scales)
        ctx.save_for_backward(x, cast1, cast2, before, hidden)
        ctx.form = form
        return hidden @ cast2.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Of x and what is learned."""
        x, weight1, weight2, before, hidden = ctx.saved_tensors
        dy = dy.contiguous()
        d_before = dy @ weight2
        d_weight2 = outer(dy, hidden)
        d_bias1 = gelu_backward(d_before, before, ctx.form)
        return d_before @ weight1, outer(d_before, x), d_bias1, d_weight2, None, None, None


def dense(x: Tensor, weight: Tensor, bias: Tensor, twin: Tensor | None, scales: Tensor | None) -> Tensor:
    """x · Wᵀ + bias; in FP8 where x has a twin."""
    if twin is None or scales is None:
        return F.linear(x, weight, bias.to(x.dtype))
    weight8, weight_scales = quantise(weight)
    y: Tensor = torch._scaled_mm(
        twin, weight8.t(), scales, weight_scales.t(), bias=bias.to(x.dtype), out_dtype=x.dtype, use_fast_accum=True
    )
    return y


def activated(
    x: Tensor, weight: Tensor, bias: Tensor, form: int, twin: Tensor | None, scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x · Wᵀ + bias, and the GELU of it; in FP8 where x has a twin."""
    operand, kernel, kernel_scales = x, weight, None
    if twin is not None:
        operand, (kernel, kernel_scales) = twin, quantise(weight)

    def by_library(operand: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
        before = F.linear(operand, kernel, bias)
        return before, F.gelu(before, approximate=GELUS[form])

    def by_ours(tiling: Tiling, operand: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
        before = torch.empty(len(operand), len(kernel), dtype=x.dtype, device=x.device)
        hidden = product(
            operand, kernel, bias, tiling,
            form=form, before=before, row_scales=scales, column_scales=kernel_scales, dtype=x.dtype,
        )  # fmt: skip
        return before, hidden

    ways: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {} if twin is not None else {"library": by_library}
    for name, tiling in (WIDE if twin is None else BYTES).items():
        ways[name] = partial(by_ours, tiling)
    key = "activated", *weight.shape, len(x), form, twin is not None
    return choose(key, ways, operand, kernel)(operand, kernel)


def outer(dy: Tensor, x: Tensor) -> Tensor:
    """(M, N), (M, K) → (N, K) float32, added up in it: the gradient of a weight."""
    if dy.is_cuda and dy.dtype != torch.float32:
        found: Tensor = torch.mm(dy.t(), x, out_dtype=torch.float32)
        return found
    return (dy.t() @ x).float()


def heads(qkv: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """(M, 3·D) → queries, keys and values, each (B, H, T, d)."""
    images, tokens, count = shape
    q, k, v = qkv.view(images, tokens, 3, count, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def attention_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Attention by cuDNN's kernel, the operator that torch itself dispatches to, and what its gradient needs."""
    if not q.is_cuda:
        return (F.scaled_dot_product_attention(q, k, v),)
    y, *kept = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False)
    return y, *kept[:-1]  # log-sum-exp, two cumulative lengths, two largest lengths, seed and offset; no debug mask


def attention_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, kept: list[Any]) -> tuple[Tensor, ...]:
    """The gradients of queries, keys and values."""
    if not q.is_cuda:
        with torch.enable_grad():
            q, k, v = (each.detach().requires_grad_() for each in (q, k, v))
            again = F.scaled_dot_product_attention(q, k, v)
        return torch.autograd.grad(again, (q, k, v), dy)
    lse, cumulative_q, cumulative_k, most_q, most_k, seed, offset = kept
    found: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dy, q, k, v, y, lse, seed, offset, None, cumulative_q, cumulative_k, most_q, most_k, 0.0, False
    )
    return found


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
        z, y, scales, twin = self._assembled(pixels, (rows, columns), norms[0], bool(blocks))
        for block, norm in zip(blocks, norms[1:], strict=True):
            attention, mlp = block.attention, block.mlp
            y = Attend.apply(y, attention.qkv.weight, attention.qkv.bias, shape, twin, scales)
            branch = Product.apply(y, attention.out.weight)
            z, y, scales, twin = self._added(z, branch, attention.out.bias, block, block.norm2, shape, self.fp8)
            branch = Mix.apply(y, mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, self.form, twin, scales)
            z, y, scales, twin = self._added(
                z, branch, mlp.fc2.bias, block, norm, shape, self.fp8 and norm is not norms[-1]
            )
        with self._autocast(pixels):
            if last is None:
                pooled = model.pooled(y.view(images, shape[1], -1).float())
            else:
                assert self.read is not None
                pooled = model.pooled(model.encoder.norm(self._last(last, z, y, shape, self.read)))
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
        self, z: Tensor, branch: Tensor, bias: Tensor, block: EncoderBlock, norm: nn.Module, shape: Shape, twin: bool
    ) -> Any:
        assert isinstance(norm, nn.LayerNorm)
        keep = _keep(block, shape[0], z)
        return AddNorm.apply(z, branch, bias, norm.weight, norm.bias, keep, shape[1], norm.eps, self.dtype, twin)

    def _last(self, block: EncoderBlock, z: Tensor, y: Tensor, shape: Shape, read: int) -> Tensor:
        """(M, D) z and norm1(z) → (B, R, D): what the last block gives out for the tokens that are read."""
        (images, tokens, heads), attention, width = shape, block.attention, z.shape[1]
        weight, bias = attention.qkv.weight, attention.qkv.bias
        y = y.view(images, tokens, width)
        q = F.linear(y[:, :read], weight[:width], bias[:width])
        kv = F.linear(y, weight[width:], bias[width:])
        attend = Read.apply if tokens <= MOST_TOKENS else read_by_library
        out = attention.out(attend(q, kv, heads))
        first = z.view(images, tokens, width)[:, :read].float() + block.drop(out)
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
