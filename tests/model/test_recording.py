"""Attention maps from fused attention, of vitrail's layers and of timm's."""

from __future__ import annotations

import pytest
import torch

import vitrail
from peers import timm
from samples import images, randomise, small_vit
from vitrail.errors import NotApplicableError
from vitrail.model.architecture import TimmArchitecture
from vitrail.model.attention import SelfAttention
from vitrail.model.create import build_empty_model
from vitrail.model.recording import observe_attention
from vitrail.model.timm_model import TimmModel

KINDS = [
    {},
    {"position": "relative"},
    {"registers": 2},
    {"pool": "average"},
    {"attention_dropout": 0.5, "dropout": 0.5},
    {"pool": "average", "block": "axial"},
]


@pytest.mark.parametrize("options", KINDS)
def test_recorded_rows_sum_to_one_and_give_the_layers_output(options):
    model = small_vit(depth=3, **options)
    attentions = [m for m in model.modules() if isinstance(m, SelfAttention)]
    seen = {}
    for index, attention in enumerate(attentions):
        attention.register_forward_hook(lambda m, args, out, index=index: seen.update({index: (args[0], out)}))
    with vitrail.record_attention(model) as maps:
        model(images())
    assert sorted(maps) == list(range(len(attentions)))
    for index, attention in enumerate(attentions):
        x, output = seen[index]
        if x.ndim == 4:  # a grid, whose rows are sequences
            x, output = x.flatten(0, 1), output.flatten(0, 1)
        torch.testing.assert_close(maps[index].sum(dim=-1), torch.ones(maps[index].shape[:3]), rtol=0, atol=1e-6)
        assert (maps[index] >= 0).all()
        values = attention.qkv(x)[..., -32:].unflatten(2, (4, 8)).transpose(1, 2)
        again = attention.out((maps[index] @ values).transpose(1, 2).flatten(2))
        torch.testing.assert_close(again, output, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", KINDS)
def test_output_is_bit_identical_before_during_and_after(options):
    model = small_vit(**options)
    before = model(images())
    with vitrail.record_attention(model):
        during = model(images())
    assert torch.equal(before, during)
    assert torch.equal(before, model(images()))


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_switched_off_on_leaving_also_under_exceptions():
    model = small_vit()

    def fail_inside():
        with vitrail.record_attention(model):
            model(images())
            assert hooks(model) == 2
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail_inside()
    assert hooks(model) == 0


def test_nothing_is_recorded_after_leaving():
    model = small_vit()
    with vitrail.record_attention(model) as maps:
        model(images())
    first = maps[0]
    model(images(batch=1))
    assert maps[0] is first


def test_shapes_and_choice_of_layers():
    model = small_vit(depth=4)
    with vitrail.record_attention(model, layers=[1, -1]) as maps:
        model(images(batch=3))
    assert {index: tuple(m.shape) for index, m in maps.items()} == {1: (3, 4, 7, 7), 3: (3, 4, 7, 7)}
    with pytest.raises(vitrail.ConfigError, match="layer 4"), vitrail.record_attention(model, [4]):
        pass


def test_axial_maps_are_rows_then_columns():
    model = small_vit(depth=1, block="axial", pool="average")
    with vitrail.record_attention(model) as maps:
        model(images(batch=5))
    assert {index: tuple(m.shape) for index, m in maps.items()} == {0: (5 * 2, 4, 3, 3), 1: (5 * 3, 4, 2, 2)}


def test_each_call_replaces_the_maps_and_they_carry_no_graph():
    model = small_vit()
    with vitrail.record_attention(model) as maps:
        model(images(batch=1))
        assert maps[0].shape[0] == 1
        model(images(batch=2))
        assert maps[0].shape[0] == 2
    assert not maps[0].requires_grad


def test_a_model_compiled_before_is_recorded_too():
    model = small_vit()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    before = compiled(images())
    with vitrail.record_attention(compiled) as maps:
        compiled(images())
    assert sorted(maps) == [0, 1]
    assert torch.equal(compiled(images()), before)


def test_a_function_compiled_around_a_model_is_recorded_too():
    model = small_vit()
    step = torch.compile(lambda x: model(x).softmax(dim=-1), backend="eager")
    before = step(images())
    with vitrail.record_attention(model) as maps:
        step(images())
    assert sorted(maps) == [0, 1]
    assert torch.equal(step(images()), before)


def test_bf16_maps_come_in_float32():
    model = small_vit()
    with torch.autocast("cpu", torch.bfloat16), vitrail.record_attention(model) as maps:
        model(images())
    assert maps[0].dtype == torch.float32
    torch.testing.assert_close(maps[0].sum(dim=-1), torch.ones(2, 4, 7), rtol=0, atol=1e-5)


def test_a_resnet_has_nothing_to_record():
    model = vitrail.create_model("BiT-R50x1", device="meta")
    with pytest.raises(vitrail.ConfigError, match="no self-attention"), vitrail.record_attention(model):
        pass


def test_intermediate_layers():
    model = small_vit(depth=3)
    layers = model.intermediate_layers(images(), [0, 2, -2])
    assert [tuple(z.shape) for z in layers] == [(2, 7, 32)] * 3
    torch.testing.assert_close(model.encoder.norm(layers[1]), model.forward_features(images()))
    (normed,) = model.intermediate_layers(images(), [-1], norm=True)
    torch.testing.assert_close(normed, model.forward_features(images()))
    z = model._prepend_prefix(model.tokens(images())) + model.position_embedding[0].table
    for block in model.encoder.blocks[:2]:
        z = block(z)
    torch.testing.assert_close(layers[2], z)
    assert hooks(model) == 0
    again, same = model.intermediate_layers(images(), [1, 1])
    assert torch.equal(again, same)
    layers[0].sum().backward()
    assert model.patch_embed.projection.weight.grad is not None


def test_observed_layers_are_told_in_turn():
    model, told = small_vit(depth=3), []
    with observe_attention(model, lambda layer, maps: told.append((layer, tuple(maps.shape), maps.requires_grad))):
        model(images())
        model(images(batch=1))
    assert told == [(layer, (batch, 4, 7, 7), False) for batch in (2, 1) for layer in range(3)]
    with observe_attention(model, lambda layer, maps: told.append(layer), layers=[-1]):
        model(images())
    assert told[6:] == [2]


def test_what_a_teller_raises_comes_out_and_leaves_no_hook():
    model = small_vit()

    def refuse(layer, maps):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), observe_attention(model, refuse):
        model(images())
    assert hooks(model) == 0


# Networks of timm's


def network_of_timm(name: str = "test_vit2", image_size: tuple[int, int] = (32, 48)) -> TimmModel:
    model = build_empty_model(TimmArchitecture(name=name, image_size=image_size, num_classes=3))
    model.load_state_dict({key: torch.empty(tensor.shape) for key, tensor in model.state_dict().items()}, assign=True)
    return randomise(model)


def fused(model) -> list[bool]:
    return [part.fused_attn for part in model.modules() if hasattr(part, "fused_attn")]


@pytest.mark.parametrize("name", ["test_vit2", "test_vit3", "test_vit4"])
def test_timms_layers_give_their_output_from_the_maps(name):
    """Among them one that pools by attention, which is no layer."""
    model = network_of_timm(name)
    before, attentions, outputs = model(images(size=(32, 48))), [block.attn for block in model.peer.blocks], []
    for attention in attentions:
        attention.register_forward_hook(lambda m, args, out: outputs.append((args[0], out)))
    with vitrail.record_attention(model) as maps:
        during = model(images(size=(32, 48)))
    torch.testing.assert_close(during, before, rtol=0, atol=1e-5)
    assert sorted(maps) == list(range(len(attentions)))
    for index, attention in enumerate(attentions):
        x, output = outputs[index]
        assert maps[index].shape == (2, attention.num_heads, 7, 7)
        assert not maps[index].requires_grad
        torch.testing.assert_close(maps[index].sum(dim=-1), torch.ones(maps[index].shape[:3]), rtol=0, atol=1e-6)
        values = attention.qkv(x).chunk(3, dim=2)[2].unflatten(2, (attention.num_heads, -1)).transpose(1, 2)
        again = attention.proj(attention.norm((maps[index] @ values).transpose(1, 2).flatten(2)))
        torch.testing.assert_close(again, output, rtol=0, atol=1e-5)


def test_timms_fused_path_is_back_afterwards_also_under_exceptions():
    model = network_of_timm()
    before = model(images(size=(32, 48)))
    assert all(fused(model))

    def fail_inside():
        with vitrail.record_attention(model, layers=[0, -1]) as maps:
            assert fused(model) == [False, *[True] * 6, False]
            model(images(size=(32, 48)))
            assert sorted(maps) == [0, 7]
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail_inside()
    assert all(fused(model))
    assert hooks(model) == 0
    assert torch.equal(model(images(size=(32, 48))), before)


def test_timms_path_that_was_not_fused_stays_so():
    model = network_of_timm()
    model.peer.blocks[1].attn.fused_attn = False
    with vitrail.record_attention(model):
        pass
    assert fused(model) == [True, False, *[True] * 6]


def test_timms_maps_come_before_dropout_and_in_float32():
    model = network_of_timm()
    with vitrail.record_attention(model) as calm:
        model(images(size=(32, 48)))
    for block in model.peer.blocks:
        block.attn.attn_drop.p = 0.5
    model.train()
    with vitrail.record_attention(model, layers=[0]) as maps:
        model(images(size=(32, 48)))
    torch.testing.assert_close(maps[0], calm[0])
    model.bfloat16()
    with vitrail.record_attention(model, layers=[0]) as maps:
        model(images(size=(32, 48), dtype=torch.bfloat16))
    assert maps[0].dtype == torch.float32


@pytest.mark.slow
def test_a_compiled_network_of_timms_is_recorded_too():
    model = network_of_timm()
    compiled = torch.compile(model, backend="eager")
    before = compiled(images(size=(32, 48)))
    with vitrail.record_attention(compiled) as maps:
        compiled(images(size=(32, 48)))
    assert sorted(maps) == list(range(8))
    assert torch.equal(compiled(images(size=(32, 48))), before)


@pytest.mark.parametrize("name", ["test_convnext", "test_efficientnet", "resnet50_clip"])
def test_timms_networks_without_attention_say_so(name):
    own = timm.models.get_pretrained_cfg(name)
    model = build_empty_model(TimmArchitecture(name=name, image_size=own.input_size[1:], num_classes=3))
    with pytest.raises(NotApplicableError, match=name), vitrail.record_attention(model):
        pass


def test_a_module_that_is_no_model_has_nothing_to_record():
    with pytest.raises(vitrail.ConfigError, match="no self-attention"), observe_attention(torch.nn.Linear(2, 2), print):
        pass
