"""ONNX files compute what their models do, say how to use them, and are there only if they do."""

from __future__ import annotations

import json

import onnx
import pytest
import torch
from exported import difference, images, made
from onnx import numpy_helper

import vitrail
from vitrail.config import Origin, Preprocessing
from vitrail.errors import ConfigError, ExportError
from vitrail.exporting import export as workflow
from vitrail.exporting.export import KINDS, export
from vitrail.exporting.onnx import open_onnx

LABELS = ("ant", "bee", "café", "dog", "eel")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A model with labels, from float16 as files are, and its export."""
    model = made().half()
    model.labels = LABELS
    model.origin = Origin(source="somewhere", format="native", licence="apache-2.0")
    path = tmp_path_factory.mktemp("plain") / "model.onnx"
    checked = export(model, path)
    assert next(model.parameters()).dtype == torch.float16
    return model.float(), path, checked


@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_any_batch(plain, count):
    model, path, _ = plain
    assert difference(open_onnx(path), model, images(count, 3, 16, 16)) <= 1e-4


def test_what_travels_along(plain):
    _, path, _ = plain
    file = onnx.load(path)
    carried = {entry.key: entry.value for entry in file.metadata_props}
    assert json.loads(carried["labels"]) == list(LABELS)
    assert Preprocessing(**json.loads(carried["preprocessing"])) == Preprocessing(image_size=16)
    assert json.loads(carried["architecture"])["width"] == 32
    assert (carried["vitrail"], carried["licence"]) == (vitrail.__version__, "apache-2.0")
    assert [value.name for value in (*file.graph.input, *file.graph.output)] == ["images", "logits"]
    assert {each.domain: each.version for each in file.opset_import}[""] == 20
    assert file.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_no_folder_of_this_machine_is_in_the_file(plain):
    _, path, _ = plain
    assert b"/vitrail/" not in path.read_bytes()


def test_what_was_measured(plain):
    _, path, checked = plain
    assert checked.max_difference <= 1e-4
    assert checked.agreement == 1
    assert checked.export_bytes == path.stat().st_size
    assert checked.model_bytes < checked.export_bytes  # float16 as it was loaded, float32 as it is written
    assert min(checked.export_milliseconds, checked.model_milliseconds) > 0
    assert {size.split("×")[0] for size in checked.sizes} == {"1", "7"}
    assert json.loads(json.dumps(checked.to_dict()))["kind"] == "onnx"


def test_nothing_but_the_file_is_written(plain):
    _, path, _ = plain
    assert [each.name for each in path.parent.iterdir()] == ["model.onnx"]


@pytest.mark.slow
def test_weights_of_two_gigabytes_lie_beside(tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.exporting.onnx.MOST_INSIDE", 1000)
    model = made()
    checked = export(model, tmp_path / "model.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
    assert checked.export_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert difference(open_onnx(tmp_path / "model.onnx"), model, images(2, 3, 16, 16)) <= 1e-4


def planted(monkeypatch, write) -> None:
    """Another writer for ONNX."""
    suffix, _, opened = KINDS["onnx"]
    monkeypatch.setitem(workflow.KINDS, "onnx", (suffix, write, opened))


def spoiled(path, amount):
    """The bytes of a file with `amount` added to one of its weights."""
    file = onnx.load(path)
    weight = max(file.graph.initializer, key=lambda tensor: numpy_helper.to_array(tensor).size)
    values = numpy_helper.to_array(weight).copy()
    values.flat[0] += amount
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    return file.SerializeToString()


@pytest.mark.parametrize(
    ("amount", "told"), [(0.5, "computes something else than its model"), (float("nan"), "no numbers")]
)
def test_a_wrong_weight_is_found(plain, tmp_path, monkeypatch, amount, told):
    model, path, _ = plain
    content = spoiled(path, amount)
    planted(monkeypatch, lambda graph, draft: draft.write_bytes(content))
    with pytest.raises(ExportError, match=told):
        export(model, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no model"])
def test_what_does_not_run_is_not_written(tmp_path, monkeypatch, content):
    (tmp_path / "model.onnx").write_bytes(b"from before")
    planted(monkeypatch, lambda graph, draft: draft.write_bytes(content))
    with pytest.raises(ExportError, match="onnxruntime cannot open"):
        export(made(), tmp_path / "model.onnx")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"from before"]


def test_an_export_of_another_shape_is_found(plain, tmp_path, monkeypatch):
    content = plain[1].read_bytes()
    planted(monkeypatch, lambda graph, draft: draft.write_bytes(content))
    with pytest.raises(ExportError, match="cannot run"):
        export(made(), tmp_path / "model.onnx", dynamic_size=True)  # the file takes one size only
    with pytest.raises(ExportError, match="of shape"):
        export(made(num_classes=4), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "asked", "told"),
    [
        ({"position": "relative"}, {"dynamic_size": True}, "relative position embeddings"),
        ({}, {"dynamic_size": True, "with_preprocessing": True}, "leave dynamic_size"),
        ({}, {"to": "onxx"}, "did you mean 'onnx'"),
        ({}, {"to": "torch"}, "ends in .pt2"),
    ],
)
def test_what_cannot_be(tmp_path, options, asked, told):
    with pytest.raises(ConfigError, match=told):
        export(made(**options), tmp_path / "model.onnx", **asked)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_not_replaced(tmp_path):
    (tmp_path / "model.onnx").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        export(made(), tmp_path / "model.onnx")


def test_sizes_as_people_write_them():
    assert workflow.parse_size("384") == 384
    assert workflow.parse_size("224x320") == workflow.parse_size("224×320") == (224, 320)
    assert workflow.parse_size(384) == 384
    assert workflow.parse_size((224, 320)) == (224, 320)
    for wrong in ("", "x", "0", "224x", "1x2x3", "-4", 0, -4, (1, 2, 3), ()):
        with pytest.raises(ConfigError, match="size"):
            workflow.parse_size(wrong)


def test_without_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(vitrail.MissingExtraError, match=r"vitrail\[export\]"):
        export(made(), tmp_path / "model.onnx")
    monkeypatch.setitem(__import__("sys").modules, "openvino", None)
    with pytest.raises(vitrail.MissingExtraError, match=r"vitrail\[openvino\]"):
        export(made(), tmp_path / "model.xml", "openvino")
    assert list(tmp_path.iterdir()) == []
