"""int8 is smaller, guesses as its model does, and is refused where it does not."""

from __future__ import annotations

import onnx
import pytest
import torch
from exported import images, made
from PIL import Image

from vitrail.errors import ExportError
from vitrail.export.onnx import open_onnx
from vitrail.inspection.images import photographs
from vitrail.workflows import export as workflow
from vitrail.workflows.export import export


@pytest.fixture(scope="module")
def model():
    """Wide enough for weights to be most of the file. Labels as it has learned them are far apart."""
    model = made(width=64, mlp_dim=256)
    model.labels = ("a", "b", "c", "d", "e")
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([0.0, 4.0, 0.0, 0.0, 0.0]))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    for number, pixels in enumerate(photographs(3).measured[::4]):
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(root / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def dynamic(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("dynamic") / "model.onnx"
    return path, export(model, path, "onnx-int8")


@pytest.fixture(scope="module")
def calibrated(model, folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("calibrated") / "model.onnx"
    return path, export(model, path, "onnx-int8", images=str(folder))


@pytest.mark.parametrize("kind", ["dynamic", "calibrated"])
def test_it_is_smaller_and_near(kind, model, request):
    path, checked = request.getfixturevalue(kind)
    assert checked.export_bytes == path.stat().st_size < 0.6 * checked.model_bytes
    assert checked.agreement == 1
    assert checked.tolerance is None
    run = open_onnx(path)
    for count in (1, 7):
        inputs = images(count, 3, 16, 16)
        with torch.inference_mode():
            expected = model(inputs)
        assert 0 < (run(inputs) - expected).abs().max() < 0.5  # not the same, or nothing was brought to int8


def test_random_photographs_are_said_to_prove_little(dynamic, calibrated):
    assert "prove little" in dynamic[1].notes[0]
    assert calibrated[1].notes == ()


@pytest.mark.parametrize(("kind", "operator"), [("dynamic", "MatMulInteger"), ("calibrated", "QuantizeLinear")])
def test_products_of_the_encoder_are_in_int8_and_the_ends_are_not(kind, operator, request):
    path, _ = request.getfixturevalue(kind)
    file = onnx.load(path)
    operators = [node.op_type for node in file.graph.node]
    assert operators.count(operator) >= 4  # qkv, out, and the two of the MLP
    kept = [tensor for tensor in file.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    shapes = [tuple(tensor.dims) for tensor in kept]
    assert (48, 64) in shapes  # the projection of patches
    assert {(5, 64), (64, 5)} & set(shapes)  # the head
    assert (64, 192) not in shapes  # qkv
    assert {entry.key for entry in file.metadata_props} >= {"labels", "preprocessing"}


def test_a_model_that_int8_ruins_is_refused(model, folder, dynamic, tmp_path, monkeypatch):
    """Its head is turned, so that guesses differ, as they would with ranges that are wrong."""
    file = onnx.load(dynamic[0])
    fives = [tensor for tensor in file.graph.initializer if tuple(tensor.dims) == (5,)]
    (bias,) = [tensor for tensor in fives if onnx.numpy_helper.to_array(tensor).max() == 4]
    values = torch.tensor([0.0, 0.0, 4.0, 0.0, 0.0])
    bias.CopyFrom(onnx.numpy_helper.from_array(values.numpy(), bias.name))
    content = file.SerializeToString()
    monkeypatch.setattr(workflow, "write_int8", lambda graph, draft, calibration: draft.write_bytes(content))
    with pytest.raises(ExportError, match=r"the first guess is the same on .*, and 95% is asked for"):
        export(model, tmp_path / "model.onnx", "onnx-int8", images=str(folder))
    assert list(tmp_path.iterdir()) == []
