"""Principal components of patches, against a singular value decomposition, and how they are coloured."""

from __future__ import annotations

import base64
import io
import re

import made_up
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from peers import timm
from samples import images, randomise, small_vit
from vitrail.errors import ConfigError, NotApplicableError
from vitrail.inspection import patch_components, patch_features
from vitrail.inspection.draw.patches import colour_components
from vitrail.inspection.findings import Absent, Components
from vitrail.inspection.inspect_model import inspect_model
from vitrail.inspection.measure import anatomy
from vitrail.inspection.measure.components import measure_components
from vitrail.inspection.page.patch_colours import show_patch_colours
from vitrail.model.architecture import Backbone, ResNetArchitecture, TimmArchitecture, VitArchitecture
from vitrail.model.create import build_empty_model
from vitrail.model.variants import BIT, HYBRID

KINDS = [
    {},
    {"registers": 2, "pool": "class+average"},
    {"pool": "attention", "registers": 1},
    {"pool": "average", "block": "axial"},
    {"pool": "average", "norm_after_pool": True},
]


def vit(**options):
    return small_vit(dtype=torch.float64, **options)


def pictures(count=3, size=(16, 24)):
    return images(count, size, dtype=torch.float64)


def hybrid():
    backbone = Backbone(blocks=(1, 1), **HYBRID)
    fields = {"image_size": 32, "patch_size": 1, "width": 16, "depth": 2, "mlp_dim": 16, "num_heads": 2}
    model = build_empty_model(VitArchitecture(backbone=backbone, num_classes=3, **fields))
    return randomise(model.to_empty(device="cpu").double())


@torch.no_grad()
def by_svd(features, count):
    """(B, rows, columns, D) → values and shares, by another way: the singular values of the centred features."""
    flat = features.reshape(-1, features.shape[-1]).double()
    u, s, v = torch.linalg.svd(flat - flat.mean(dim=0), full_matrices=False)
    signs = torch.stack([row[row.abs().argmax()].sign() for row in v])
    values = (u * s * signs)[:, :count].reshape(*features.shape[:3], count)
    return values.numpy(), (s**2 / (s**2).sum())[:count].numpy()


@pytest.mark.parametrize("options", KINDS)
def test_components_are_those_of_all_images_together(options):
    model, batch = vit(**options), pictures()
    with torch.no_grad():
        expected = model.forward_features(batch)[:, model.prefix :].unflatten(1, (2, 3))
    features = patch_features(model, batch)
    assert torch.equal(features, expected)
    found = measure_components(model, batch)
    values, explained = by_svd(expected, 3)
    np.testing.assert_allclose(found.values, values, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.explained, explained, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(patch_components(model, batch), found.values)
    assert (np.diff(found.values.reshape(-1, 3).var(axis=0)) < 0).all(), "the largest first"


def test_any_number_of_them_at_any_size():
    model, batch = vit(), pictures(1, (40, 16))
    found = patch_components(model, batch, components=5)
    values, _ = by_svd(patch_features(model, batch), 5)
    assert found.shape == (1, 5, 2, 5)
    np.testing.assert_allclose(found, values, rtol=0, atol=1e-10)
    with pytest.raises(ConfigError, match="components = 0"):
        patch_components(model, batch, components=0)


def test_images_change_places_with_their_components(monkeypatch):
    model, batch = vit(), pictures(4)
    found = patch_components(model, batch)
    np.testing.assert_allclose(patch_components(model, batch.flip(0)), found[::-1], rtol=0, atol=1e-10)
    monkeypatch.setattr(anatomy, "MOST_IMAGES_AT_ONCE", 1)
    np.testing.assert_allclose(patch_components(model, batch), found, rtol=0, atol=1e-10)


def test_hybrids_and_networks_of_timm_have_them():
    model, batch = hybrid(), pictures(2, (32, 16))
    assert patch_components(model, batch).shape == (2, 4, 2, 3)
    name = "vit_tiny_patch16_224"
    peer = timm.create_model(name, img_size=32, num_classes=3).double().eval()
    network = build_empty_model(TimmArchitecture(name=name, image_size=32, num_classes=3))
    network.load_state_dict(peer.state_dict(prefix="peer."), assign=True)
    batch = pictures(2, (32, 32))
    with torch.no_grad():
        expected = peer.forward_features(batch)[:, 1:].unflatten(1, (2, 2))
    assert torch.allclose(patch_features(network.double(), batch), expected, rtol=0, atol=1e-10)


def test_a_resnet_says_why_not():
    backbone = Backbone(blocks=(1, 1), **BIT)
    model = build_empty_model(ResNetArchitecture(image_size=64, num_classes=3, backbone=backbone))
    model = randomise(model.to_empty(device="cpu").double())
    with pytest.raises(NotApplicableError, match="ResNet does not cut images into patches"):
        patch_components(model, pictures(1, (64, 64)))


def test_features_that_do_not_vary_have_none():
    model = vit()
    nn.init.zeros_(model.encoder.norm.weight)
    with pytest.raises(NotApplicableError, match="same features"):
        patch_components(model, pictures())
    nn.init.constant_(model.encoder.norm.weight, torch.nan)
    with pytest.raises(NotApplicableError, match="not all numbers"):
        patch_components(model, pictures())


def test_components_that_the_features_do_not_have_are_zero():
    model = vit()
    with torch.no_grad():
        model.encoder.norm.weight[2:] = 0  # two channels vary
    found = measure_components(model, pictures())
    assert found.values[..., :2].any()
    assert not found.values[..., 2].any()
    assert found.explained[2] == 0
    assert found.explained.sum() == pytest.approx(1)
    in_float32 = measure_components(model.float(), pictures().float())
    assert not in_float32.values[..., 2].any(), "and rounding errors are none"


def test_a_model_that_trains_goes_on_training():
    model, batch = vit(dropout=0.5).train(), pictures()
    assert np.array_equal(patch_components(model, batch), patch_components(model, batch))
    assert model.training


def test_each_component_is_a_colour_on_one_scale():
    values = np.zeros((2, 1, 101, 3))
    values[..., 0] = np.arange(202).reshape(2, 1, 101)
    values[..., 1] = -values[..., 0]
    values[0, 0, 0, 1] = 1e9  # one that stands out
    colours = colour_components(values)
    assert colours.dtype == np.uint8
    red, green, blue = np.moveaxis(colours.reshape(-1, 3).astype(int), 1, 0)
    assert (red[0], red[-1]) == (0, 255)
    assert abs(red[101] - 128) <= 2
    assert (np.diff(red) >= 0).all()
    assert (green[-1], green[0]) == (0, 255)
    assert abs(green[101] - 128) <= 2, "the others keep their colours"
    assert set(blue) == {128}
    assert colour_components(values[..., :1]).shape == (2, 1, 101, 3)


def test_the_page_shows_a_pixel_for_each_patch():
    found = made_up.vit(images=2, grid=(4, 6))
    pictures_shown = re.findall(r'class="patches" src="data:image/png;base64,([^"]+)"', show_patch_colours(found))
    shown = [np.asarray(Image.open(io.BytesIO(base64.b64decode(each)))) for each in pictures_shown]
    np.testing.assert_array_equal(shown, colour_components(found.components.values))
    assert "50%, 25% and 12% of the variance" in show_patch_colours(found)


def test_a_report_measures_them_and_says_so_where_it_cannot():
    fitted = [("one", torch.randint(0, 256, (3, 16, 24), dtype=torch.uint8)), ("two", torch.zeros(3, 16, 24).byte())]
    from vitrail.inspection.images import InspectionImages

    picked = InspectionImages(fitted, [pixels for _, pixels in fitted], "two", "two", ())
    found = inspect_model(small_vit(), "it", picked)
    assert isinstance(found.components, Components)
    assert found.components.values.shape == (2, 2, 3, 3)
    why = Absent("no images")
    assert inspect_model(small_vit(), "it", why).components == why
