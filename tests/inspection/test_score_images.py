"""Scoring a model for its report: on which images, on how many of them, and when not at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pictures import make_folder

import vitrail
from samples import randomise
from vitrail.data.open import open_data
from vitrail.data.sources.source import compute_fingerprint
from vitrail.inspection import score_images as scoring
from vitrail.inspection.score_images import LabelledImages, estimate_affordable, open_labelled_images, score_images

SMALL = {"image_size": 16, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64, "seed": 0}


def made_model(classes, count=None):
    model = randomise(vitrail.create_model("Ti/4", num_classes=count or len(classes), **SMALL))
    model.labels = classes
    return model


@pytest.fixture(scope="module")
def data():
    draw = np.random.default_rng(0)
    return [(draw.integers(0, 255, (20, 24, 3), dtype=np.uint8), ("cat", "dog")[index % 2]) for index in range(30)]


def test_scores_are_those_of_evaluate(data):
    model = made_model(("cat", "dog"))
    scores = score_images(model, open_labelled_images(data), "it")
    assert scores.report.top1 == vitrail.evaluate(model, data).top1
    assert scores.report.model == "it"
    assert scores.remark == "30 images of a list"
    assert [scores.source.read(each.index).label for each in scores.report.mistakes] == [
        ("cat", "dog").index(each.label) for each in scores.report.mistakes
    ]


def test_what_takes_too_long_is_done_on_some_of_the_images(data, monkeypatch):
    model = made_model(("cat", "dog"))
    monkeypatch.setattr(scoring, "estimate_affordable", lambda *given: 12)
    scores = score_images(model, open_labelled_images(data), "it")
    assert scores.report.images == 12
    assert scores.remark.startswith("12 of the 30 images of a list")
    labels = scores.source.labels(0, 12)
    assert set(labels.tolist()) == {0, 1}, "evenly spread"


def test_the_estimate_follows_model_and_images(data):
    source = open_data(data)
    small, large = made_model(("cat", "dog")), vitrail.create_model("S/16", image_size=224, num_classes=2, seed=0)
    assert estimate_affordable(small, source, 15) > 10 * estimate_affordable(large, source, 15)
    assert estimate_affordable(small, source, 30) == pytest.approx(2 * estimate_affordable(small, source, 15), abs=1)
    photos = open_data([(np.zeros((2000, 3000, 3), np.uint8), 0)])
    assert estimate_affordable(small, photos, 15) < estimate_affordable(small, source, 15) / 50


@pytest.mark.parametrize("classes", [("bird", "fish"), ("cat", "bird", "fish")])
def test_labels_that_are_not_the_models_are_not_scored(data, classes):
    others = [(image, {"dog": "horse"}.get(label, "cow")) for image, label in data]
    assert score_images(made_model(classes), open_labelled_images(others), "it") is None
    assert score_images(made_model(None, count=7), open_labelled_images(data), "it") is None


def test_a_model_without_classes_is_not_scored(data):
    model = vitrail.create_model("Ti/4", num_classes=0, **SMALL)
    assert score_images(model, open_labelled_images(data), "it") is None


def test_a_class_that_the_model_does_not_know_is_left_out(data):
    third = [*data, *((image, "horse") for image, _ in data[:5])]
    scores = score_images(made_model(("cat", "dog")), open_labelled_images(third), "it")
    assert scores.report.images == 30


def test_images_without_labels_have_none(data, tmp_path):
    images = [image for image, _ in data]
    assert open_labelled_images(images) is None
    assert open_labelled_images(images[0]) is None
    assert open_labelled_images(torch.zeros(3, 8, 8, dtype=torch.uint8)) is None
    assert open_labelled_images([(image, -1) for image in images]) is None
    assert open_labelled_images(data[: scoring.LEAST_IMAGES - 1]) is None
    assert open_labelled_images(tmp_path / "photo.jpg") is None
    assert open_labelled_images(tmp_path) is None
    some = open_labelled_images([(image, index % 3 - 1) for index, image in enumerate(images)])
    assert len(some.source) == 20, "a third has no label"


def test_a_folder_of_classes_is_labelled_by_its_last_name(tmp_path):
    make_folder(tmp_path / "photos", {"cat": 6, "dog": 6})
    labelled = open_labelled_images(tmp_path / "photos")
    assert labelled.source.classes == ("cat", "dog")
    assert labelled.name == "photos"


@pytest.mark.parametrize("split", [None, "train"])
def test_images_that_were_learned_from_are_known(data, split):
    model = made_model(("cat", "dog"))
    assert not score_images(model, open_labelled_images(data), "it").report.was_trained_on
    model.learned_from = compute_fingerprint(open_data(data, split))  # of all of them, or of all but a tenth
    assert score_images(model, open_labelled_images(data), "it").report.was_trained_on
    held_out = LabelledImages(open_data(data, "val"), "what was held out")
    assert len(held_out.source) < scoring.LEAST_IMAGES
    assert score_images(model, held_out, "it") is None, "too few"
