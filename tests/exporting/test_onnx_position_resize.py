"""ONNX files for any size interpolate positions as the model does, whichever way that is."""

from __future__ import annotations

import json
from typing import get_args

import onnx
import pytest
from exported import difference, images, made

from vitrail.exporting.export import export
from vitrail.exporting.onnx import open_onnx
from vitrail.model.architecture import PositionResize

pytestmark = pytest.mark.slow  # every export compares many sizes before it writes
SIZES = [(16, 16), (28, 28), (16, 24), (24, 16), (8, 8)]


@pytest.mark.parametrize("how", [way for way in get_args(PositionResize) if way != "bicubic-antialias"])
def test_any_size_any_way(how, tmp_path):
    model = made(position_resize=how)
    path = tmp_path / "model.onnx"
    export(model, path, dynamic_size=True)
    run = open_onnx(path)
    assert max(difference(run, model, images(2, 3, *size)) for size in SIZES) <= 1e-4
    facts = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert json.loads(facts["architecture"])["position_resize"] == how


def test_the_comparison_can_fail(tmp_path):
    export(made(position_resize="bicubic"), tmp_path / "model.onnx", dynamic_size=True)
    run = open_onnx(tmp_path / "model.onnx")
    assert difference(run, made(position_resize="bicubic-antialias"), images(2, 3, 8, 8)) > 1e-3
