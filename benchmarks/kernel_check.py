"""Every kernel of ours on a GPU, at B/16's sizes, against a float64 reference; exits with 1 where one is too far off.

    python benchmarks/kernel_check.py --out kernels.json

On a CPU the same kernels are tested in Triton's interpreter (tests/fast). 2e-3 to 4e-3 is the rounding of bf16.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from pathlib import Path

import torch
from dropout_check import dropouts, random_models
from torch import Tensor
from torch.nn import functional as F

import vitrail
from vitrail.benchmark.machine import read_commit
from vitrail.fast.gpu.autotune import round_up_rows
from vitrail.fast.gpu.fused_embedder import FusedEmbedder
from vitrail.fast.gpu.fused_layers import ATTENTION_TILES, BYTES, NARROW, NARROW_BYTES, WIDE, FusedHead
from vitrail.fast.gpu.kernels.attention import attention
from vitrail.fast.gpu.kernels.backward import gelu_backward, join_qkv_gradients, norm_backward
from vitrail.fast.gpu.kernels.few_rows import multiply_few_rows
from vitrail.fast.gpu.kernels.gelu import SWIGLU
from vitrail.fast.gpu.kernels.merged import multiply_and_add, normalise_and_multiply
from vitrail.fast.gpu.kernels.norm import FP8, add_norm, assemble_norm
from vitrail.fast.gpu.kernels.patches import cut_patches
from vitrail.fast.gpu.kernels.product import pack_rotation, product
from vitrail.fast.gpu.kernels.quantise import quantise
from vitrail.fast.gpu.kernels.read_attention import read_backward, read_forward
from vitrail.fast.gpu.kernels.rotate import HeadTransform, transform_heads, transform_heads_backward
from vitrail.fast.gpu.kernels.short_attention import short_backward, short_forward
from vitrail.fast.gpu.kernels.swiglu import apply_swiglu, swiglu_backward
from vitrail.fast.gpu.merged_block import NORM_TILINGS, RESIDUAL_TILINGS
from vitrail.fast.gpu.training import FusedTraining
from vitrail.fast.optimize import optimize
from vitrail.fast.timing import relative_distance as distance
from vitrail.model.rotary import Rotation

HALF, EIGHT, STREAM = 6e-3, 4e-2, 6e-4
"""How far bf16, FP8 and z, in fp16, may be off."""
IMAGES, TOKENS, WIDTH, HEADS = 16, 197, 768, 12


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def norms() -> dict[str, tuple[float, float]]:
    count = IMAGES * TOKENS
    z, branch, dy, dz = (random(count, WIDTH) for _ in range(4))
    weight, bias = torch.randn(WIDTH, device="cuda"), torch.randn(WIDTH, device="cuda")
    keep = torch.tensor([0.0, 2.0] * (IMAGES // 2), device="cuda")
    exact = [each.double().requires_grad_() for each in (z, branch, weight, bias)]
    total = exact[0] + exact[1] * keep.double().repeat_interleave(TOKENS)[:, None]
    y = F.layer_norm(total, (WIDTH,), exact[2], exact[3], 1e-6)
    gradients = torch.autograd.grad([y, total], exact, [dy.double(), dz.double()])
    made = add_norm(z.half(), branch, weight, bias, 1e-6, keep=keep, tokens=TOKENS, dtype=torch.bfloat16, twin=True)
    assert made.twin is not None
    assert made.scales is not None
    back = norm_backward(dy, dz, total.detach().bfloat16(), weight, 1e-6, keep=keep, tokens=TOKENS)
    table, patches = torch.randn(TOKENS, WIDTH, device="cuda"), random(IMAGES * (TOKENS - 1), WIDTH)
    whole = torch.cat([torch.zeros(IMAGES, 1, WIDTH, device="cuda"), patches.view(IMAGES, -1, WIDTH)], 1) + table
    assembled = assemble_norm(
        table, patches, weight, bias, 1e-6, prefix=1, stream=torch.float16, dtype=torch.bfloat16
    ).y.view(IMAGES, TOKENS, WIDTH)
    return {
        "add_norm": (distance(made.y, y), HALF),
        "add_norm, FP8": (distance(made.twin.float() * made.scales, y), EIGHT),
        "assemble_norm": (distance(assembled, F.layer_norm(whole.double(), (WIDTH,), *exact[2:], 1e-6)), HALF),
        "norm_backward, z": (distance(back.z, gradients[0]), HALF),
        "norm_backward, branch": (distance(back.branch, gradients[1]), HALF),
        "norm_backward, weight": (distance(back.weight, gradients[2]), HALF),
        "norm_backward, bias": (distance(back.bias, gradients[3]), HALF),
        "norm_backward, branch's bias": (distance(back.branch_bias, gradients[1].sum(0)), HALF),
    }


def products() -> dict[str, tuple[float, float]]:
    found = {}
    x, w, bias = random(IMAGES * TOKENS, WIDTH), random(4 * WIDTH, WIDTH, scale=WIDTH**-0.5), random(4 * WIDTH)
    plain = F.linear(x.double(), w.double(), bias.double())
    forms = {0: plain, 1: F.gelu(plain, approximate="tanh"), 2: F.gelu(plain), 3: plain * torch.sigmoid(1.702 * plain)}
    for tiling in (WIDE | NARROW).values():
        if tiling.splits > 1:
            found[f"product {tuple(tiling)}"] = distance(product(x, w, bias, tiling).double().sum(0), plain), HALF
            continue
        for form, exact in forms.items():
            before = torch.full_like(plain, torch.nan, dtype=torch.bfloat16)
            y = product(x, w, bias, tiling, form=form, before=before)
            found[f"product {tuple(tiling)}, GELU {form}"] = distance(y, exact), HALF
            found[f"product {tuple(tiling)}, before GELU {form}"] = distance(before, plain), HALF
    found["few_rows"] = distance(multiply_few_rows(x[:2].contiguous(), w, bias, 1), forms[1][:2]), HALF
    (x8, rows), (w8, columns) = quantise(x), quantise(w)
    dequantised = F.linear(x8.double() * rows, w8.double() * columns, bias.double())
    scale = torch.full((), 0.05, device="cuda")
    for tiling in (BYTES | NARROW_BYTES).values():
        if tiling.splits > 1:
            depth = tiling.splits * tiling.depth  # of K, what goes into whole parts
            (x8s, rows8), (w8s, columns8) = quantise(x[:, :depth].contiguous()), quantise(w[:, :depth].contiguous())
            y = product(x8s, w8s, bias, tiling, row_scales=rows8, column_scales=columns8).double().sum(0)
            exact = F.linear(x8s.double() * rows8, w8s.double() * columns8, bias.double())
            found[f"product in FP8 {tuple(tiling)}"] = distance(y, exact), HALF
            continue
        y = product(x8, w8, bias, tiling, form=1, row_scales=rows, column_scales=columns)
        exact = F.gelu(dequantised, approximate="tanh")
        found[f"product in FP8 {tuple(tiling)}"] = distance(y, exact), HALF
        y8 = product(x8, w8, bias, tiling, form=1, row_scales=rows, column_scales=columns, out_scale=scale)
        assert y8.dtype == FP8
        found[f"product in FP8 to FP8 {tuple(tiling)}"] = distance(y8.float() * scale, exact), EIGHT
    return found


def joined() -> dict[str, tuple[float, float]]:
    """One image's tokens, at B/16's widths and at others that no tile divides."""
    found = {}
    for width, inner in ((WIDTH, 4 * WIDTH), (200, 328)):
        z, x, w = (3 + random(TOKENS, width)).half(), random(TOKENS, inner), random(width, inner, scale=inner**-0.5)
        bias, factor = random(width), torch.randn(width, device="cuda")
        exact = z.double() + factor * F.linear(x.double(), w.double(), bias.double())
        for tiling in RESIDUAL_TILINGS:
            name = str(tuple(tiling))
            made = multiply_and_add(x, w, bias, z, tiling, factor=factor)
            tiles = made.z.double().split(tiling.columns, 1)
            means = torch.stack([tile.mean(1) for tile in tiles])
            squares = torch.stack([(tile - tile.mean(1, keepdim=True)).square().sum(1) for tile in tiles])
            found[f"joining {width} {name}"] = distance(made.z, exact), STREAM
            found[f"joining {width} {name}, means"] = distance(made.statistics[0], means), 1e-5
            found[f"joining {width} {name}, squares"] = distance(made.statistics[1], squares), 1e-5
        stream = multiply_and_add(x, w, bias, z, RESIDUAL_TILINGS[0], factor=factor)
        w, constant = random(inner, width, scale=width**-0.5).half(), torch.randn(inner, device="cuda")
        for tiling in NORM_TILINGS:
            for kind, norm in (("layer", F.layer_norm), ("rms", F.rms_norm)):
                y = normalise_and_multiply(
                    stream, w, w.float().sum(1), constant, 1e-6, tiling,
                    centred=kind == "layer", form=1, next_weight=w.bfloat16(),
                )  # fmt: skip
                product64 = F.linear(norm(stream.z.double(), (width,), eps=1e-6), w.double(), constant.double())
                found[f"norming {width} {tuple(tiling)}, {kind}"] = (
                    distance(y, F.gelu(product64, approximate="tanh")),
                    HALF,
                )
    return found


def attentions() -> dict[str, tuple[float, float]]:
    found = {}
    qkv = random(IMAGES * TOKENS, 3 * WIDTH)
    q, k, v = qkv.view(IMAGES, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double()).transpose(1, 2).reshape(-1, WIDTH)
    for how in ATTENTION_TILES:
        found[f"attention {how}"] = distance(attention(qkv, TOKENS, HEADS, *how), exact), HALF
    query, kv, dy = random(IMAGES, 1, WIDTH), random(IMAGES, TOKENS, 2 * WIDTH), random(IMAGES, 1, WIDTH)
    one, both = query.double().requires_grad_(), kv.double().requires_grad_()
    keys, values = both.view(IMAGES, TOKENS, 2, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
    y = F.scaled_dot_product_attention(one.view(IMAGES, HEADS, 1, -1), keys, values).reshape(IMAGES, 1, WIDTH)
    gradients = torch.autograd.grad(y, [one, both], dy.double())
    found["read_forward"] = distance(read_forward(query, kv, HEADS), y), HALF
    dq, dkv = read_backward(dy, query, kv, HEADS)
    found["read_backward, q"], found["read_backward, kv"] = (
        (distance(dq, gradients[0]), HALF),
        (distance(dkv, gradients[1]), HALF),
    )
    parts = [random(IMAGES, TOKENS, HEADS, 64).transpose(1, 2) for _ in range(3)]
    packed, total = join_qkv_gradients(*parts)
    side_by_side = torch.cat([each.transpose(1, 2).reshape(-1, WIDTH) for each in parts], 1)
    found["pack"] = distance(packed, side_by_side), 0.0
    found["pack, sums"] = distance(total, side_by_side.double().sum(0)), 1e-5
    return found


def short_attentions() -> dict[str, tuple[float, float]]:
    """Attention of few tokens, forward and backward; and a small ViT with 64 tokens, whose gradients it computes."""
    found = {}
    for tokens, width in ((64, 64), (64, 32), (65, 64), (128, 64), (37, 128)):
        qkv, dy = random(40 * tokens, 3 * 4 * width), random(40 * tokens, 4 * width)
        exact = qkv.double().requires_grad_()
        q, k, v = exact.view(40, tokens, 3, 4, width).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(40 * tokens, -1)
        (gradient,) = torch.autograd.grad(y, exact, dy.double())
        back, total = short_backward(dy, qkv, tokens, 4)
        name = f"{tokens} tokens, heads of {width}"
        found[f"short_forward, {name}"] = distance(short_forward(qkv, tokens, 4), y), HALF
        found[f"short_backward, {name}"] = distance(back, gradient), HALF
        found[f"short_backward, {name}, sums"] = distance(total, gradient.sum(0)), HALF
    model = vitrail.create_model("S/4", image_size=32, width=256, num_heads=4, pool="average", num_classes=10, seed=0)
    torch.nn.init.normal_(model.head.weight, std=0.03)
    model, parameters = model.cuda().train(), list(model.parameters())
    images, labels = torch.randn(64, 3, 32, 32, device="cuda"), torch.arange(64, device="cuda") % 10

    def gradients(logits: Tensor) -> Tensor:
        return torch.cat([each.flatten() for each in torch.autograd.grad(F.cross_entropy(logits, labels), parameters)])

    exact = gradients(model(images))
    with torch.autocast("cuda", torch.bfloat16):
        found["gradients of a ViT with 64 tokens under autocast"] = distance(gradients(model(images)), exact), 3e-2
    found["gradients of a ViT with 64 tokens, fused"] = (
        distance(gradients(FusedTraining(model)(images).float()), exact),
        3e-2,
    )
    return found


def rotations() -> dict[str, tuple[float, float]]:
    """Queries and keys, normed and rotated: apart, their gradients, and a rotation inside the product."""
    found = {}
    x, w = random(IMAGES * TOKENS, WIDTH), random(3 * WIDTH, WIDTH, scale=WIDTH**-0.5)
    qkv, dy, head = F.linear(x, w), random(IMAGES * TOKENS, 3 * WIDTH), WIDTH // HEADS
    for tables in (1, HEADS):
        angles = 3 * torch.randn(tables, TOKENS, head // 2, device="cuda")
        for paired in (True, False):
            whole = (angles.repeat_interleave(2, -1) if paired else torch.cat([angles, angles], -1)).double()
            turn = Rotation(whole.cos(), whole.sin(), "pairs" if paired else "halves")
            for kind in ("no norm", "layer", "rms"):
                weights = [torch.randn(head, device="cuda") for _ in range(4)] if kind != "no norm" else [None] * 4
                weights = [None if kind == "rms" and i % 2 else each for i, each in enumerate(weights)]
                transform = HeadTransform(HEADS, head, angles.cos(), angles.sin(), paired, *weights, 1e-6)
                exact, exact_weights = _rotate_exactly(qkv, turn, kind, weights)
                gradients = torch.autograd.grad(exact[1], [exact[0], *exact_weights], dy.double())
                name = f"{tables} tables, {turn.layout}, {kind}"
                found[f"rotate {name}"] = distance(transform_heads(qkv.clone(), transform), exact[1].detach()), HALF
                dx = dy.clone()
                back = transform_heads_backward(dx, qkv, transform)
                found[f"rotate {name}, gradient"] = distance(dx, gradients[0]), HALF
                found[f"rotate {name}, sums"] = distance(back.bias, gradients[0].sum(0)[: 2 * WIDTH]), HALF
                sums = [each for each, weight in zip(back[1:], weights, strict=True) if weight is not None]
                for number, (sum_, gradient) in enumerate(zip(sums, gradients[1:], strict=True)):
                    found[f"rotate {name}, gradient of parameter {number}"] = distance(sum_, gradient), HALF
        whole = angles.repeat_interleave(2, -1).double()
        turn = Rotation(whole.cos(), whole.sin(), "pairs")
        (_, exact_turned), _ = _rotate_exactly(F.linear(x.double(), w.double()), turn, "no norm", [])
        rotation = pack_rotation(angles.cos(), angles.sin(), 2 * WIDTH)
        for tiling in (WIDE | NARROW).values():
            if tiling.splits == 1:
                y = product(x, w, None, tiling, rotation=rotation)
                found[f"product {tuple(tiling)}, turned, {tables} tables"] = distance(y, exact_turned.detach()), HALF
    return found


def _rotate_exactly(
    qkv: Tensor, turn: Rotation, kind: str, weights: list[Tensor | None]
) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Return qkv in float64 and what becomes of it, and the parameters in float64."""
    whole = qkv.double().requires_grad_()
    exact = [None if each is None else each.double().requires_grad_() for each in weights]
    q, k, v = whole.view(IMAGES, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
    width = (q.shape[-1],)
    if kind == "layer":
        q, k = F.layer_norm(q, width, exact[0], exact[1], 1e-6), F.layer_norm(k, width, exact[2], exact[3], 1e-6)
    if kind == "rms":
        q, k = F.rms_norm(q, width, exact[0], 1e-6), F.rms_norm(k, width, exact[2], 1e-6)
    turned = torch.stack([turn(q), turn(k), v]).permute(1, 3, 0, 2, 4).reshape(qkv.shape)
    return (whole, turned), [each for each in exact if each is not None]


def gates() -> dict[str, tuple[float, float]]:
    """SwiGLU: apart, its gradient, and inside the product."""
    found = {}
    hidden = 2048
    x, w, bias = random(IMAGES * TOKENS, WIDTH), random(2 * hidden, WIDTH, scale=WIDTH**-0.5), random(2 * hidden)
    before, dy = F.linear(x, w, bias), random(IMAGES * TOKENS, hidden)
    exact_before = before.double().requires_grad_()
    gate, value = exact_before.chunk(2, 1)
    (gradient,) = torch.autograd.grad(F.silu(gate) * value, exact_before, dy.double())
    exact = (F.silu(gate) * value).detach()
    found["swiglu"] = distance(apply_swiglu(before, interleaved=False), exact), HALF
    mixed = torch.stack(before.chunk(2, 1), -1).flatten(1)
    found["swiglu, interleaved"] = distance(apply_swiglu(mixed, interleaved=True), exact), HALF
    dx, total = swiglu_backward(dy, before)
    found["swiglu_backward"], found["swiglu_backward, sums"] = (
        (distance(dx, gradient), HALF),
        (distance(total, gradient.sum(0)), HALF),
    )
    weight, shift = w.view(2, hidden, WIDTH).transpose(0, 1).reshape(-1, WIDTH), bias.view(2, hidden).t().reshape(-1)
    gate, value = F.linear(x.double(), w.double(), bias.double()).chunk(2, 1)
    exact = F.silu(gate) * value
    for tiling in (WIDE | NARROW).values():
        if tiling.splits == 1:
            y = product(x, weight, shift, tiling, form=SWIGLU)
            found[f"product {tuple(tiling)}, SwiGLU"] = distance(y, exact), HALF
    (x8, rows), (w8, columns) = quantise(x), quantise(weight)
    gate, value = F.linear(x8.double() * rows, w8.double() * columns, shift.double()).view(-1, hidden, 2).unbind(-1)
    scale = torch.full((), 0.05, device="cuda")
    for tiling in (BYTES | NARROW_BYTES).values():
        if tiling.splits == 1:
            y = product(x8, w8, shift, tiling, form=SWIGLU, row_scales=rows, column_scales=columns)
            found[f"product in FP8 {tuple(tiling)}, SwiGLU"] = distance(y, F.silu(gate) * value), HALF
            y8 = product(x8, w8, shift, tiling, form=SWIGLU, row_scales=rows, column_scales=columns, out_scale=scale)
            found[f"product in FP8 to FP8 {tuple(tiling)}, SwiGLU"] = (
                distance(y8.float() * scale, F.silu(gate) * value),
                EIGHT,
            )
    return found


def encoders() -> dict[str, tuple[float, float]]:
    """Whole encoders of today's kinds, four blocks deep, by every implementation that is the fastest somewhere."""
    found = {}
    unit, index = {"layout": "halves"}, {"coordinates": "index", "base": 10000.0, "layout": "pairs"}
    dinov3 = {"position": "none", "rotary": unit, "registers": 4, "key_bias": False, "layer_scale": 1.0}
    for name, options in {
        "DINOv2 at 518": {"patch_size": 14, "image_size": 518, "layer_scale": 1.0},
        "DINOv2 giant": {"patch_size": 14, "mlp": "swiglu", "mlp_dim": 2048, "registers": 4, "layer_scale": 1.0},
        "DINOv3": dinov3 | {"image_size": 256},
        "DINOv3, average pool": dinov3 | {"image_size": (256, 384), "pool": "average", "class_token": True},
        "SigLIP 2": {"pool": "attention", "image_size": 256},
        "EVA-02": {
            "rotary": index, "mlp": "swiglu", "mlp_dim": 2048, "mlp_norm": True, "attention_norm": True,
            "key_bias": False,
        },
        "Perception Encoder": {"rotary": index, "pool": "attention", "class_token": True, "input_norm": True},
        "norms on queries and keys": {"qk_norm": True, "rotary": index},
    }.items():  # fmt: skip
        model = vitrail.create_model("B/16", seed=0, depth=4, **options).cuda()
        images = torch.randn(32, 3, *model.image_size, device="cuda")  # so many that few tilings are tried
        for precision, most in (("bf16", 1.5e-2), ("fp8", 0.15)):
            fast = optimize(model, "throughput", precision, images=images)
            assert fast.method == "fused kernels", fast.method
            found[f"{name} in {precision}"] = fast.distance, most
        if name == "DINOv3":
            found[f"{name} in bf16, recorded"] = optimize(model, "latency", "bf16", images=images[:1]).distance, 1.5e-2
    labels, images = torch.arange(8, device="cuda"), torch.randn(8, 3, 224, 224, device="cuda")
    for name, options in {"rotated": {"rotary": unit, "key_bias": False}, "normed": {"qk_norm": True}}.items():
        model = vitrail.create_model("B/16", seed=0, depth=4, **options).cuda().train()
        torch.nn.init.normal_(model.head.weight, std=0.03)
        parameters = list(model.parameters())
        exact, fused = (
            torch.autograd.grad(F.cross_entropy(function(images).float(), labels), parameters)
            for function in (model, FusedTraining(model))
        )
        flat = (torch.cat([each.flatten() for each in gradients]) for gradients in (fused, exact))
        found[f"gradients of B/16 with queries and keys {name}, fused"] = distance(*flat), 3e-2
    return found


def others() -> dict[str, tuple[float, float]]:
    found = {}
    images = torch.randn(4, 3, 224, 224, device="cuda")
    model = vitrail.create_model("B/16", seed=0).cuda()
    found["cut"] = (
        distance(cut_patches(images, 16, torch.float32), model.patch_embed.split_patches(images).flatten(0, 1)),
        0.0,
    )
    for form, function in ((1, lambda x: F.gelu(x, approximate="tanh")), (2, F.gelu)):
        before, dh = random(3000, 3072), random(3000, 3072)
        exact_before = before.double().requires_grad_()
        (exact,) = torch.autograd.grad(function(exact_before), exact_before, dh.double())
        total = gelu_backward(dh, before, form)
        found[f"gelu_backward {form}"] = distance(dh, exact), HALF
        found[f"gelu_backward {form}, sums"] = distance(total, exact.sum(0)), HALF
    return found


def models() -> dict[str, tuple[float, float]]:
    """The whole B/16: representations, and the gradients of all that is learned, against float32."""
    found = {}
    model = vitrail.create_model("B/16", seed=0).cuda()
    torch.nn.init.normal_(model.head.weight, std=0.03)
    images, labels = torch.randn(8, 3, 224, 224, device="cuda"), torch.arange(8, device="cuda")
    found["B/16 in fp32, as it is"] = optimize(model, precision="fp32").distance, 0.0
    with torch.no_grad():
        found["B/16 in fp32, compiled"] = distance(torch.compile(model)(images), model(images)), 1e-5
    for precision, most in (("bf16", 1e-2), ("fp8", 0.15)):
        fast = optimize(model, "throughput", precision, images=images)
        found[f"B/16 in {precision}"] = fast.distance, most
        found[f"B/16 in {precision}, recorded"] = optimize(model, "latency", precision, images=images).distance, most
    with torch.no_grad():
        exact = model.embed(images[:1])
    embedder = FusedEmbedder(model, tries_merging=True)
    with torch.inference_mode():
        passes = embedder.list_passes(embedder.embed_tokens(images[:1]))
    for name in ("apart", "joined"):
        embedder.passes[round_up_rows(embedder.tokens)] = passes[name]  # one that does not run here is not passed over
        found[f"B/16 in bf16, one image, sums and norms {name}"] = distance(embedder(images[:1]), exact), 1e-2
    fast = optimize(model, "latency", "bf16")
    results = [fast(images[:count].repeat(-(-count // len(images)), 1, 1, 1)[:count]) for count in (1, 2, 4, 64, 1)]
    found["B/16 in bf16, recorded, one image before and after others"] = distance(results[-1], results[0]), 0.0
    head = FusedHead(model.head.requires_grad_(False))
    found["few_rows, float32, the head"] = distance(head.run_kernel(exact), model.head(exact)), 1e-5
    model.head.requires_grad_(True)
    parameters = list(model.train().parameters())

    def gradients(logits: Tensor) -> Tensor:
        return torch.cat([each.flatten() for each in torch.autograd.grad(F.cross_entropy(logits, labels), parameters)])

    exact = gradients(model(images))
    with torch.autocast("cuda", torch.bfloat16):
        found["gradients of B/16 under autocast"] = distance(gradients(model(images)), exact), 3e-2
    found["gradients of B/16, fused"] = distance(gradients(FusedTraining(model)(images).float()), exact), 3e-2
    found["gradients of B/16, fused, FP8"] = (
        distance(gradients(FusedTraining(model, fp8=True)(images).float()), exact),
        0.3,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", help="some of norms, products, …, dropouts, models, random_models")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    checks = (
        *(norms, products, joined, attentions, short_attentions, rotations, gates, others, dropouts),
        *(encoders, models, random_models),
    )
    chosen = [check for check in checks if arguments.only is None or check.__name__ in arguments.only]
    found: dict[str, tuple[float, float]] = {}
    for check in chosen:
        try:
            checked = check()
        except Exception as error:  # the other checks are still worth running
            traceback.print_exc()
            checked = {f"{check.__name__}: {type(error).__name__}": (float("nan"), 0.0)}
        for name, (value, most) in checked.items():
            print(f"{value:9.1e}  at most {most:7.1e}  {'' if value <= most else 'TOO FAR'}  {name}", flush=True)
        found |= checked
        if arguments.out:
            about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": read_commit()}
            arguments.out.write_text(json.dumps({**about, "distances": found}, indent=1))
    sys.exit(any(not value <= most for value, most in found.values()))


if __name__ == "__main__":
    main()
