"""timm's families load into our own VisionTransformer: the same outputs at four sizes, the same bits when written back.

timm rounds rotary angles and resized tables to float32; `computing_exactly` lets it compute them in float64.
"""

from __future__ import annotations

import functools

import pytest
import torch
from safetensors.torch import load_file
from timm_families import AT_16, FAMILIES, SIZES, build_family, computing_exactly, run_peer, use_float64, write_folder

import vitrail
from peer_models import mark_slow
from peers import timm
from vitrail.model.vit import VisionTransformer
from vitrail.weights.load import FORMATS
from vitrail.weights.save import write_model

TOLERANCE = 1e-10
SLOW = ("R26+S/32",)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that writes timm's folder of a family once."""

    @functools.cache
    def find(family):
        model = build_family(family)
        return model, write_folder(family, model, tmp_path_factory.mktemp("timm") / "model")

    return find


def images_at(size, channels=3):
    return torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@pytest.mark.parametrize("family", mark_slow(FAMILIES, SLOW))
def test_it_computes_what_timm_computes_at_every_size(family, folders):
    theirs, folder = folders(family)
    ours = vitrail.load(folder)
    assert isinstance(ours, VisionTransformer)
    assert next(ours.parameters()).dtype == torch.float64
    for height, width in SIZES.values():
        native = ours.image_size
        images = images_at((int(native[0] * height), int(native[1] * width)))
        with torch.no_grad():
            found = ours.embed(images), ours(images)
        for result, expected in zip(found, run_peer(family, theirs, images), strict=True):
            assert expected.std() > 1e-3
            torch.testing.assert_close(result, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("family", mark_slow(FAMILIES, SLOW))
def test_written_back_it_has_the_same_bits_and_timm_loads_it(family, folders, tmp_path):
    theirs, folder = folders(family)
    native = vitrail.load(vitrail.save(vitrail.load(folder), tmp_path / "native"))
    write_model(native, FORMATS["timm"], tmp_path / "back")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = use_float64(timm.create_model(f"local-dir:{tmp_path / 'back'}", pretrained=True).eval())
    # timm builds in float32 and rounds what it loads; the bits are compared above, the function here
    again.load_state_dict(after)
    images = images_at(native.image_size)
    with torch.no_grad(), computing_exactly():
        torch.testing.assert_close(again(images), theirs(images), rtol=TOLERANCE, atol=TOLERANCE)
    assert vitrail.load(tmp_path / "back").architecture == native.architecture


@torch.no_grad()
def test_mae_computes_what_timm_computes_at_every_size(tmp_path):
    """Meta's own file: timm's names under the key `model`, and a decoder that is left out."""
    theirs = use_float64(timm.create_model("vit_base_patch16_224", **{**AT_16, "num_classes": 0}).eval())
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    decoder = {"mask_token": torch.zeros(1, 1, 32), "decoder_pos_embed": torch.zeros(1, 37, 32)}
    decoder |= {"decoder_blocks.0.norm1.weight": torch.ones(32), "decoder_pred.weight": torch.zeros(768, 32)}
    torch.save({"model": {**theirs.state_dict(), **decoder}, "epoch": 799}, tmp_path / "mae.pth")
    ours = vitrail.load(tmp_path / "mae.pth", num_heads=4)
    assert (ours.num_classes, ours.preprocessing.mean) == (0, (0.485, 0.456, 0.406))
    for height, width in SIZES.values():
        images = images_at((int(96 * height), int(96 * width)))
        expected, _ = run_peer("ViT", theirs, images)
        assert expected.std() > 1e-3
        torch.testing.assert_close(ours.embed(images), expected, rtol=TOLERANCE, atol=TOLERANCE)
