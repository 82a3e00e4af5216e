"""The rates of the parameters of later encoders with layer-wise decay, and which of them weight decay shrinks."""

from __future__ import annotations

import re

import numpy as np
import pytest

from encoders import ENCODERS, small_encoder, small_hybrid
from vitrail.model.encoder import StochasticDepth
from vitrail.objectives.classification import Classification
from vitrail.training.optim import find_layers, group_parameters

BLOCKS = 2
BELOW = r"model\.(patch_embed|patch_norm|class_token|registers|position_embedding|rotary|relative_bias|input_norm)\b"
AFTER = r"model\.(encoder\.norm|pool|pool_norm|head)\."
KERNEL = r".*\.(qkv|out|fc1|fc2|q|kv|projection|head)\.weight"


def groups_by_name(model) -> dict[str, tuple[float, float]]:
    """By parameter: how often the factor was applied to its rate, and its weight decay."""
    built = Classification(model)
    names = {id(parameter): name for name, parameter in built.named_parameters()}
    found = {}
    for group in group_parameters(built, 0.3, layer_decay=0.5):
        for parameter in group["params"]:
            found[names[id(parameter)]] = (-np.log2(group["scale"]), group["weight_decay"])
    assert set(found) == set(names.values())
    return found


@pytest.mark.parametrize("kind", ENCODERS)
def test_every_parameter_learns_at_the_rate_of_its_layer(kind):
    found = groups_by_name(small_encoder(kind))
    for name, (times, decay) in found.items():
        if block := re.match(r"model\.encoder\.blocks\.(\d+)\.", name):
            assert times == BLOCKS - int(block.group(1)), name
        elif re.match(AFTER, name):
            assert times == 0, name
        else:
            assert re.match(BELOW, name), name
            assert times == BLOCKS + 1, name
        assert decay == (0.3 if re.fullmatch(KERNEL, name) else 0.0), name


def test_the_new_parameters_by_hand():
    dinov3 = groups_by_name(small_encoder("dinov3"))
    assert dinov3["model.registers"] == (3, 0.0)
    assert dinov3["model.encoder.blocks.0.attention.q_bias"] == (2, 0.0)
    assert dinov3["model.encoder.blocks.1.attention.v_bias"] == (1, 0.0)
    assert dinov3["model.encoder.blocks.1.attention.qkv.weight"] == (1, 0.3)
    assert groups_by_name(small_encoder("mixed rope"))["model.rotary.frequencies"] == (3, 0.0)
    beit = groups_by_name(small_encoder("beit"))
    assert beit["model.encoder.blocks.1.attention.relative_bias.table"] == (1, 0.0)
    assert groups_by_name(small_encoder("beit, shared bias"))["model.relative_bias.table"] == (3, 0.0)
    siglip = groups_by_name(small_encoder("siglip"))
    assert siglip["model.pool.query"] == (0, 0.0)
    assert siglip["model.pool.kv.weight"] == (0, 0.3)
    normed = groups_by_name(small_encoder("query and key norms"))
    assert normed["model.encoder.blocks.0.attention.q_norm.weight"] == (2, 0.0)
    assert groups_by_name(small_encoder("aimv2"))["model.patch_norm.weight"] == (3, 0.0)


def test_a_hybrid_with_rotary_positions_has_two_stacks():
    model = small_hybrid()
    units = len(model.backbone.units)
    found = groups_by_name(model)
    assert len(find_layers(model)) == units + BLOCKS
    assert found["model.pool.query"] == (0, 0.0)
    assert found["model.encoder.blocks.0.attention.out.weight"] == (BLOCKS, 0.3)
    assert found["model.patch_embed.projection.weight"] == (BLOCKS + 1, 0.3)
    assert found["model.backbone.units.0.conv1.weight"] == (BLOCKS + units, 0.3)
    assert found["model.backbone.root.weight"] == (BLOCKS + units + 1, 0.3)


@pytest.mark.parametrize("kind", [*ENCODERS, "hybrid"])
def test_drop_path_grows_from_block_to_block(kind):
    options = {"stochastic_depth": 0.3, "depth": 3}
    model = small_hybrid(**options) if kind == "hybrid" else small_encoder(kind, **options)
    rates = [part.rate for part in model.modules() if isinstance(part, StochasticDepth)]
    assert rates == pytest.approx([0.0, 0.15, 0.3])
