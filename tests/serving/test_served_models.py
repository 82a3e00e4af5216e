"""What a server makes of its arguments, of labels, of ONNX files, and of the part of a photo that a model sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from running import COMMAND, expected, free_port, image, make_model

import vitrail
from vitrail.config import Preprocessing
from vitrail.data.transforms.preprocess import resize_and_crop
from vitrail.errors import ConfigError, WeightsError
from vitrail.exporting.export import export
from vitrail.inference.class_names import list_wnids, make_display_labels
from vitrail.inference.engine import open_engine
from vitrail.serving.batching import QueueLimits
from vitrail.serving.endpoints import encode_grey_png
from vitrail.serving.image_decoding import find_visible_box
from vitrail.serving.serve import name_models, open_served_model, read_token, serve
from vitrail.serving.served_model import ImageRequest, ServedModel
from vitrail.serving.settings import ServerSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("resize", ["squash", "cover"])
@pytest.mark.parametrize("crop", [1.0, 0.875, 0.5])
@pytest.mark.parametrize("size", [(300, 400), (400, 300), (256, 256), (2000, 60)])
def test_the_part_seen_is_where_the_pixels_come_from(resize, crop, size):
    """An image whose colours say where they are: the middle of what is seen, and how far it reaches."""
    height, width = size
    preprocessing = Preprocessing(image_size=(64, 48), resize=resize, crop_fraction=crop)
    down = torch.linspace(0, 250, height)[:, None].expand(size)
    across = torch.linspace(0, 250, width)[None].expand(size)
    seen = resize_and_crop(torch.stack([down, across, down]).to(torch.uint8), preprocessing).float() / 250
    left, top, part_width, part_height = find_visible_box(height, width, preprocessing)
    assert 0 <= left < left + part_width <= 1 + 1e-9
    assert seen[0].mean() == pytest.approx(top + part_height / 2, abs=0.02)
    assert seen[1].mean() == pytest.approx(left + part_width / 2, abs=0.02)
    # From the first row to the last, whose middles are half a pixel inside.
    assert seen[0, -1].mean() - seen[0, 0].mean() == pytest.approx(part_height * 63 / 64, abs=0.02)
    assert seen[1, :, -1].mean() - seen[1, :, 0].mean() == pytest.approx(part_width * 47 / 48, abs=0.02)


def test_a_map_of_nothing_is_a_black_picture():
    assert encode_grey_png(np.zeros((2, 3))).startswith(b"\x89PNG")


def test_labels_are_words():
    assert make_display_labels(None, 0) == ()
    assert make_display_labels(None, 2) == ("class 0", "class 1")
    assert make_display_labels(("cat", "n01440764"), 2) == ("cat", "tench")
    usual = make_display_labels(None, 1000)
    assert usual[0] == "tench"
    assert len(set(usual)) == 1000
    assert sum(label.startswith("crane (n") for label in usual) == 2
    assert usual == make_display_labels(list_wnids(), 1000)


def test_models_by_name(tmp_path):
    assert name_models(["a/b/vit"]) == {"vit": "a/b/vit"}
    assert name_models(["hf:owner/name@main", "two=timm:vit_tiny", "c.onnx"]) == {
        "name": "hf:owner/name@main",
        "two": "timm:vit_tiny",
        "c": "c.onnx",
    }
    (tmp_path / "a=b").mkdir()
    assert name_models([str(tmp_path / "a=b")]) == {"a-b": str(tmp_path / "a=b")}
    for wrong in (["x", "y/x"], ["name="]):
        with pytest.raises(ConfigError):
            name_models(wrong)


def test_wrong_settings_are_told(tmp_path, folder):
    for wrong in (
        {"port": 0},
        {"limits": QueueLimits(batch=0)},
        {"limits": QueueLimits(batch=8, queue=4)},
        {"limits": QueueLimits(deadline=0)},
        {"limits": QueueLimits(wait=float("inf"))},
        {"limits": QueueLimits(deadline=float("nan"))},
        {"threads": 0},
        {"token": ""},
        {"token": "two\nlines"},
    ):
        with pytest.raises(ConfigError):
            ServerSettings(**wrong)
    with pytest.raises(ConfigError, match="--model"):
        serve([])
    with pytest.raises(ConfigError, match="did you mean 'onnx'"):
        serve(folder, backend="onx")
    with pytest.raises(ConfigError, match="queue"):
        serve(folder, batch=8, queue=4)
    with pytest.raises(ConfigError, match="--backend onnx"):
        open_served_model("a", str(folder), "onnx")
    with pytest.raises(ConfigError, match="exported"):
        open_served_model("a", "b.onnx", "torch")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a file"):
        read_token(tmp_path / "pipe")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_token(tmp_path / "empty")


def test_the_token_may_come_from_the_environment(monkeypatch):
    assert read_token(None) is None
    monkeypatch.setenv("VITRAIL_TOKEN", "abc")
    assert read_token(None) == "abc"
    monkeypatch.setenv("VITRAIL_TOKEN", "")  # a secret that did not arrive must not open the door
    with pytest.raises(ConfigError, match="VITRAIL_TOKEN"):
        read_token(None)


def test_a_port_that_is_taken_is_told(folder):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="listened"):
            serve(folder, port=taken.getsockname()[1])


def test_weights_that_are_no_numbers_are_not_served(folder):
    damaged = vitrail.load(folder)
    torch.nn.init.constant_(damaged.head.bias, torch.nan)
    with pytest.raises(WeightsError, match="not finite"):
        ServedModel("tiny", open_engine(damaged)).warm_up(2)


def test_one_image_that_makes_no_numbers_is_told_and_its_neighbours_are_answered(folder, monkeypatch):
    model = open_served_model("tiny", str(folder))
    ready = [model.decode(ImageRequest(kind, image(number))) for number in range(3) for kind in ("classify", "embed")]
    good = model.compute(ready)

    def spoilt(give):
        def given(pixels):
            found = give(pixels).copy()
            found[1, 0] = np.nan
            return found

        return given

    for name in ("predict", "embed"):
        monkeypatch.setattr(model.engine, name, spoilt(getattr(model.engine, name)))
    found = model.compute(ready)
    assert [one for place, one in enumerate(found) if place not in (2, 3)] == good[:2] + good[4:]
    for refusal in found[2:4]:
        assert refusal.status == 422
        assert refusal.code == "no_number"


def test_one_batch_of_all_kinds(folder):
    model = open_served_model("tiny", str(folder))
    kinds = ("embed", "classify", "attention", "classify", "embed")
    ready = [model.decode(ImageRequest(kind, image(number), 2)) for number, kind in enumerate(kinds)]
    found = model.compute(ready)
    alone = [model.compute([one])[0] for one in ready]
    assert len(found[0]) == 32
    assert [len(found[place]) for place in (1, 3)] == [2, 2]
    assert found[2].maps.shape == (2, 4, 4)
    for together, one in zip(found, alone, strict=True):
        values = [together, one] if not hasattr(one, "maps") else [together.maps, one.maps]
        numbers = [[share for _, share in row] if isinstance(row[0], tuple) else row for row in values]
        np.testing.assert_allclose(*numbers, atol=1e-5)


@pytest.fixture(scope="module")
def onnx_file(folder, tmp_path_factory):
    """Of another make: the metadata and the names are all that the server knows of."""
    onnx = pytest.importorskip("onnx", reason="the extra `export` is not installed")
    pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    model = vitrail.load(folder)
    size = int(np.prod((3, 16, 16)))
    weight = np.random.default_rng(0).normal(size=(size, 7)).astype(np.float32) / 10
    nodes = [
        onnx.helper.make_node("Flatten", ["images"], ["flat"]),
        onnx.helper.make_node("MatMul", ["flat", "weight"], ["logits"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "linear",
        [onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["batch", 3, 16, 16])],
        [onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 7])],
        [onnx.numpy_helper.from_array(weight, "weight")],
    )
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    plain = tmp_path_factory.mktemp("onnx") / "plain.onnx"
    onnx.save(made, plain)
    told = {"labels": json.dumps([f"l{n}" for n in range(7)]), "preprocessing": model.preprocessing.model_dump_json()}
    onnx.helper.set_model_props(made, told)
    onnx.save(made, plain.with_name("linear.onnx"))
    return plain.with_name("linear.onnx"), weight, model.preprocessing


def test_an_onnx_file_is_served(onnx_file):
    from vitrail.data.transforms.preprocess import prepare

    path, weight, preprocessing = onnx_file
    model = open_served_model("linear", str(path), threads=1)
    model.warm_up(3)
    assert model.facts["attention"] is False
    assert model.facts["embedding"] is None
    found = model.compute([model.decode(ImageRequest("classify", image(number), 7)) for number in range(3)])
    for number, rows in enumerate(found):
        logits = prepare(image(number), preprocessing).reshape(1, -1) @ torch.from_numpy(weight)
        want = logits.softmax(dim=1)[0].numpy()
        np.testing.assert_allclose([dict(rows)[f"l{place}"] for place in range(7)], want, atol=1e-5)


@pytest.mark.parametrize("kind", ["onnx", "onnx-int8"])
@pytest.mark.slow
def test_what_was_exported_is_served(folder, tmp_path, kind):
    """And whoever else is in the batch changes nothing, though int8 without calibration has one range for all."""
    for name in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(name, reason="the extra `export` is not installed")
    export(vitrail.load(folder), tmp_path / "tiny.onnx", kind)
    model = open_served_model("tiny", str(tmp_path / "tiny.onnx"), threads=1)
    model.warm_up(2)
    contents = [image(number) for number in range(4)] + [image(5, (300, 10))]
    ready = [model.decode(ImageRequest("classify", content, 7)) for content in contents]
    together, alone = model.compute(ready), [model.compute([one])[0] for one in ready]
    for content, row, lone in zip(contents, together, alone, strict=True):
        assert [label for label, _ in row] == [label for label, _ in lone]
        np.testing.assert_allclose([share for _, share in row], [share for _, share in lone], atol=1e-6)
        best = np.sort(expected(folder, content))[::-1]
        np.testing.assert_allclose([share for _, share in row], best, atol=1e-5 if kind == "onnx" else 0.1)


def test_onnx_files_that_cannot_be_served(onnx_file, tmp_path):
    with pytest.raises(WeightsError, match="prepared"):
        open_served_model("plain", str(onnx_file[0].with_name("plain.onnx")), threads=1)
    (tmp_path / "broken.onnx").write_bytes(b"nothing")
    with pytest.raises(WeightsError, match="no ONNX file"):
        open_served_model("broken", str(tmp_path / "broken.onnx"), threads=1)


def test_the_server_computes_what_the_model_does(folder):
    model = open_served_model("tiny", str(folder))
    (rows,) = model.compute([model.decode(ImageRequest("classify", image(3), 7))])
    np.testing.assert_allclose([share for _, share in rows], np.sort(expected(folder, image(3)))[::-1], atol=1e-6)


def test_the_command_explains_itself():
    said = subprocess.run([sys.executable, "-c", COMMAND, "--help"], capture_output=True, text=True, check=True).stdout
    for option in ("--model", "--host", "--port", "--backend", "--batch", "--wait", "--queue", "--deadline"):
        assert option in said
    code = "import sys, vitrail.cli.serve; print(*{'torch', 'starlette', 'granian'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
    assert 0 < free_port() < 65536
