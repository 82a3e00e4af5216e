"""finetune calibrates by itself where at least 1,000 images chose nothing."""

from __future__ import annotations

import pytest

import vitrail
from calibrated import draw_noise, make_model
from vitrail.inference.batches import InferenceOptions
from vitrail.workflows import calibrate_trained as subject
from vitrail.workflows.calibrate_trained import calibrate_trained

OPTIONS = InferenceOptions(device="cpu")


def quiet(kind: str, values: dict[str, object]) -> None:
    """Hear nothing."""


def test_a_quick_head_is_calibrated_on_its_test_split(tmp_path):
    data = {"train": draw_noise(60, seed=1), "test": draw_noise(1000, seed=2)}
    settings = {"report": False}
    result = vitrail.finetune(
        data, make_model(), quick=True, folder=tmp_path / "run", settings=settings, on_event=quiet
    )
    reliability = vitrail.load(tmp_path / "run").reliability
    assert reliability == result.model.reliability
    assert (reliability.images, reliability.sets.images, reliability.unknown.kind) == (1000, 1000, "neighbours")
    assert "on 1,000 images that chose nothing" in repr(result)


@pytest.mark.slow
def test_a_training_is_calibrated_on_its_test_split(tmp_path):
    data = {"train": draw_noise(60, seed=1), "test": draw_noise(1100, seed=2)}
    settings = {"schedule.steps": 2, "run.report": False, "run.device": "cpu", "image_size": 16}
    call = {"folder": tmp_path / "run", "settings": settings, "on_event": quiet}
    result = vitrail.finetune(data, make_model(), **call)
    assert vitrail.load(tmp_path / "run").reliability == result.model.reliability
    assert result.model.reliability.images == 1100
    again = vitrail.finetune(data, make_model(), **call)  # it is finished: nothing is fitted anew
    assert again.model.reliability == result.model.reliability


def test_of_many_images_some_are_drawn(monkeypatch):
    monkeypatch.setattr(subject, "MOST_IMAGES", 1001)
    model, tasks = make_model(), set()
    images = vitrail.open_data(draw_noise(1100))
    calibrate_trained(model, images, OPTIONS, lambda kind, values: tasks.add(values.get("task")), "photos")
    assert (model.reliability.images, model.reliability.data, tasks) == (1001, "photos", {"calibrating"})


def test_with_too_few_images_nothing_happens():
    model = make_model()
    calibrate_trained(model, vitrail.open_data(draw_noise(999)), OPTIONS, quiet)
    calibrate_trained(model, None, OPTIONS, quiet)
    assert model.reliability is None


def test_a_problem_is_told_and_the_classifier_stays(tmp_path):
    model, told = make_model(("cat", "dog", "horse")), []
    images = vitrail.open_data(draw_noise(1000))
    calibrate_trained(model, images, OPTIONS, lambda kind, values: told.append(values.get("text")), folder=tmp_path)
    assert model.reliability is None
    assert any("the classifier could not be calibrated" in text for text in told if text)
