"""The resize inside a graph gives the pixels that evaluation gives, whatever the size."""

from __future__ import annotations

import pytest
import torch
from exported import made, pixels
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.config import Preprocessing
from vitrail.data.transforms.preprocess import prepare, resize_and_crop
from vitrail.exporting.graphs import PixelsGraph, resize_in_graph
from vitrail.inspection.images import pick_photographs

SIDES = st.integers(1, 90)


def apart(content: torch.Tensor, preprocessing: Preprocessing) -> torch.Tensor:
    """(C, height, width) uint8 → how far each pixel is from what evaluation gives."""
    found = resize_in_graph(content[None].float(), preprocessing)[0]
    return (found - resize_and_crop(content, preprocessing).float()).abs()


@settings(max_examples=80, deadline=None)
@given(
    height=SIDES,
    width=SIDES,
    image_size=st.tuples(st.integers(2, 40), st.integers(2, 40)),
    resize=st.sampled_from(["squash", "cover"]),
    interpolation=st.sampled_from(["bilinear", "bicubic"]),
    crop_fraction=st.sampled_from([1.0, 0.95, 0.875, 0.5]),
    crop_rounding=st.sampled_from(["down", "even"]),
)
def test_no_pixel_is_further_than_its_rounding(height, width, **options):
    preprocessing = Preprocessing(**options)
    content = pixels(1, height, width)[0].permute(2, 0, 1).contiguous()
    # One for a value that lies half-way; at the second product it may have come from the first.
    assert apart(content, preprocessing).max() <= 2


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("resize", ["squash", "cover"])
def test_photographs_are_the_same_but_for_a_few_values(resize, interpolation):
    preprocessing = Preprocessing(image_size=64, resize=resize, interpolation=interpolation, crop_fraction=0.9)
    for _, photo in pick_photographs(3).shown:
        off = apart(photo, preprocessing)
        assert off.max() <= 1
        assert (off > 0).float().mean() < 0.01


def test_an_image_without_end_is_cut_as_in_evaluation():
    preprocessing = Preprocessing(image_size=8, resize="cover")
    content = pixels(1, 3, 200)[0].permute(2, 0, 1).contiguous()
    content[:, :, :70] = 255  # left out: only 48 columns in the middle are looked at
    assert apart(content, preprocessing).max() <= 1


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_to_probabilities(channels):
    model = made(in_channels=channels)
    content = pixels(2, 37, 21, channels)
    expected = torch.stack([prepare(each.permute(2, 0, 1).contiguous(), model.preprocessing) for each in content])
    with torch.inference_mode():
        torch.testing.assert_close(PixelsGraph(model)(content), model(expected).softmax(1), atol=1e-3, rtol=0)


def test_without_classes_it_is_the_embedding():
    model = made(num_classes=0)
    with torch.inference_mode():
        assert PixelsGraph(model)(pixels(2, 20, 20)).shape == (2, 32)
