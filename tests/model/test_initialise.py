"""Initial values: the released code's, measured."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

import vitrail
from vitrail.model.initialise import initialise


@pytest.fixture(scope="module")
def model():
    return vitrail.create_model("S/16", representation_size=384, registers=4, seed=0)


def is_uniform(weight: torch.Tensor, bound: float) -> bool:
    """Within the bounds, reaching them, and flat between (Kolmogorov–Smirnov)."""
    values = weight.detach().flatten().double()
    inside = values.abs().max() <= bound and values.abs().max() > 0.99 * bound
    return bool(inside) and stats.kstest(values.numpy()[:20_000], "uniform", (-bound, 2 * bound)).pvalue > 1e-4


def is_lecun_normal(weight: torch.Tensor) -> bool:
    """Standard deviation √(1/fan_in) exactly, from a normal cut off at two of its own."""
    fan_in = weight[0].numel()
    std = math.sqrt(1 / fan_in)
    values = weight.detach().flatten().double()
    cut = 2 * std / 0.8796256610342398
    spread = 5 / math.sqrt(2 * values.numel())  # five standard errors
    return bool(values.abs().max() <= cut) and abs(values.std().item() / std - 1) < spread


def test_patch_projection_and_tanh_layer_are_lecun_normal(model):
    assert is_lecun_normal(model.patch_embed.projection.weight)
    assert is_lecun_normal(model.head.hidden.weight)
    assert (model.patch_embed.projection.bias == 0).all()
    assert (model.head.hidden.bias == 0).all()


def test_q_k_v_are_xavier_uniform_each_on_its_own_fan(model):
    bound = math.sqrt(6 / (384 + 384))
    for block in model.encoder.blocks:
        for part in block.attention.qkv.weight.chunk(3):
            assert is_uniform(part, bound)
        assert is_uniform(block.attention.out.weight, bound)
        assert (block.attention.qkv.bias == 0).all()
        assert (block.attention.out.bias == 0).all()


def test_mlp_is_xavier_uniform_with_tiny_biases(model):
    bound = math.sqrt(6 / (384 + 1536))
    biases = []
    for block in model.encoder.blocks:
        assert is_uniform(block.mlp.fc1.weight, bound)
        assert is_uniform(block.mlp.fc2.weight, bound)
        biases += [block.mlp.fc1.bias, block.mlp.fc2.bias]
    values = torch.cat(biases).detach().double()
    assert values.std().item() == pytest.approx(1e-6, rel=0.05)
    assert abs(values.mean().item()) < 5e-8


def test_tokens_positions_norms_and_head(model):
    assert (model.class_token == 0).all()
    table = model.position_embedding[0].table.detach().double()
    assert table.std().item() == pytest.approx(0.02, rel=0.02)
    assert stats.kstest(table.flatten().numpy()[:20_000], "norm", (0, 0.02)).pvalue > 1e-4
    assert model.registers.detach().double().std().item() == pytest.approx(0.02, rel=0.1)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
            assert module.eps == 1e-6
    assert (model.head.linear.weight == 0).all()
    assert (model.head.linear.bias == 0).all()


def test_head_bias_and_layer_scale():
    model = vitrail.create_model("Ti/16", head_bias=-10.0, layer_scale=1e-4)
    assert (model.head.bias == -10).all()
    assert (model.encoder.blocks[0].scale1.factor == 1e-4).all()
    assert (model.encoder.blocks[11].scale2.factor == 1e-4).all()


def test_attention_pooling():
    model = vitrail.create_model("S/16", pool="attention", seed=0)
    assert model.pool.query.abs().max() <= math.sqrt(6 / (1 + 384))
    assert model.pool.query.abs().max() > 0.9 * math.sqrt(6 / (1 + 384))
    for part in (model.pool.q.weight, *model.pool.kv.weight.chunk(2), model.pool.out.weight):
        assert is_uniform(part, math.sqrt(6 / 768))


def test_residual_units_of_a_hybrid_start_as_the_identity_and_bits_do_not():
    hybrid = vitrail.create_model("R26+S/32", seed=0)
    for unit in hybrid.backbone.units:
        assert (unit.norm3.weight == 0).all()
        assert (unit.norm1.weight == 1).all()
    assert is_lecun_normal(hybrid.backbone.root.weight)
    bit = vitrail.create_model("BiT-R50x1", seed=0)
    assert all((p == 1).all() for name, p in bit.named_parameters() if "norm" in name and name.endswith("weight"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Ti/16", {"registers": 2, "layer_scale": 0.1, "representation_size": 9, "pool": "attention"}),
        ("Ti/16", {"position": "learned-2d", "position_at": "every-layer"}),
        ("Ti/16", {"position": "relative", "norm": "rms", "input_norm": True, "norm_after_pool": True}),
        ("Ti/16", {"position": "sin-cos", "pool": "average", "block": "axial"}),
        ("Ti/16", {"conv_stem": [(32, 3, 4), (64, 3, 4, "group")]}),
        pytest.param("R26+S/32", {}, marks=pytest.mark.slow),
        pytest.param("BiT-R50x1", {}, marks=pytest.mark.slow),
    ],
)
def test_every_value_is_initialised(name, options):
    model = vitrail.create_model(name, **options)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
    initialise(model)
    left = [name for name, tensor in model.state_dict().items() if tensor.isnan().any()]
    assert left == []


def test_a_seed_gives_the_same_weights_every_time_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = vitrail.create_model("Ti/16", seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    second = vitrail.create_model("Ti/16", seed=3).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    third = vitrail.create_model("Ti/16", seed=4).state_dict()
    assert not torch.equal(first["patch_embed.projection.weight"], third["patch_embed.projection.weight"])


def test_the_global_seed_gives_the_same_weights_too():
    torch.manual_seed(5)
    first = vitrail.create_model("Ti/16").state_dict()
    torch.manual_seed(5)
    second = vitrail.create_model("Ti/16").state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_model_built_from_its_class_is_initialised_too():
    from vitrail.model.variants import make_architecture
    from vitrail.model.vit import VisionTransformer

    model = VisionTransformer(make_architecture("Ti/16", depth=1))
    assert is_uniform(model.encoder.blocks[0].attention.out.weight, math.sqrt(6 / 384))
