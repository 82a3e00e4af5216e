"""Models of other tasks than labels in other libraries' formats: the weights stay, and what is lost is said."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import vitrail
from samples import images
from task_models import OTHERS, TASKS, make_task_model
from vitrail.model.base import ImageModel
from vitrail.tasks.tags import Tags
from vitrail.weights.card import format_model_card


@torch.no_grad()
def compute(model: ImageModel) -> np.ndarray:
    return model(images(4, model.image_size)).numpy()


@pytest.mark.parametrize("kind", OTHERS)
def test_native_keeps_the_task(tmp_path, kind):
    model = make_task_model(kind)
    result = vitrail.convert(model, tmp_path / "kept", "native")
    assert result.notes == ()
    loaded = vitrail.load(tmp_path / "kept")
    assert loaded.task == TASKS[kind]
    np.testing.assert_array_equal(compute(loaded), compute(model))


@pytest.mark.parametrize("to", ["timm", "google"])
@pytest.mark.parametrize("kind", OTHERS)
def test_a_format_without_tasks_says_so(tmp_path, kind, to):
    model = make_task_model(kind)
    result = vitrail.convert(model, tmp_path / "other", to)
    (note,) = [note for note in result.notes if "no place for the task" in note]
    assert TASKS[kind].summarise() in note
    assert note in (tmp_path / "other" / "README.md").read_text()
    assert note in repr(result)
    np.testing.assert_allclose(compute(vitrail.load(tmp_path / "other").eval()), compute(model), atol=1e-4)


def test_transformers_gets_multi_label_classification(tmp_path):
    result = vitrail.convert(make_task_model("tags"), tmp_path / "tags", "huggingface")
    (note,) = [note for note in result.notes if "thresholds" in note]
    assert "groups of tags: take the softmax" in note
    config = json.loads((tmp_path / "tags" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert list(config["id2label"].values()) == ["cat", "indoor", "Größe", "night"]
    assert vitrail.load(tmp_path / "tags").task == Tags(names=("cat", "indoor", "Größe", "night"))


def test_transformers_gets_regression_and_the_units(tmp_path):
    result = vitrail.convert(make_task_model("numbers"), tmp_path / "numbers", "huggingface")
    assert json.loads((tmp_path / "numbers" / "config.json").read_text())["problem_type"] == "regression"
    assert "age is 40 + 12.5 × output, price is 0.001 + 0.0002 × output" in " ".join(result.notes)


def test_labels_have_no_problem_type(tmp_path):
    result = vitrail.convert(make_task_model("labels"), tmp_path / "labels", "huggingface")
    assert not any("task" in note for note in result.notes)
    assert "problem_type" not in json.loads((tmp_path / "labels" / "config.json").read_text())


@pytest.mark.parametrize("kind", OTHERS)
def test_the_card_names_the_task_and_its_use(tmp_path, kind):
    model = make_task_model(kind)
    card = format_model_card(model, "mine", "native")
    assert f"| task | {TASKS[kind].summarise()}: {TASKS[kind].value_names[0]}" in card
    assert "| classes |" not in card
    (line,) = [line for line in card.splitlines() if line.startswith("vitrail.Predictor(model)")]
    assert f"# {{'{next(iter(TASKS[kind].answer(TASKS[kind].make_example())))}'" in line
    assert ("pipeline_tag" in card) == TASKS[kind].gives_probabilities
    labels = format_model_card(make_task_model("labels"), "mine", "native")
    assert "| classes | 3: cat, dog, Größe |" in labels
    assert "Predictor" not in labels
