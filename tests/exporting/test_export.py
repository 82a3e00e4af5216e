"""`export` from Python: its result, its events, its errors, and that the model stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from exported import made
from PIL import Image

import vitrail
from vitrail.errors import ConfigError, DataError, ExportError, NotApplicableError, WeightsError
from vitrail.exporting.export import export, guess_kind
from vitrail.exporting.graphs import build_graph, copy_in_float32
from vitrail.exporting.images import pick_images
from vitrail.inference.prepare import fit_image


@pytest.fixture
def events(monkeypatch):
    monkeypatch.setattr("vitrail.exporting.check.TIMED", 1)
    return []


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """A saved model."""
    return vitrail.save(made(), tmp_path_factory.mktemp("model") / "saved")


def test_a_model_by_name(named, tmp_path, events):
    result = export(named, tmp_path / "model.pt2", size="20x24", on_event=lambda *event: events.append(event))
    assert result.path == tmp_path / "model.pt2"
    assert result.path.stat().st_size == result.export_bytes
    assert result.kind == "torch"  # by the suffix
    assert result.max_difference <= result.tolerance
    assert "7×3×20×24" in result.sizes
    kinds = [kind for kind, _ in events]
    assert list(dict.fromkeys(kinds)) == ["loading", "writing", "comparing", "progress"]
    assert events[0][1] == {"model": str(named)}
    assert events[1][1] == {"kind": "torch", "path": str(result.path)}
    assert events[2][1] == {"images": result.images, "images_from": result.images_from}
    assert events[-1][1]["done"] == events[-1][1]["total"] > result.images
    assert json.loads(json.dumps(events))


def test_the_result_reads_well(tmp_path, events):
    folder = tmp_path / "<b>"
    result = export(made(), folder / "model.pt2", on_event=lambda *event: events.append(event))
    assert events[0][0] == "writing"  # nothing was loaded
    assert "100.00%" in repr(result)
    assert str(folder) in repr(result)
    assert "<b>" not in result._repr_html_().replace("<b>ExportResult", "")
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["written"] == str(folder / "model.pt2")
    assert "path" not in plain
    assert plain["sizes"] == list(result.sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_the_model_is_not_changed(tmp_path, events, dtype):
    model = made().to(dtype).train()
    model.head.weight.requires_grad_(False)
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    result = export(model, tmp_path / "model.pt2", size=20, on_event=lambda *event: events.append(event))
    assert "7×3×20×20" in result.sizes
    assert model.training
    assert model.image_size == model.preprocessing.image_size == (16, 16)
    for name, tensor in model.state_dict(keep_vars=True).items():
        own, copied = before[name]
        assert tensor is own
        assert tensor.dtype == dtype
        assert torch.equal(tensor, copied)
    assert [name for name, each in model.named_parameters() if not each.requires_grad] == ["head.weight"]


def test_weights_in_float32_are_shared_and_not_copied():
    model = made()
    copied = copy_in_float32(model)
    assert copied is not model
    assert copied.head.weight.data_ptr() == model.head.weight.data_ptr()
    half = copy_in_float32(made().half())
    assert {tensor.dtype for tensor in half.state_dict().values()} == {torch.float32}


def test_images_are_those_of_the_predictor(tmp_path):
    """A large photo too: it is not made smaller first."""
    model = made()
    model.preprocessing = model.preprocessing.model_copy(update={"crop_fraction": 0.8})
    pixels = np.random.default_rng(0).integers(0, 256, (900, 700, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "large.png")
    Image.fromarray(pixels[:30, :20]).save(tmp_path / "small.jpg")
    graph = build_graph(model)
    for given in (tmp_path, [tmp_path / "large.png", (tmp_path / "small.jpg").read_bytes()]):
        picked = pick_images(graph, given, 9)
        expected = [fit_image(tmp_path / name, model.preprocessing) for name in ("large.png", "small.jpg")]
        assert [each.tolist() for each in picked.measured] == [each.tolist() for each in expected]


def test_a_list_of_images(tmp_path, events):
    images = [Image.new("RGB", (20 + number, 18), (number, 90, 200)) for number in range(3)]
    result = export(made(), tmp_path / "a.pt2", images=images, on_event=lambda *event: events.append(event))
    assert result.images == 3
    assert "3 images" in result.images_from


@pytest.mark.parametrize(
    ("asked", "error", "told"),
    [
        ({"model": "nowhere"}, WeightsError, "nowhere"),
        ({"model": 3}, ConfigError, "int is no model"),
        ({"target": "model.txt"}, ConfigError, "onnx"),
        ({"to": "torhc"}, ConfigError, "did you mean 'torch'"),
        ({"size": "big"}, ConfigError, "as in 224x320"),
        ({"images": "nowhere"}, DataError, "does not exist"),
        ({"images": []}, DataError, "empty"),
        ({"model": made(in_channels=5)}, NotApplicableError, "5"),
    ],
)
def test_errors_are_exceptions_and_nothing_is_written(tmp_path, monkeypatch, asked, error, told):
    monkeypatch.chdir(tmp_path)
    options = {"model": made(), "target": "model.pt2", **asked}
    with pytest.raises(error, match=told):
        export(options.pop("model"), options.pop("target"), **options, on_event=lambda kind, values: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ExportError])
def test_an_interrupted_export_leaves_the_old_file(tmp_path, stop):
    def listen(kind, values):
        if kind == "comparing":
            raise stop

    (tmp_path / "model.pt2").write_bytes(b"from before")
    with pytest.raises(stop):
        export(made(), tmp_path / "model.pt2", on_event=listen)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"from before"]


def test_kinds_by_suffix():
    assert [guess_kind(Path(f"a.{suffix}")) for suffix in ("onnx", "pt2", "xml")] == ["onnx", "torch", "openvino"]
