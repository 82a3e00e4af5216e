"""Every kind of model as ONNX, at its own size and at any: minutes, but for two that are many kinds at once."""

from __future__ import annotations

import onnx
import pytest
from exported import difference, images, made, resnet, stirred

import vitrail
from vitrail.exporting.graphs import build_graph
from vitrail.exporting.onnx import open_onnx, write_onnx

STEM = [{"channels": 8, "kernel": 3, "stride": 2}, {"channels": 16, "kernel": 3, "stride": 2}]
KINDS = {
    "class": {},
    "average": {"pool": "average"},
    "attention pool": {"pool": "attention"},
    "registers": {"registers": 2},
    "distilled": {"pool": "distilled", "registers": 1},
    "conv stem": {"conv_stem": STEM},
    "sin-cos": {"position": "sin-cos"},
    "learned-2d": {"position": "learned-2d"},
    "every layer": {"position_at": "every-layer", "norm": "rms", "layer_scale": 0.1},
    "axial": {"block": "axial", "pool": "average"},
    "no classes": {"num_classes": 0},
    "one channel": {"in_channels": 1},
    "no positions": {"position": "none", "representation_size": 24},
}


def exported(model, path, dynamic_size=False):
    write_onnx(build_graph(model, dynamic_size=dynamic_size), path)
    return open_onnx(path)


def worst(run, model, sizes, counts=(1, 7)):
    return max(difference(run, model, images(count, model.in_channels, *size)) for size in sizes for count in counts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"conv_stem": STEM, "registers": 2, "pool": "attention", "position": "learned-2d", "in_channels": 1},
        {"block": "axial", "pool": "average", "position": "sin-cos", "num_classes": 0, "norm": "rms"},
    ],
)
def test_many_kinds_at_once(tmp_path, options):
    model = made(**options)
    assert worst(exported(model, tmp_path / "model.onnx"), model, [(16, 16)]) <= 1e-4
    (output,) = onnx.load(tmp_path / "model.onnx").graph.output
    assert output.name == ("logits" if model.num_classes else "embedding")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind(tmp_path, kind):
    model = made(**KINDS[kind])
    own, any_size = exported(model, tmp_path / "a.onnx"), exported(model, tmp_path / "b.onnx", dynamic_size=True)
    assert worst(own, model, [(16, 16)]) <= 1e-4
    assert worst(any_size, model, [(16, 16), (24, 24), (12, 28)]) <= 1e-4


@pytest.mark.slow
def test_relative_positions_at_their_own_size(tmp_path):
    model = made(position="relative")
    assert worst(exported(model, tmp_path / "model.onnx"), model, [(16, 16)]) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("root", ["large", "small"])
@pytest.mark.parametrize("form", ["hybrid", "bit"])
def test_resnets(tmp_path, form, root):
    model = resnet(form, root=root, stage_channels=64 if root == "large" else 32)
    own, any_size = exported(model, tmp_path / "a.onnx"), exported(model, tmp_path / "b.onnx", dynamic_size=True)
    assert worst(own, model, [(32, 32)]) <= 1e-4
    sizes = [(32, 32), (48, 64)] if form == "hybrid" else [(32, 32), (45, 61)]
    assert worst(any_size, model, sizes) <= 1e-4


@pytest.mark.slow
def test_a_real_one_at_real_sizes(tmp_path):
    model = stirred(vitrail.create_model("Ti/16", seed=0).eval(), amount=0.01)
    own, any_size = exported(model, tmp_path / "a.onnx"), exported(model, tmp_path / "b.onnx", dynamic_size=True)
    assert worst(own, model, [(224, 224)], counts=(1, 2, 7, 33)) <= 1e-4
    for size in ((224, 224), (384, 384), (224, 320)):
        assert worst(any_size, model, [size], counts=(1, 2, 7)) <= 1e-4
    assert worst(any_size, model, [(224, 320)], counts=(33,)) <= 1e-4
