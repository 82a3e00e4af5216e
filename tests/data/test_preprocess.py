"""Evaluation transforms against torchvision's."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import peers
import vitrail
from vitrail.data.transforms.preprocess import prepare, resize_and_crop

assert peers.torchvision  # imported there in a way that works without CUDA; its v2 can follow
v2 = importlib.import_module("torchvision.transforms.v2")
MODES = {"bilinear": v2.InterpolationMode.BILINEAR, "bicubic": v2.InterpolationMode.BICUBIC}


def picture(height: int, width: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


@given(
    height=st.integers(20, 200),
    width=st.integers(20, 200),
    fraction=st.sampled_from([1.0, 0.9, 0.875]),
    mode=st.sampled_from(list(MODES)),
)
@settings(max_examples=40, deadline=None)
def test_cover_and_crop_is_torchvisions_resize_and_centre_crop(height, width, fraction, mode):
    preprocessing = vitrail.Preprocessing(
        image_size=32, resize="cover", crop_fraction=fraction, interpolation=mode, crop_rounding="even"
    )
    image = picture(height, width)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    pixels = v2.functional.resize(pixels, [int(32 / fraction)], interpolation=MODES[mode], antialias=True)
    expected = v2.functional.center_crop(pixels, [32, 32]).float() / 127.5 - 1
    torch.testing.assert_close(prepare(image, preprocessing), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("margin", range(9))
def test_an_odd_margin_is_halved_as_the_source_of_the_weights_does(margin):
    pixels = torch.arange(4 + margin, dtype=torch.uint8).expand(3, 4, -1)
    lefts = {}
    for rounding in ("down", "even"):  # transformers' and Google's; torchvision's and timm's
        preprocessing = vitrail.Preprocessing(image_size=4, resize="cover", crop_rounding=rounding)
        lefts[rounding] = int(resize_and_crop(pixels, preprocessing)[0, 0, 0])
    assert lefts == {"down": margin // 2, "even": round(margin / 2)}


def test_squash_reaches_the_exact_size_whatever_the_shape():
    preprocessing = vitrail.Preprocessing(image_size=(24, 40), crop_fraction=0.8)
    assert prepare(picture(300, 50), preprocessing).shape == (3, 24, 40)


def test_statistics_and_channels():
    preprocessing = vitrail.Preprocessing(image_size=4, mean=(0.25,), std=(0.5,))
    image = Image.new("RGB", (4, 4), (255, 255, 255))
    assert torch.equal(prepare(image, preprocessing), torch.full((1, 4, 4), 1.5))


def test_paths_and_bytes_are_images_too(tmp_path):
    preprocessing = vitrail.Preprocessing(image_size=32)
    picture(40, 50).save(tmp_path / "a.png")
    expected = prepare(picture(40, 50), preprocessing)
    for form in (tmp_path / "a.png", str(tmp_path / "a.png"), (tmp_path / "a.png").read_bytes()):
        assert torch.equal(prepare(form, preprocessing), expected)
    with pytest.raises(vitrail.DataError, match="No such file"):
        prepare(tmp_path / "b.png", preprocessing)


@pytest.mark.parametrize("size", [(1, 20000), (20000, 1)])
def test_very_long_images_need_no_memory(size):
    preprocessing = vitrail.Preprocessing(image_size=224, resize="cover", crop_fraction=0.875)
    assert prepare(torch.zeros(3, *size, dtype=torch.uint8), preprocessing).shape == (3, 224, 224)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK"])
def test_other_kinds_of_picture_become_rgb(mode):
    assert prepare(picture(40, 50, mode), vitrail.Preprocessing(image_size=32)).shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"mean": (0.5,)}, "mean has 1 channels and std 3"),
        ({"std": (0.5, 0.0, 0.5)}, "std.1 = 0.0: input should be greater than 0"),
        ({"crop_fraction": 1.5}, "crop_fraction = 1.5"),
        ({"interpolation": "nearest"}, "interpolation = 'nearest'"),
    ],
)
def test_impossible_preprocessing_is_refused(wrong, sentence):
    with pytest.raises(vitrail.ConfigError, match=sentence):
        vitrail.Preprocessing(image_size=32, **wrong)
