"""Every Vision Transformer and BiT ResNet in timm's registry: understood as timm builds it, or refused."""

from __future__ import annotations

import warnings

import pytest
import torch

from peers import timm
from vitrail.errors import WeightsError
from vitrail.model.create import build
from vitrail.weights.files import TensorInfo
from vitrail.weights.load import NAMINGS, recognise
from vitrail.weights.naming import Beside
from vitrail.weights.pairs import check_complete, expected_shapes, pair_up

GELUS = {"GELU": "exact", "GELUTanh": "tanh", "QuickGELU": "quick"}


def candidates() -> dict[str, torch.nn.Module]:
    names = [n for n in timm.list_models() if n.startswith(("vit_", "deit", "resnetv2_", "flexivit", "eva_large"))]
    found = {}
    for name in names:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = timm.create_model(name)
        if isinstance(model, timm.models.VisionTransformer | timm.models.ResNetV2):
            found[name] = model
    return found


@pytest.mark.slow
def test_every_timm_model():
    understood, refused = [], {}
    for name, model in candidates().items():
        tensors = {key: TensorInfo(tuple(t.shape), torch.float32) for key, t in model.state_dict().items()}
        config = {
            "architecture": name,
            "pretrained_cfg": model.pretrained_cfg,
            "global_pool": getattr(model, "global_pool", None),
        }
        config["pretrained_cfg"] = {key: value for key, value in config["pretrained_cfg"].items() if value is not None}
        try:
            naming = recognise(name, tensors)
            reading = naming.understand(tensors, Beside(given={"config.json": config}))
            ours = build(reading.architecture).state_dict()
            pairs = pair_up(ours, naming.lines(reading.architecture, reading.dialect))
            check_complete(name, tensors, expected_shapes(pairs, ours), [*reading.set_aside, *reading.left_out])
        except WeightsError as error:
            refused[name] = str(error)
            continue
        assert naming is NAMINGS["timm"]
        if hasattr(model, "blocks"):
            block, a = model.blocks[0], reading.architecture
            told = (block.attn.num_heads, block.norm1.eps, GELUS[type(block.mlp.act).__name__])
            assert told == (a.num_heads, a.norm_eps, a.gelu), name
        understood.append(name)
    print(f"\nunderstood {len(understood)}, refused {len(refused)}:", *refused.items(), sep="\n")
    assert len(understood) >= 150
    # What is refused has something these models do not: other blocks, other stems, batch norm, a gated MLP.
    foreign = ("resnetv2_", "18x2", "_xp_", "resnet26d", "resnet50d", "_dlittle", "_dwee", "_dpwee", "_pwee", "_mci_")
    foreign += ("giant_patch14_dinov2", "giant_patch14_reg", "intern300m", "vit_tiny_r_s16", "_rope", "siglip2")
    assert [name for name in refused if not any(part in name for part in foreign)] == []
