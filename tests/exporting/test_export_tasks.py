"""Exports of models of every task: checked by their own measures, and answered from in onnxruntime like the model."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

import vitrail
from task_models import OTHERS, TASKS, make_task_model
from vitrail.data.transforms.preprocess import prepare
from vitrail.exporting import check
from vitrail.exporting.export import export
from vitrail.inference.predictor import Predictor
from vitrail.tasks.registry import read_task


def draw_photo(seed: int, height: int = 30, width: int = 40) -> np.ndarray:
    """Return (height, width, 3) uint8: a coarse pattern, which survives a resize."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


PHOTOS = [draw_photo(seed) for seed in range(8)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function that gives the ONNX file of a kind of task, which is written once."""
    root, made = tmp_path_factory.mktemp("exported"), dict[str, Path]()

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = export(make_task_model(kind), root / f"{kind}.onnx").path
        return made[kind]

    return make


@pytest.mark.parametrize("kind", OTHERS)
def test_an_exported_file_answers_like_its_model(exported, kind):
    ours, theirs = Predictor(make_task_model(kind), device="cpu"), Predictor(exported(kind))
    assert theirs.engine.runtime == "onnxruntime"
    assert theirs.task == TASKS[kind]
    np.testing.assert_allclose(theirs.values(PHOTOS), ours.values(PHOTOS), rtol=1e-3, atol=1e-4)
    for found, expected in zip(theirs.answers(PHOTOS), ours.answers(PHOTOS), strict=True):
        assert [(line.name, line.is_chosen) for line in found.lines] == [
            (line.name, line.is_chosen) for line in expected.lines
        ]
    (result,) = vitrail.predict(PHOTOS[0], exported(kind), on_event=lambda *event: None)
    assert result.answer == theirs.answers(PHOTOS[0])[0]


@pytest.mark.parametrize("kind", OTHERS)
def test_the_file_names_its_task(exported, kind):
    metadata = onnxruntime.InferenceSession(exported(kind)).get_modelmeta().custom_metadata_map
    assert read_task(json.loads(metadata["task"])) == TASKS[kind]


@pytest.mark.parametrize("with_preprocessing", [False, True])
def test_it_is_compared_on_the_images_of_its_table(tmp_path, with_preprocessing):
    """Also of one with other targets, whose images can be looked at."""
    for place, photo in enumerate(PHOTOS):
        Image.fromarray(photo).save(tmp_path / f"{place}.png")
    for name, cells in {"tags": ["cat|night"] * 8, "age": [1.5 * place for place in range(8)]}.items():
        path = tmp_path / f"{name}.csv"
        path.write_text(f"image,{name}\n" + "".join(f"{place}.png,{cell}\n" for place, cell in enumerate(cells)))
        result = export(
            make_task_model("tags"),
            tmp_path / "model.pt2",
            images=str(path),
            with_preprocessing=with_preprocessing,
            on_event=lambda *event: None,
        )
        assert result.images_from == f"8 images of {name}.csv"


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_with_preprocessing_inside_pixels_become_values(tmp_path, kind):
    model = make_task_model(kind)
    result = export(model, tmp_path / "inside.onnx", with_preprocessing=True)
    assert (result.output, result.relative, result.task) == ("values", True, kind)
    assert result.agreement_name in repr(result)
    session = onnxruntime.InferenceSession(tmp_path / "inside.onnx")
    assert [output.name for output in session.get_outputs()] == ["values"]
    (found,) = session.run(None, {"pixels": np.stack(PHOTOS)})
    expected = Predictor(model, device="cpu").values(PHOTOS)
    scales = np.array(TASKS[kind].value_scales or 1.0)
    assert (np.abs(found - expected) / scales).max() < check.ROUNDED
    assert expected.std(axis=0).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_a_program_of_torch_gives_the_outputs(tmp_path, kind):
    model = make_task_model(kind)
    export(model, tmp_path / "model.pt2", to="torch")
    images = torch.stack([prepare(photo, model.preprocessing) for photo in PHOTOS])
    extra = {"task": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra)
    with torch.inference_mode():
        torch.testing.assert_close(program.module()(images), model(images), rtol=1e-4, atol=1e-5)
    assert read_task(json.loads(extra["task"])) == TASKS[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_int8_openvino_and_compiled_files(tmp_path, kind):
    model = make_task_model(kind)
    result = export(model, tmp_path / "int8.onnx", to="onnx-int8")
    assert result.agreement is not None
    assert result.agreement >= check.AGREEMENT_ANYWHERE
    assert Predictor(tmp_path / "int8.onnx").task == TASKS[kind]
    export(model, tmp_path / "compiled.pt2", to="aoti")
    package = torch._inductor.aoti_load_package(str(tmp_path / "compiled.pt2"))
    assert read_task(json.loads(package.get_metadata()["task"])) == TASKS[kind]
    pytest.importorskip("openvino", reason="pip install openvino")
    export(model, tmp_path / "model.xml")
    ours, theirs = Predictor(model, device="cpu"), Predictor(tmp_path / "model.xml")
    np.testing.assert_allclose(theirs.values(PHOTOS), ours.values(PHOTOS), rtol=1e-3, atol=1e-3)
    assert theirs.task == TASKS[kind]


@pytest.mark.parametrize("kind", sorted(TASKS))
def test_agreement_is_measured_by_the_task(kind):
    task, rng = TASKS[kind], np.random.default_rng(0)
    outputs = torch.from_numpy(rng.normal(0, 3, (40, len(task.output_names))))
    values = task.activate(outputs).numpy()
    assert task.compare(values, values) == 1
    nearly = task.activate(outputs + 1e-6).numpy()
    assert task.compare(values, nearly) > 0.95, "rounding changes no answer"
    assert task.compare(values, values[::-1]) < 0.8


def test_bytes_of_a_photo_are_answered_by_the_file(exported):
    file = io.BytesIO()
    Image.fromarray(PHOTOS[0]).save(file, "PNG")
    ours, theirs = Predictor(make_task_model("tags"), device="cpu"), Predictor(exported("tags"))
    assert theirs(file.getvalue())["tags"] == ours(file.getvalue())["tags"]


@pytest.mark.slow
def test_the_block_on_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "give_task" in block]
    place: dict[str, Any] = {}
    exec(block, place)
    assert (place["result"].task, place["result"].agreement) == ("numbers", 1.0)


def test_agreement_of_tags_counts_those_that_both_choose():
    task = TASKS["tags"].model_copy(update={"groups": ()})  # thresholds 0.4, 0.6, 0.5, 0.5
    expected = np.array([[0.9, 0.9, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1], [0.9, 0.1, 0.1, 0.1]])
    found = np.array([[0.9, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.9, 0.1]])
    assert task.compare(expected, found) == pytest.approx((1 / 2 + 1 + 0) / 3)
    grouped = TASKS["tags"]  # the likeliest of the first two is chosen, whatever its threshold
    assert grouped.compare(expected, found) == pytest.approx((1 + 1 + 1 / 2) / 3)


def test_numbers_that_differ_in_int8_are_refused():
    task = TASKS["numbers"]
    values = np.tile(np.array([[40.0, 1e-3]]), (10, 1))
    off = values + np.array([[0.0, 0.5 * 2e-4]])  # half a deviation of the price, however small in its unit
    assert task.compare(values, off) == 0
