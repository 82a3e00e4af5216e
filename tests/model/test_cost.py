"""Sizes: exact parameters, and costs counted from the architecture against the built model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import vitrail
from vitrail.model.cost import compute_cost, count_tokens
from vitrail.model.create import build_empty_model
from vitrail.model.variants import LISTED_NAMES, make_architecture

PARAMETERS = {
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/16": 304_326_632,
    "L/32": 306_535_400,
    "H/14": 632_045_800,
    "R50+B/16": 98_659_112,
    "R50+L/32": 328_994_856,
    "R26+S/32": 36_431_912,
    "BiT-R50x1": 25_549_352,
    "BiT-R101x1": 44_541_480,
    "BiT-R152x2": 236_335_208,
    "BiT-R152x4": 936_533_224,
}


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "expected"), PARAMETERS.items())
def test_parameters_with_1000_classes(name, expected):
    assert parameters(vitrail.create_model(name, device="meta")) == expected


@pytest.mark.parametrize("patch", [16, 32])
def test_parameters_of_b(patch):
    """Summed by hand: a block has 4 matrices of D × D and 2 of D × M with their biases, and two norms."""
    depth, width, mlp, classes, tokens = 12, 384, 1536, 1000, (224 // patch) ** 2 + 1
    block = 4 * (width**2 + width) + 2 * width * mlp + mlp + width + 4 * width
    ends = (3 * patch**2 + 1) * width + width + tokens * width + 2 * width + (width + 1) * classes
    model = vitrail.create_model(f"b/{patch}", device="meta")
    assert parameters(model) == depth * block + ends
    assert 22e6 < parameters(model) < 23e6


def test_parameters_of_a_hybrid_at_384():
    assert parameters(vitrail.create_model("R50+B/16", image_size=384, device="meta")) == 98_950_952


def counted(model: torch.nn.Module) -> int:
    """Operations of one forward pass, counted by torch as they run (on the meta device, so in no time)."""
    with FlopCounterMode(display=False) as counter:
        model.eval()(torch.empty(1, model.in_channels, *model.image_size, device="meta"))
    return counter.get_total_flops()


QUICK = ("S/16", "B/16", "L/16", "R50+B/16", "R26+S/32", "BiT-R50x1")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LISTED_NAMES])
def test_cost_of_every_listed_model(name):
    arch = make_architecture(name)
    model = build_empty_model(arch)
    assert compute_cost(arch) == (parameters(model), counted(model))


@st.composite
def vit_options(draw):
    """Any combination of options that the architecture allows."""
    choose = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    stem = choose(None, None, [(32, 3, 2, "group", "gelu"), (16, 4, 2, "none", "none"), (8, 5, 2)])
    return {
        "image_size": (8 * choose(1, 2, 3), 8 * choose(1, 2, 4)),
        "in_channels": choose(1, 3, 4),
        "num_classes": choose(0, 5),
        "width": 16 * choose(1, 2),
        "num_heads": choose(1, 2, 4),
        "mlp_dim": choose(8, 24),
        "depth": choose(1, 3),
        "pool": choose("class", "average", "attention", "class+average", "distilled"),
        "class_token": choose(None, True),
        "registers": choose(0, 2),
        "position": choose("none", "learned-1d", "learned-2d", "relative", "sin-cos"),
        "position_at": choose("input", "every-layer", "shared"),
        "position_prefix": choose("class", "all", "none"),
        "block": choose("plain", "plain", "axial"),
        "representation_size": choose(None, 12),
        "conv_stem": stem,
        "layer_scale": choose(None, 0.1),
        "norm": choose("layer", "rms"),
        "gelu": choose("tanh", "exact", "quick"),
        "input_norm": choose(False, True),
        "norm_after_pool": choose(False, True),
        "qkv_bias": choose(True, False),
        "patch_bias": choose(True, True, False) if stem is None else True,
    }


@pytest.mark.slow
@given(options=vit_options())
@settings(max_examples=50, deadline=None)
def test_cost_and_shapes_of_any_combination(options):
    try:
        arch = make_architecture("S/8", **options)
    except vitrail.ConfigError:
        assume(False)
    model = build_empty_model(arch)
    assert compute_cost(arch) == (parameters(model), counted(model))
    batch = torch.empty(2, model.in_channels, *model.image_size, device="meta")
    assert model.forward_features(batch).shape == (2, count_tokens(arch), arch.width)
    assert model.embed(batch).shape == (2, arch.representation_width)
    assert model(batch).shape == (2, arch.num_classes or arch.representation_size or arch.representation_width)


SMALL_ROOTS = [
    ("BiT-R26x1", {"root": "small", "image_size": 32}),
    ("BiT-R14x1", {"root": "small", "stage_channels": 32, "image_size": (33, 47)}),
    ("BiT-R14x2", {"stage_channels": 96, "blocks": (1, 2), "image_size": 64}),
    ("R26+Ti/16", {"root": "small", "image_size": (32, 48), "depth": 4}),
    ("R14+Ti/32", {"root": "small", "stage_channels": 32, "patch_size": 2, "image_size": 32, "depth": 2}),
]


@pytest.mark.parametrize(
    ("name", "options"),
    [("R26+S/32", {"patch_size": 2, "image_size": (64, 128)}), ("BiT-R50x1", {"image_size": (33, 47)}), *SMALL_ROOTS],
)
def test_cost_of_unusual_sizes(name, options):
    arch = make_architecture(name, **options)
    model = build_empty_model(arch)
    assert compute_cost(arch) == (parameters(model), counted(model))


# Table 6 of the paper: pre-training on JFT-300M; epochs and exaFLOPs.
TABLE_6 = {
    "B/32": (7, 55),
    "B/16": (7, 224),
    "L/32": (7, 196),
    "L/16": (7, 783),
    "H/14": (14, 4262),
    "BiT-R50x1": (7, 50),
    "BiT-R50x2": (7, 199),
    "BiT-R101x1": (7, 96),
    "BiT-R152x1": (7, 141),
    "BiT-R152x2": (7, 563),
    "BiT-R200x3": (14, 3306),
    "R50+B/32": (7, 106),
    "R50+B/16": (7, 274),
    "R50+L/32": (7, 246),
    "R50+L/16": (7, 859),
}


@pytest.mark.parametrize(("name", "epochs", "exaflops"), [(n, *v) for n, v in TABLE_6.items()])
def test_table_6_follows_from_the_count(name, epochs, exaflops):
    """303M images, backward twice the forward pass. Within 5%: how the authors counted small layers is not known."""
    head = 18_291  # classes of JFT
    total = 303e6 * epochs * 3 * compute_cost(make_architecture(name, num_classes=head)).flops / 1e18
    assert total == pytest.approx(exaflops, rel=0.05)
