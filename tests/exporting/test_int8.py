"""int8 is smaller, guesses as its model does, and is refused where it does not."""

from __future__ import annotations

import onnx
import pytest
import torch
from exported import images, made, pixels, resnet
from onnx import helper, numpy_helper
from PIL import Image

from vitrail.config import Preprocessing
from vitrail.data.transforms.decode import to_channels
from vitrail.data.transforms.preprocess import resize_and_crop
from vitrail.errors import ExportError
from vitrail.exporting import export as workflow
from vitrail.exporting import int8
from vitrail.exporting.export import export
from vitrail.exporting.graphs import build_graph, resize_in_graph
from vitrail.exporting.images import prepare_calibration, split_for_calibration
from vitrail.exporting.onnx import open_onnx
from vitrail.inspection.images import InspectionImages, pick_photographs


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
    for number, photo in enumerate(pick_photographs(3).measured[::4]):
        Image.fromarray(photo.permute(1, 2, 0).numpy()).save(root / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def dynamic(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("dynamic") / "model.onnx"
    return path, export(model, path, "onnx-int8")


@pytest.fixture(scope="module")
def calibrated(model, folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("calibrated") / "model.onnx"
    return path, export(model, path, "onnx-int8", images=str(folder))


@pytest.mark.slow
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


def test_what_proves_little_is_said_to(dynamic, calibrated):
    assert "prove little" in dynamic[1].notes[0]
    assert "so few images say little" in calibrated[1].notes[0]


def test_it_is_not_scored_on_what_it_was_calibrated_on(dynamic, calibrated):
    assert (dynamic[1].images, dynamic[1].calibrated) == (32, 0)
    checked = calibrated[1]
    assert (checked.images, checked.calibrated) == (4, 4)
    assert checked.images_from.startswith("8 images of photos")
    assert checked.images_from.endswith(": 4 compared, the other 4 to calibrate on")


@pytest.mark.parametrize(("count", "some"), [(2, 1), (5, 2), (100, 50), (576, 64)])
def test_images_to_calibrate_on_and_others(count, some):
    numbers = [torch.full((3, 1, 1), number) for number in range(count)]
    calibrating, picked = split_for_calibration(InspectionImages([], numbers, "", "images", ()))
    assert len(calibrating) == some
    assert sorted(int(each[0]) for each in (*calibrating, *picked.measured)) == list(range(count))


def test_a_single_image_is_for_both():
    calibrating, picked = split_for_calibration(InspectionImages([], [torch.zeros(3, 1, 1)], "", "one.png", ()))
    assert calibrating == picked.measured
    assert picked.measured_on == "one.png, which it was calibrated on too"


@pytest.mark.parametrize("resize", ["squash", "cover"])
def test_colours_of_any_size_calibrate_a_grey_model(resize):
    """The resize inside has nothing left to do but the crop: what the model sees is what it always sees."""
    model = made(in_channels=1)
    how = {"resize": resize, "crop_fraction": 0.8, "interpolation": "bicubic"}
    model.preprocessing = Preprocessing(image_size=16, mean=(0.5,), std=(0.5,), **how)
    given = [each.permute(2, 0, 1).contiguous() for size in ((20, 24), (40, 16)) for each in pixels(1, *size)]
    inputs = prepare_calibration(build_graph(model, with_preprocessing=True), given)
    assert [each.shape for each in inputs] == 2 * [(1, 20, 20, 1)]
    for one, each in zip(given, inputs, strict=True):
        seen = resize_in_graph(each.permute(0, 3, 1, 2).float(), model.preprocessing)[0]
        assert (seen - resize_and_crop(to_channels(one, 1), model.preprocessing)).abs().max() <= 1


@pytest.mark.slow
def test_a_grey_model_with_preprocessing_inside(folder, tmp_path):
    model = made(in_channels=1, width=64, mlp_dim=256)
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0, 0.0]))
    checked = export(model, tmp_path / "model.onnx", "onnx-int8", images=str(folder), with_preprocessing=True)
    assert checked.agreement == 1


@pytest.mark.slow
def test_embeddings(folder, tmp_path):
    checked = export(made(num_classes=0, width=64, mlp_dim=256), tmp_path / "model.onnx", "onnx-int8")
    assert checked.agreement is None
    assert 0.99 < checked.cosine < 1


def test_two_gigabytes_are_refused_before_anything_is_done(model, tmp_path, monkeypatch):
    monkeypatch.setattr(int8, "MOST_INSIDE", 1000)
    monkeypatch.setattr(int8, "write_onnx", None)
    with pytest.raises(ExportError, match=r"2 GiB.*--to onnx"):
        int8.write_int8(build_graph(model), tmp_path / "model.onnx")


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
    carried = {entry.key: entry.value for entry in file.metadata_props}
    assert carried.keys() >= {"labels", "preprocessing"}
    assert carried["quantisation"] == kind


def drawn(weights, *products):
    """A graph of images, x0, x1, …: products given as (operator, input, weight, output), in this order."""
    nodes = [helper.make_node(operator, [x, weight], [y], name=weight) for operator, x, weight, y in products]
    nodes.insert(0, helper.make_node("Shape", ["images"], ["shape"], name="shape"))
    held = [numpy_helper.from_array(values.detach().numpy(), name) for name, values in weights.items()]
    images = helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, None)
    return helper.make_graph(nodes, "drawn", [images], [], held)


def test_what_stays_in_float32_is_known_by_what_it_is_and_not_by_its_place(model):
    """In a hybrid convolutions come before the projection, and exporters may write a product of constants first."""
    projection = model.patch_embed.projection.weight
    weights = {"table": torch.ones(2, 2), "root": torch.ones(2, 3, 7, 7), "unit": torch.ones(2, 2, 1, 1)}
    weights |= {"projection": projection.T, "like it": projection.T + 1, "head": torch.ones(5, 64)}
    part = drawn(
        weights,
        ("MatMul", "shape", "table", "x0"),
        ("Conv", "images", "root", "x1"),
        ("Conv", "x1", "unit", "x2"),
        ("MatMul", "x2", "projection", "x3"),
        ("MatMul", "x3", "like it", "x4"),
        ("MatMul", "x4", "x3", "x5"),
        ("Gemm", "x5", "head", "x6"),
    )
    graph = build_graph(model)
    assert int8._choose_nodes(part, graph, ("MatMul", "Conv")) == ["table", "unit", "like it"]
    assert int8._choose_nodes(part, graph, ("MatMul",)) == ["table", "like it"]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hybrid", "bit"])
@pytest.mark.parametrize("with_preprocessing", [False, True])
def test_the_ends_of_resnets_stay_in_float32(form, with_preprocessing, tmp_path):
    model = resnet(form)
    inputs = pixels(1, 40, 50) if with_preprocessing else images(1, 3, 32, 32)
    int8.write_int8(build_graph(model, with_preprocessing), tmp_path / "model.onnx", [inputs])
    held = onnx.load(tmp_path / "model.onnx").graph.initializer
    floats = {
        tuple(tensor.dims) for tensor in held if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) > 1
    }
    bytes_ = {tuple(tensor.dims) for tensor in held if tensor.data_type == onnx.TensorProto.INT8}
    assert (64, 3, 7, 7) in floats
    assert {(64, 64, 3, 3), (128, 128, 3, 3)} <= bytes_ - floats
    if form == "hybrid":
        assert (512, 32) in floats - bytes_  # the projection
        assert (32, 96) in bytes_ - floats  # qkv


def test_a_model_that_int8_ruins_is_refused(model, folder, dynamic, tmp_path, monkeypatch):
    """Its head is turned, so that guesses differ, as they would with ranges that are wrong."""
    file = onnx.load(dynamic[0])
    fives = [tensor for tensor in file.graph.initializer if tuple(tensor.dims) == (5,)]
    (bias,) = [tensor for tensor in fives if numpy_helper.to_array(tensor).max() == 4]
    values = torch.tensor([0.0, 0.0, 4.0, 0.0, 0.0])
    bias.CopyFrom(numpy_helper.from_array(values.numpy(), bias.name))
    content = file.SerializeToString()
    monkeypatch.setattr(workflow, "write_int8", lambda graph, draft, calibration: draft.write_bytes(content))
    with pytest.raises(ExportError, match="95%"):
        export(model, tmp_path / "model.onnx", "onnx-int8", images=str(folder))
    assert list(tmp_path.iterdir()) == []
