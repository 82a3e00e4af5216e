"""Packed layers compute what the plain ones do, and where they cannot, the plain ones stay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import vitrail
from vitrail.fast.cpu import packed
from vitrail.fast.cpu.packed import PackedLinear, pack_layers

if not torch.backends.mkldnn.is_available():
    pytest.skip("this torch has no oneDNN", allow_module_level=True)

SMALL = {"image_size": 32, "width": 64, "depth": 3, "num_heads": 4, "mlp_dim": 128, "num_classes": 10, "seed": 0}


def model_with_head(name: str = "Ti/8", **options):
    model = vitrail.create_model(name, **{**SMALL, **options}).eval()
    nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize("gelu", ["tanh", "exact", "quick"])
@pytest.mark.parametrize("batch", [1, 5])
def test_as_near_to_the_exact_result_as_the_plain_model(gelu, batch):
    model = model_with_head(gelu=gelu)
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert pack_layers(model) == layers
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    images = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        reference = exact(images.double())
        distance, of_plain = ((one(images) - reference).norm() / reference.norm() for one in (model, plain))
    assert distance < max(4 * of_plain, 1e-6)
    assert sum(isinstance(module, PackedLinear) and module.gelu is not None for module in model.modules()) == (
        0 if gelu == "quick" else 3
    )


def test_maps_of_attention_are_there_too():
    from vitrail.inspection.measure.attention import rollout_by_layer

    model = model_with_head()
    plain = copy.deepcopy(model)
    pack_layers(model)
    images = torch.rand(2, 3, 32, 32)
    difference = rollout_by_layer(model, images) - rollout_by_layer(plain, images)
    assert abs(difference).max() < 1e-6


@pytest.mark.slow
def test_other_families_and_layers_without_bias():
    for name, options in (("BiT-R50x1", {"num_classes": 4}), ("Ti/8", {**SMALL, "qkv_bias": False})):
        model = vitrail.create_model(name, **{"image_size": 32, **options}).eval()
        plain = copy.deepcopy(model)
        assert pack_layers(model) >= 1
        images = torch.rand(2, 3, 32, 32)
        with torch.inference_mode():
            torch.testing.assert_close(model(images), plain(images), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_packed_stays(monkeypatch):
    model = model_with_head().double()
    assert pack_layers(model) == 0
    assert model(torch.rand(1, 3, 32, 32).double()).shape == (1, 10)

    wrong = model_with_head()
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: x.new_zeros(len(x), self.out_features))
    assert pack_layers(wrong) == 0
    monkeypatch.setattr(packed.torch.backends.mkldnn, "is_available", lambda: False)
    assert pack_layers(wrong) == 0
