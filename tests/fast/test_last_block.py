"""The last block for the tokens that are asked for is the whole block's, at those tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import vitrail
from vitrail.fast.last_block import LastBlock, count_read_tokens, shorten_last_block

SMALL = {"image_size": 32, "width": 64, "depth": 3, "num_heads": 4, "mlp_dim": 128, "num_classes": 10, "seed": 0}


def model_with_head(**options):
    model = vitrail.create_model("Ti/8", **{**SMALL, **options}).eval()
    for parameter in model.head.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, 1),
        ({"registers": 3}, 1),
        ({"pool": "distilled", "registers": 1}, 2),
        ({"layer_scale": 0.3, "norm": "rms", "qkv_bias": False, "gelu": "quick"}, 1),
        ({"position_at": "every-layer"}, 1),
        ({"norm_after_pool": True}, 1),
    ],
)
def test_the_same_function(options, asked):
    model = model_with_head(**options)
    exact, short = copy.deepcopy(model).double(), copy.deepcopy(model)
    assert count_read_tokens(model) == asked
    assert shorten_last_block(short)
    assert isinstance(short.encoder.blocks[-1], LastBlock)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        assert short.forward_features(images).shape == (3, asked, 64)
        reference = exact(images.double())
        assert (short(images) - reference).norm() < 1e-6 * reference.norm()


@pytest.mark.parametrize(
    "options",
    [
        {"pool": "average"},
        {"pool": "class+average"},
        {"pool": "attention"},
        {"position": "relative"},
        {"block": "axial", "class_token": False, "pool": "average"},
    ],
)
def test_others_stay_as_they_are(options):
    model = model_with_head(**options)
    before = model.encoder.blocks[-1]
    assert not shorten_last_block(model)
    assert model.encoder.blocks[-1] is before


def test_a_resnet_has_no_blocks():
    assert not shorten_last_block(vitrail.create_model("BiT-R50x1", num_classes=4, device="meta"))


def test_weights_are_shared_not_copied():
    model = model_with_head()
    weight = model.encoder.blocks[-1].attention.qkv.weight
    shorten_last_block(model)
    last = model.encoder.blocks[-1]
    assert last.query.weight.data_ptr() == weight.data_ptr()
    assert last.keys_and_values.weight.data_ptr() == weight[64:].data_ptr()
