"""ONNX files that take images of any size, normalised or as they were decoded."""

from __future__ import annotations

import pytest
import torch
from exported import difference, images, made, pixels

from vitrail.config import Preprocessing
from vitrail.data.transforms.preprocess import prepare
from vitrail.exporting.export import export
from vitrail.exporting.onnx import open_onnx


@pytest.fixture(scope="module")
def sized(tmp_path_factory):
    model = made()
    path = tmp_path_factory.mktemp("sized") / "model.onnx"
    return model, path, export(model, path, dynamic_size=True)


@pytest.mark.parametrize("size", [(16, 16), (28, 28), (16, 24), (24, 16), (8, 8)])
def test_any_size(sized, size):
    model, path, _ = sized
    run = open_onnx(path)
    assert max(difference(run, model, images(count, 3, *size)) for count in (1, 7)) <= 1e-4


def test_other_sizes_were_compared_before_it_was_written(sized):
    assert {"7×3×20×24", "1×3×16×32", "7×3×8×8"} <= set(sized[2].sizes)


@pytest.mark.slow
@pytest.mark.parametrize("resize", ["squash", "cover"])
def test_preprocessing_inside(tmp_path, resize):
    model = made()
    model.preprocessing = Preprocessing(image_size=16, resize=resize, crop_fraction=0.9, interpolation="bicubic")
    checked = export(model, tmp_path / "model.onnx", with_preprocessing=True)
    assert checked.output == "probabilities"
    run = open_onnx(tmp_path / "model.onnx")
    for size in ((16, 16), (40, 23), (9, 70)):
        content = pixels(2, *size)
        seen = torch.stack([prepare(each.permute(2, 0, 1).contiguous(), model.preprocessing) for each in content])
        with torch.inference_mode():
            expected = model(seen).softmax(1)
        assert (run(content) - expected).abs().max() < 2e-3
