"""A hybrid whose ResNet is the root alone: AugReg's R+Ti/16, in Google's format."""

from __future__ import annotations

import pytest
import torch

import vitrail
from samples import randomise
from vitrail.model.architecture import Backbone, VitArchitecture
from vitrail.model.variants import BIT, HYBRID
from vitrail.model.vit import VisionTransformer
from vitrail.weights.load import FORMATS
from vitrail.weights.save import write_model


def test_google_holds_it(tmp_path):
    sizes = {"image_size": 64, "patch_size": 8, "width": 32, "depth": 1, "mlp_dim": 48, "num_heads": 2}
    architecture = VitArchitecture(**sizes, num_classes=3, backbone={**HYBRID, "blocks": ()})
    model = randomise(VisionTransformer(architecture))
    write_model(model, FORMATS["google"], tmp_path)
    loaded = vitrail.load(tmp_path / "model.npz")
    assert loaded.architecture.backbone == architecture.backbone
    assert loaded.stride == 32
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))


def test_bit_needs_a_stage():
    with pytest.raises(ValueError, match="at least one stage"):
        Backbone(**BIT, blocks=())
