"""Any architecture that timm can hold is written so that timm computes the same; others are refused in a sentence."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file
from timm_families import computing_exactly, use_float64

import vitrail
from peers import timm
from samples import SMALL, randomise
from vitrail.errors import ConfigError
from vitrail.weights.load import FORMATS
from vitrail.weights.save import write_model

BY_INDEX = {"coordinates": "index", "layout": "pairs"}
OPTIONS = {
    "pool": ["class", "average", "attention"],
    "registers": [0, 2],
    "class_token": [None, True],
    "position": ["learned-1d", "learned-1d", "none", "relative-bias"],
    "position_prefix": ["class", "all", "none"],
    "rotary": [
        *(None, None, {}, {**BY_INDEX, "base": 10000.0, "reference_grid": (4, 4)}),
        *({**BY_INDEX, "first": "column", "offset": 1.0}, {**BY_INDEX, "learned": True, "first": "column"}),
    ],
    "mlp": ["gelu", "swiglu"],
    "mlp_norm": [False, False, True],
    "attention_norm": [False, False, True],
    "qk_norm": [False, False, True],
    "qkv_bias": [True, True, False],
    "key_bias": [True, False],
    "mlp_bias": [True, True, False],
    "patch_norm": [False, False, True],
    "norm_at": ["before", "before", "after"],
    "final_norm": [True, True, False],
    "norm_after_pool": [False, True],
    "input_norm": [False, True],
    "norm": ["layer", "layer", "rms"],
    "norm_eps": [1e-6, 1e-5],
    "layer_scale": [None, 0.5],
    "pool_prefix": [False, True],
    "pool_heads": [None, None, 2],
    "pool_mlp_dim": [None, None, 40],
}
ENOUGH = 15
"""Architectures that timm holds; several times as many are impossible or refused."""


def draw_model(draw):
    """Return a model with random options, or None if they contradict each other."""
    options = {name: draw.choice(values) for name, values in OPTIONS.items()}
    options |= {"out_bias": options["mlp_bias"], "patch_bias": not options["input_norm"], "gelu": "exact"}
    if options["pool"] != "attention":
        options |= {"pool_heads": None, "pool_mlp_dim": None, "pool_prefix": False}
    if options["position"] == "relative-bias":
        options["position_at"] = draw.choice(["shared", "every-layer"])
    try:
        return randomise(vitrail.create_model("S/8", **SMALL, **options)).double()
    except ConfigError:
        return None


def test_what_timm_can_hold_it_computes(tmp_path):
    draw, accepted = random.Random(3), 0
    weight_format = FORMATS["timm"]
    images = torch.randn(2, 3, *SMALL["image_size"], dtype=torch.float64)
    while accepted < ENOUGH:
        model = draw_model(draw)
        if model is None or weight_format.explain_refusal(model.architecture) is not None:
            continue
        accepted += 1
        folder = tmp_path / str(accepted)
        write_model(model, weight_format, folder)
        again = vitrail.load(folder)
        theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval().double()
        theirs.load_state_dict(load_file(folder / "model.safetensors"))  # timm rounded them to float32
        theirs = use_float64(theirs)
        # timm cannot give any eps to any norms: another eps changes little, and `convert` measures it.
        tolerance = 1e-10 if again.architecture.norm_eps == model.architecture.norm_eps else 1e-2
        with torch.no_grad(), computing_exactly():
            torch.testing.assert_close(again(images), theirs(images), rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(again(images), model(images), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rotary": {"layout": "pairs"}}, "halves"),
        ({"rotary": {"coordinates": "index"}}, "pairs"),
        ({"rotary": {}, "norm": "rms"}, "layer norm"),
        ({"rotary": {}, "gelu": "tanh"}, "exact GELU"),
        ({"rotary": {}, "pool": "attention", "registers": 1}, "pools the class token"),
        ({"position": "relative-bias", "position_at": "shared"}, "bias of keys"),
        ({"position": "relative-bias", "position_at": "shared", "final_norm": False}, "one norm outside"),
        ({"mlp_bias": False}, "or in neither"),
        ({"norm_at": "after", "layer_scale": 0.1}, "no layer scale"),
        ({"registers": 2, "position": "learned-2d"}, "learned-2d"),
        ({"registers": 2, "position_at": "every-layer"}, "every-layer"),
    ],
)
def test_what_timm_cannot_hold_is_refused(options, reason, tmp_path):
    model = vitrail.create_model("S/8", **SMALL, **{"gelu": "exact", **options})
    with pytest.raises(vitrail.WeightsError, match=reason):
        vitrail.convert(model, tmp_path / "timm", "timm")
    assert not (tmp_path / "timm").exists()
