"""Gradients of rotated and normed heads and of SwiGLU, in Triton's interpreter, against the plain layers in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import vitrail

pytest.importorskip("triton", reason="Triton, in whose interpreter the kernels run, is not installed")
if torch.cuda.is_available():
    pytest.skip("here is a GPU: benchmarks/kernel_check.py checks the kernels there", allow_module_level=True)

from encoders import INDEX, SMALL, UNIT, small_encoder
from samples import images, randomise
from vitrail.errors import NotApplicableError
from vitrail.fast.gpu.encoder_gradients import SwigluProducts, TransformedAttention
from vitrail.fast.gpu.fused_heads import select_angles
from vitrail.fast.gpu.kernels.product import Tiling, pack_rotation, product
from vitrail.fast.gpu.kernels.rotate import HeadTransform, transform_heads, transform_heads_backward
from vitrail.fast.gpu.kernels.swiglu import apply_swiglu, swiglu_backward
from vitrail.fast.gpu.training import FusedTraining
from vitrail.fast.timing import relative_distance
from vitrail.model.mlp import SwigluBlock
from vitrail.model.rotary import Rotation

TOKENS, HEADS, WIDTH = 5, 3, 12


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make_transform(norm, tables, paired):
    """A transform of random angles and weights, and the same of plain tensors in float64."""
    angles = torch.randn(max(tables, 1), TOKENS, WIDTH // 2)
    weights = [torch.randn(WIDTH) if norm == "layer" or (norm == "rms" and i % 2 == 0) else None for i in range(4)]
    cos, sin = (angles.cos(), angles.sin()) if tables else (None, None)
    transform = HeadTransform(HEADS, WIDTH, cos, sin, paired, *weights, 1e-5)
    whole = angles.double().repeat_interleave(2, -1) if paired else torch.cat([angles, angles], -1).double()
    rotation = Rotation(whole.cos(), whole.sin(), "pairs" if paired else "halves")
    exact = [None if each is None else each.double().requires_grad_() for each in weights]

    def apply(qkv):
        q, k, v = qkv.view(-1, TOKENS, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
        if norm == "layer":
            q, k = F.layer_norm(q, (WIDTH,), *exact[:2], 1e-5), F.layer_norm(k, (WIDTH,), *exact[2:], 1e-5)
        if norm == "rms":
            q, k = F.rms_norm(q, (WIDTH,), exact[0], 1e-5), F.rms_norm(k, (WIDTH,), exact[2], 1e-5)
        q, k = (rotation(q), rotation(k)) if tables else (q, k)
        return torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).reshape(qkv.shape)

    return transform, apply, exact


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(
    ("norm", "tables"),
    [(None, 1), ("rms", HEADS), slow("layer", 0), slow("rms", 1), slow("layer", 1), slow(None, HEADS)],
)
def test_heads(norm, tables, paired):
    transform, apply, parameters = make_transform(norm, tables, paired)
    qkv = torch.randn(2 * TOKENS, 3 * HEADS * WIDTH)
    exact = qkv.double().requires_grad_()
    expected = apply(exact)
    parameters = [each for each in parameters if each is not None]
    dy = torch.randn_like(qkv)
    gradients = torch.autograd.grad(expected, [exact, *parameters], dy.double())
    apart = transform_heads(qkv, transform, out=torch.full_like(qkv, torch.nan))
    both = 2 * HEADS * WIDTH
    assert relative_distance(apart[:, :both], expected.detach()[:, :both]) < 1e-6
    assert apart[:, both:].isnan().all(), "values are not touched"
    found = transform_heads_backward(dy, qkv, transform)
    assert relative_distance(dy, gradients[0]) < 1e-6
    assert relative_distance(found.bias, gradients[0][:, :both].sum(0)) < 1e-6
    names = {"layer": ("q_weight", "q_bias", "k_weight", "k_bias"), "rms": ("q_weight", "k_weight")}.get(norm, ())
    for name, reference in zip(names, gradients[1:], strict=True):
        assert relative_distance(getattr(found, name), reference) < 1e-6, name
    assert relative_distance(transform_heads(qkv.clone(), transform), expected.detach()) < 1e-6


def test_keys_alone():
    transform, apply, _ = make_transform("layer", HEADS, True)
    qkv = torch.randn(2 * TOKENS, 3 * HEADS * WIDTH)
    first = HEADS * WIDTH
    found = transform_heads(qkv[:, first:].contiguous(), transform, queries=False)
    assert relative_distance(found, apply(qkv.double())[:, first:].detach()) < 1e-6


@pytest.mark.parametrize("tiling", [Tiling(16, 32, 16, 4, 2), Tiling(16, 64, 16, 4, 2, parts=2)])
@pytest.mark.parametrize("tables", [1, HEADS])
def test_a_product_turns_queries_and_keys(tiling, tables):
    transform, apply, _ = make_transform(None, tables, True)
    x, w, bias = torch.randn(2 * TOKENS, 16), torch.randn(3 * HEADS * WIDTH, 16), torch.randn(3 * HEADS * WIDTH)
    rotation = pack_rotation(transform.cos, transform.sin, 2 * HEADS * WIDTH)
    found = product(x, w, bias, tiling, rotation=rotation, dtype=torch.float32)
    expected = apply(F.linear(x.double(), w.double(), bias.double()))
    assert relative_distance(found, expected) < 3e-4  # the angles are fp16
    assert relative_distance(found[:, 2 * HEADS * WIDTH :], expected[:, 2 * HEADS * WIDTH :]) < 1e-6


@pytest.mark.parametrize("tiling", [Tiling(16, 32, 16, 4, 2), Tiling(16, 64, 16, 4, 2, parts=2)])
def test_a_product_applies_swiglu(tiling):
    x, w, bias = torch.randn(21, 16), torch.randn(2, 48, 16), torch.randn(2, 48)
    gate, value = (F.linear(x.double(), w[i].double(), bias[i].double()) for i in range(2))
    weight, shift = w.transpose(0, 1).reshape(96, 16), bias.t().reshape(96)
    found = product(x, weight, shift, tiling, form=4, dtype=torch.float32)
    assert relative_distance(found, F.silu(gate) * value) < 1e-6
    scale = torch.tensor(0.5)
    found8 = product(x, weight, shift, tiling, form=4, out_scale=scale)
    assert relative_distance(found8.float() * scale, F.silu(gate) * value) < 0.06


def test_swiglu():
    x, dy = torch.randn(7, 600), torch.randn(7, 300)
    exact = x.double().requires_grad_()
    gate, value = exact.chunk(2, 1)
    expected = F.silu(gate) * value
    (gradient,) = torch.autograd.grad(expected, exact, dy.double())
    interleaved = torch.stack(x.chunk(2, 1), -1).flatten(1)
    assert relative_distance(apply_swiglu(x, interleaved=False), expected.detach()) < 1e-6
    assert relative_distance(apply_swiglu(interleaved, interleaved=True), expected.detach()) < 1e-6
    dx, total = swiglu_backward(dy, x)
    assert relative_distance(dx, gradient) < 1e-6
    assert relative_distance(total, gradient.sum(0)) < 1e-6


def compare_gradients(found, parameters, expected, references, dy):
    """Outputs and gradients in float32 are those of float64; parameters that are None have no gradient."""
    found.backward(dy)
    expected.backward(dy.double())
    assert relative_distance(found.detach(), expected.detach().view(found.shape)) < 1e-5
    for parameter, reference in zip(parameters, references, strict=True):
        assert relative_distance(parameter.grad, reference.grad) < 1e-5


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        slow("dinov3", {"qkv_bias": False, "key_bias": True}),
        slow("query and key norms", {}),
        ("dinov3", {"rotary": UNIT, "qk_norm": True, "key_bias": True}),
        slow("dinov3", {"rotary": INDEX, "qk_norm": True, "key_bias": True, "norm": "rms"}),
    ],
)
def test_attention(kind, options):
    model = small_encoder(kind, image_size=(8, 12), **options)
    attention = model.encoder.blocks[0].attention
    model64 = small_encoder(kind, image_size=(8, 12), **options).double()
    plain, places = model64.encoder.blocks[0].attention, model64._find_places((2, 3), torch.zeros(1).double())
    plain.out = torch.nn.Identity()
    tokens = model.prefix + 6
    transform = HeadTransform(2, 16, eps=model.architecture.norm_eps)
    if places:
        rotation = model.rotary((2, 3), torch.zeros(1))[0]
        cos, sin = (select_angles(each, rotation.layout) for each in (rotation.cos, rotation.sin))
        transform = transform._replace(cos=cos, sin=sin, paired=rotation.layout == "pairs")
    x = (2 * torch.randn(2 * tokens, 32)).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    norms = [getattr(norm, name, None) for norm in (attention.q_norm, attention.k_norm) for name in ("weight", "bias")]
    found = TransformedAttention.apply(x, attention.qkv.weight, attention.qkv.bias, *norms, transform, (2, tokens, 2))
    expected = plain(x64.view(2, tokens, 32), *places[:1])
    names = [name for name, _ in attention.named_parameters() if not name.startswith("out")]
    parameters, references = dict(attention.named_parameters()), dict(plain.named_parameters())
    dy = torch.randn_like(found)
    compare_gradients(
        found, [x, *(parameters[name] for name in names)],
        expected.view(2 * tokens, 32), [x64, *(references[name] for name in names)], dy,
    )  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
def test_the_mlp_with_swiglu(bias):
    mlp, plain = (randomise(SwigluBlock(16, 24, bias=bias)) for _ in range(2))
    plain.double()
    x = torch.randn(9, 16).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    found = SwigluProducts.apply(x, mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight)
    expected = plain(x64) - (plain.fc2.bias.detach() if bias else 0)
    parameters = [x, mlp.fc1.weight, mlp.fc2.weight, *([mlp.fc1.bias] if bias else [])]
    references = [x64, plain.fc1.weight, plain.fc2.weight, *([plain.fc1.bias] if bias else [])]
    compare_gradients(found, parameters, expected, references, torch.randn_like(found))


@pytest.mark.parametrize(
    "options",
    [
        {"rotary": UNIT, "qk_norm": True},
        slow({"rotary": INDEX, "position": "none", "registers": 2, "key_bias": False}),
        slow({"qkv_bias": False, "rotary": UNIT, "pool": "average", "class_token": True}),
        slow({"qk_norm": True}),
        slow({"key_bias": False}),
    ],
)
def test_training(options):
    """Of a whole model, with every parameter's gradient."""
    model = randomise(vitrail.create_model("Ti/4", **{**SMALL, "image_size": (8, 12), **options})).train()
    exact = copy.deepcopy(model).double()
    batch, labels = images(2, (8, 12)), torch.tensor([0, 3])
    expected = exact(batch.double())
    F.cross_entropy(expected, labels).backward()
    found = FusedTraining(model, dtype=torch.float32)(batch)
    F.cross_entropy(found, labels).backward()
    assert relative_distance(found.detach(), expected.detach()) < 1e-5
    for (name, parameter), reference in zip(model.named_parameters(), exact.parameters(), strict=True):
        off = (parameter.grad.double() - reference.grad).norm()
        assert off < 2e-5 * reference.grad.norm() + 1e-7, name  # some are 0, such as that of a norm's bias on keys


def test_learned_frequencies_are_not_trained_so():
    with pytest.raises(NotApplicableError, match="learned rotary positions"):
        FusedTraining(small_encoder("mixed rope"))
