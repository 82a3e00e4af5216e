"""The parts of later encoders (DINOv3, EVA-02, BEiT, AIMv2, Perception Encoder): against loops, and in every use."""

from __future__ import annotations

import hashlib
import json

import block_loops
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import vitrail
from samples import SMALL, images, randomise, small_vit
from vitrail.config import Config
from vitrail.model.architecture import Rotary, VitArchitecture
from vitrail.model.attention import SelfAttention
from vitrail.model.cost import compute_cost
from vitrail.model.create import build_empty_model, copy_model, share_model
from vitrail.objectives.classification import Classification
from vitrail.training.optim import find_encoder_matrices, find_kernels

EVA = {"coordinates": "index", "base": 10_000.0, "layout": "pairs", "reference_grid": (4, 4)}
PE = {"coordinates": "index", "base": 10_000.0, "layout": "pairs", "offset": 1.0, "first": "column"}
MIXED = {"coordinates": "index", "base": 10.0, "layout": "pairs", "first": "column", "learned": True}
PARTS = {
    "dinov3": {"rotary": {}, "position": "none", "registers": 2, "key_bias": False, "mlp": "swiglu"},
    "eva-02": {"rotary": EVA, "mlp": "swiglu", "mlp_norm": True, "attention_norm": True, "key_bias": False},
    "eva-02 halves": {"rotary": {**EVA, "layout": "halves", "reference_grid": (3, 5)}},
    "perception encoder": {"rotary": {**PE, "reference_grid": (2, 3)}, "input_norm": True},
    "perception encoder, free": {"rotary": PE, "pool": "average"},
    "mixed": {"rotary": MIXED},
    "mixed by row": {"rotary": {**MIXED, "first": "row", "layout": "halves"}, "registers": 1},
    "beit": {"position": "relative-bias", "position_at": "every-layer", "key_bias": False},
    "beit shared": {"position": "relative-bias", "position_at": "shared", "pool": "average", "class_token": True},
    "relative bias without a class token": {"position": "relative-bias", "position_at": "shared", "pool": "average"},
    "bias and rotary": {"position": "relative-bias", "position_at": "every-layer", "rotary": {}},
    "aimv2": {
        "norm": "rms",
        "patch_norm": True,
        "mlp": "swiglu",
        "mlp_bias": False,
        "out_bias": False,
        "qkv_bias": False,
    },
    "query and key norms": {"qk_norm": True},
    "rms query and key norms": {"qk_norm": True, "norm": "rms", "rotary": {}},
    "norms behind": {"norm_at": "after", "final_norm": False},
    "norms behind, mlp norm": {"norm_at": "after", "mlp_norm": True},
}
each_part = pytest.mark.parametrize("options", PARTS.values(), ids=PARTS.keys())


@each_part
@pytest.mark.parametrize("trained_on", ["own", "another"])
def test_encoder_and_attention_maps_are_those_of_loops(options, trained_on):
    model = small_vit(dtype=torch.float64, **options)
    grid = (2, 3)
    if trained_on == "another":
        if options.get("position") == "relative-bias":
            model.resize((24, 16))  # tables of this very grid: the reference does not interpolate
        grid = (3, 2)
    batch = images(1, size=(8 * grid[0], 8 * grid[1]), dtype=torch.float64)
    entered: list[torch.Tensor] = []
    hook = model.encoder.register_forward_pre_hook(lambda module, arguments: entered.append(arguments[0]))
    with vitrail.record_attention(model) as maps:
        encoded = model.forward_features(batch)
    hook.remove()
    expected, expected_maps = block_loops.encode(model, entered[0][0].detach().numpy(), grid)
    np.testing.assert_allclose(encoded[0].detach().numpy(), expected, rtol=0, atol=1e-10)
    for layer, weights in enumerate(expected_maps):
        np.testing.assert_allclose(maps[layer][0].numpy(), weights, rtol=0, atol=1e-10)


@each_part
def test_every_parameter_matters_and_its_gradient_is_right(options):
    """The gradient along a random direction is that of two forward passes, and no parameter has a gradient of zero."""
    model = small_vit(dtype=torch.float64, **options)
    batch, generator = images(1, dtype=torch.float64), torch.Generator().manual_seed(2)
    y = model.embed(batch)
    weights = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad((y * weights).sum(), [p for n, p in model.named_parameters() if "head" not in n])
    for gradient, (name, parameter) in zip(gradients, model.named_parameters(), strict=False):
        # The same number for all keys cancels in the softmax, unless rotations make it another one for each key.
        cancels = name.endswith("k_norm.bias") and model.rotary is None
        assert (gradient.abs().max() > 1e-12) != cancels, name
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            ends = []
            for step in (1e-5, -1e-5):
                parameter.add_(direction, alpha=step)
                ends.append(float((model.embed(batch) * weights).sum()))
                parameter.sub_(direction, alpha=step)
        slope, expected = (ends[0] - ends[1]) / 2e-5, float((gradient * direction).sum())
        assert slope == pytest.approx(expected, rel=1e-5, abs=1e-7), name


@each_part
def test_cost_is_counted_exactly(options):
    model = build_empty_model(vitrail.create_model("S/8", **{**SMALL, **options}, device="meta").architecture)
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, 16, 24, device="meta"))
    cost = compute_cost(model.architecture)
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert cost.flops == counter.get_total_flops()


@pytest.mark.slow
@each_part
def test_checkpointing_compiling_and_layers_change_nothing(options):
    model, batch = small_vit(dtype=torch.float64, **options), images(dtype=torch.float64)
    expected = model(batch)
    last = model.intermediate_layers(batch, [-1], norm=True)[0]
    torch.testing.assert_close(last, model.forward_features(batch), rtol=0, atol=0)
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()), allow_unused=True)
    model.train().set_gradient_checkpointing()
    again = model(batch)
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-12)
    for first, second in zip(gradients, torch.autograd.grad(again.sum(), list(model.parameters())), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-10)
    torch._dynamo.reset()  # the models of other tests count towards its limit
    compiled = torch.compile(model.eval(), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(batch), expected, rtol=0, atol=1e-12)


@each_part
def test_copies_moves_and_files_keep_the_function(options, tmp_path):
    model, batch = small_vit(dtype=torch.float64, **options), images(dtype=torch.float64)
    expected = model(batch)
    for copied in (copy_model(model), share_model(model)):
        assert torch.equal(copied(batch), expected)
    single = share_model(model).float()
    torch.testing.assert_close(single(batch.float()).double(), expected, rtol=0, atol=2e-4)
    assert torch.equal(copy_model(small_vit(**options)).double()(batch), small_vit(**options).double()(batch))
    vitrail.save(single, tmp_path)
    loaded = vitrail.load(tmp_path)
    assert loaded.architecture == model.architecture
    assert torch.equal(loaded(batch.float()), single(batch.float()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dinov3", "eva-02", "perception encoder", "perception encoder, free", "mixed", "beit"]
)
def test_export_with_sizes_that_are_not_known_yet(name):
    model = small_vit(**PARTS[name])
    rows, columns = (8 * torch.export.Dim(side, min=2) for side in ("rows", "columns"))
    shapes = ({0: torch.export.Dim("batch"), 2: rows, 3: columns},)
    program = torch.export.export(model, (images(size=(40, 32)),), dynamic_shapes=shapes).module()
    for size in ((16, 24), (48, 16), (56, 64)):
        batch = images(3, size=size)
        torch.testing.assert_close(program(batch), model(batch), rtol=0, atol=2e-5)


def test_a_config_file_of_old_loads_unchanged(tmp_path):
    """Files that were written before these options existed name none of them."""
    model = small_vit()
    vitrail.save(model, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    new = ["rotary", "mlp", "mlp_norm", "attention_norm", "qk_norm", "key_bias", "out_bias", "mlp_bias", "patch_norm"]
    new += ["norm_at", "final_norm", "pool_heads", "pool_mlp_dim", "pool_prefix"]
    removed = [name for name in new if config["architecture"].pop(name, None) is not None]
    assert "mlp" in removed
    sums, before = tmp_path / "SHA256SUMS", hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_text(json.dumps(config))
    sums.write_text(sums.read_text().replace(before, hashlib.sha256(path.read_bytes()).hexdigest()))
    loaded = vitrail.load(tmp_path)
    assert loaded.architecture == model.architecture
    assert torch.equal(loaded(images()), model(images()))


def test_names_of_existing_models_stay():
    block = ["norm1.weight", "norm1.bias", "attention.qkv.weight", "attention.qkv.bias", "attention.out.weight"]
    block += ["attention.out.bias", "norm2.weight", "norm2.bias", "mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight"]
    block += ["mlp.fc2.bias"]
    expected = ["class_token", "patch_embed.projection.weight", "patch_embed.projection.bias"]
    expected += ["position_embedding.0.table", *[f"encoder.blocks.{i}.{name}" for i in (0, 1) for name in block]]
    expected += ["encoder.norm.weight", "encoder.norm.bias", "head.weight", "head.bias"]
    assert list(small_vit().state_dict()) == expected


def test_attention_pooling_with_its_own_heads_and_width():
    options = {"pool": "attention", "class_token": True, "pool_heads": 8, "pool_mlp_dim": 40}
    model, batch = small_vit(dtype=torch.float64, **options), images(dtype=torch.float64)
    assert model.pool.mlp.fc1.out_features == 40
    features = model.forward_features(batch)
    query = model.pool.q(model.pool.query)[0].view(8, 4)
    keys, values = model.pool.kv(features).view(2, 7, 2, 8, 4).unbind(2)
    for reads_all in (False, True):
        reader = small_vit(dtype=torch.float64, pool_prefix=reads_all, **options)
        start = 0 if reads_all else 1
        mixed = torch.zeros(2, 32, dtype=torch.float64)
        for image in range(2):
            for head in range(8):
                shares = (keys[image, start:, head] @ query[head] / 2).softmax(0)
                mixed[image, 4 * head : 4 * head + 4] = shares @ values[image, start:, head]
                torch.testing.assert_close(reader.pool.weights(features)[image, head], shares, rtol=0, atol=1e-12)
        y = model.pool.out(mixed)
        expected = y + model.pool.mlp(model.pool.norm(y))
        torch.testing.assert_close(reader.pool_features(features), expected, rtol=0, atol=1e-12)
        with FlopCounterMode(display=False) as counter:
            build_empty_model(reader.architecture)(torch.empty(1, 3, 16, 24, device="meta"))
        assert compute_cost(reader.architecture).flops == counter.get_total_flops()
        assert vitrail.inspection.attention_rollout(reader, batch).shape[0] == 2


def test_only_kernels_are_decayed_and_matrices_counted_for_muon():
    options = {**PARTS["eva-02"], "rotary": MIXED, "qk_norm": True, "patch_norm": True}
    objective = Classification(small_vit(**options))
    kernels = {name.removeprefix("model.") for name in find_kernels(objective)}
    dense = ("attention.qkv", "attention.out", "mlp.fc1", "mlp.fc2")
    blocks = {f"encoder.blocks.{i}.{layer}.weight" for i in (0, 1) for layer in dense}
    assert kernels == {"patch_embed.projection.weight", "head.weight", *blocks}
    assert sorted(find_encoder_matrices(objective).values()) == [1, 1, 1, 1, 2, 2, 3, 3]


def test_initial_values():
    model = vitrail.create_model(
        "S/8", **{**SMALL, **PARTS["eva-02"], "rotary": MIXED, "width": 64, "mlp_dim": 96}, seed=0
    )
    block = model.encoder.blocks[0]
    assert not block.attention.q_bias.any()
    assert not block.attention.v_bias.any()
    assert torch.equal(block.mlp.norm.weight, torch.ones(96))
    limit = (6 / (64 + 96)) ** 0.5  # of each half on its own fan
    assert 0.98 * limit < block.mlp.fc1.weight.abs().max() <= limit
    sizes = model.rotary.frequencies.square().sum(0).sqrt()  # L, H, d/2: both directions of one head have these lengths
    expected = 10.0 ** -(torch.arange(4) / 4)
    torch.testing.assert_close(sizes, torch.cat([expected, expected]).expand(2, 4, 8))
    turned = model.rotary.frequencies.unflatten(-1, (2, 4))
    assert torch.einsum("alhi,alhi->lhi", turned[..., 0, :], turned[..., 1, :]).abs().max() < 1e-6
    again = vitrail.create_model("S/8", **{**SMALL, "rotary": MIXED}, seed=0).rotary.frequencies
    assert torch.equal(again, vitrail.create_model("S/8", **{**SMALL, "rotary": MIXED}, seed=0).rotary.frequencies)
    biased = vitrail.create_model("S/8", **{**SMALL, **PARTS["beit"]}, seed=0)
    assert not biased.encoder.blocks[1].attention.relative_bias.table.any()


REFUSED = [
    ({"rotary": {}, "block": "axial", "pool": "average"}, "axial"),
    ({"position": "relative-bias", "position_at": "shared", "block": "axial", "pool": "average"}, "axial"),
    ({"position": "relative-bias"}, "position_at"),
    ({"position": "relative-bias", "position_at": "shared", "registers": 1}, "registers"),
    ({"rotary": {}, "num_heads": 16}, "divisible by 4"),
    ({"rotary": {"learned": True}}, "index"),
    ({"rotary": {"coordinates": "index", "rescale": 2.0}}, "unit"),
    ({"rotary": {"offset": 1.0}}, "index"),
    ({"rotary": {"jitter": 0.5}}, "jitter"),
    ({"rotary": {"base": 0.0}}, "base"),
    ({"rotary": {"theta": 3.0}}, "theta"),
    ({"key_bias": False, "qkv_bias": False}, "key_bias"),
    ({"final_norm": False, "norm_after_pool": True}, "final_norm"),
    ({"pool_heads": 4}, "attention"),
    ({"pool": "attention", "pool_heads": 5}, "pool_heads"),
    ({"mlp": "relu"}, "mlp"),
]


@pytest.mark.parametrize(("options", "word"), REFUSED)
def test_what_has_no_meaning_is_refused(options, word):
    with pytest.raises(vitrail.ConfigError, match=word):
        vitrail.create_model("S/8", **{**SMALL, **options}, device="meta")


def test_a_rotary_may_be_given_as_a_config_or_as_a_dict():
    options = {"coordinates": "index", "base": 50.0}
    first, second = (
        vitrail.create_model("S/8", **SMALL, rotary=each, device="meta") for each in (options, Rotary(**options))
    )
    assert first.architecture == second.architecture
    assert isinstance(first.architecture.rotary, Config)
    assert VitArchitecture(**json.loads(first.architecture.model_dump_json())) == first.architecture


def test_attention_with_a_relative_bias_alone_asks_for_its_grid():
    attention = small_vit(**PARTS["beit"]).encoder.blocks[0].attention
    assert isinstance(attention, SelfAttention)
    with pytest.raises(ValueError, match="grid"):
        attention(torch.zeros(1, 7, 32))


def test_autocast_keeps_positions_exact_enough():
    """bf16 products, but angles in float32: a far patch is turned by an angle whose error is not multiplied by 40."""
    model = randomise(
        vitrail.create_model("S/8", **{**SMALL, "image_size": (16, 320), "rotary": MIXED, "qk_norm": True})
    )
    batch = images(size=(16, 320))
    plain = model.rotary(model.grid, batch)[1]
    with torch.autocast("cpu", torch.float16):
        rotation = model.rotary(model.grid, batch.half())[1]
        turned = rotation(batch.new_ones(1, 4, 81, 8, dtype=torch.float16))
    assert torch.equal(plain.cos, rotation.cos)
    assert rotation.sin.dtype == torch.float32
    assert turned.dtype == torch.float16
