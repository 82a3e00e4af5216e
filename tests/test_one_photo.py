"""One photo, one answer: predict, evaluate, serve, the report and ONNX agree on 50 photographs of all formats."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from running import command_line

import vitrail
from photos import write_photos
from vitrail.data.open import open_data
from vitrail.evaluation.labels import match_classes
from vitrail.evaluation.predictions import predict_all
from vitrail.inference.batches import InferenceOptions, open_model
from vitrail.inspection.images import fit_images

pytestmark = pytest.mark.slow  # every verb, also a server and exports

PHOTOS, TOLERANCE = 50, 1e-5


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    write_photos(folder, PHOTOS, vitrail.load("pane").labels[:2])
    return folder


@pytest.fixture(scope="module")
def files(photos) -> list[Path]:
    source = open_data(photos)
    return [Path(source.name(index)) for index in range(len(source))]


@pytest.fixture(scope="module")
def expected(files) -> np.ndarray:
    """(50, K) probabilities from the predictor, one photo at a time."""
    predictor = vitrail.Predictor("pane", device="cpu")
    return np.concatenate([predictor.probabilities(file) for file in files])


def to_row(labels, names) -> np.ndarray:
    """Put (label, probability) pairs into the order of the classes."""
    row = np.full(len(names), np.nan)
    for label, probability in labels:
        row[names.index(label)] = probability
    return row


def test_photos_are_as_mixed_as_they_should_be(files, expected):
    assert len({file.suffix for file in files}) == 8
    assert len(set(expected.argmax(axis=1))) > 5  # different photos, different answers


def test_predict(photos, files, expected):
    names = vitrail.load("pane").labels
    result = vitrail.predict([str(photos)], "pane", top=len(names), batch_size=7)
    found = {Path(row.file): to_row(row.labels, names) for row in result}
    np.testing.assert_allclose([found[file] for file in files], expected, atol=TOLERANCE)


def test_the_predict_command(photos, files, expected):
    names = vitrail.load("pane").labels
    words = ["predict", str(photos), "--model", "pane", "--json", "--top", str(len(names))]
    child = subprocess.run([sys.executable, "-m", "vitrail", *words], capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in child.stdout.splitlines()]
    pairs = {Path(row["file"]): [(each["label"], each["probability"]) for each in row["labels"]] for row in rows}
    np.testing.assert_allclose([to_row(pairs[file], names) for file in files], expected, atol=TOLERANCE)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "pane.onnx"
    vitrail.export("pane", path, to="onnx")
    return path


@pytest.mark.parametrize("kind", ["model", "onnx"])
def test_evaluate(kind, photos, expected, request):
    model = "pane" if kind == "model" else request.getfixturevalue("exported")
    source, options = open_data(photos), InferenceOptions(batch_size=16, device="cpu")
    engine = open_model(model, options)
    labels = match_classes(engine.class_names, engine.num_classes, source.classes, source.num_classes)
    table = predict_all(engine, source, labels, options)
    np.testing.assert_array_equal(table.guesses, expected.argmax(axis=1))
    np.testing.assert_allclose(table.confidences, expected.max(axis=1), atol=TOLERANCE)
    classes = np.array([engine.labels.index(name) for name in source.classes])[table.labels]
    right = expected[np.arange(PHOTOS), classes]
    np.testing.assert_allclose(np.exp(-table.losses), right, atol=TOLERANCE)
    report = vitrail.evaluate(model, photos, device="cpu")
    assert report.top1.value == pytest.approx((expected.argmax(axis=1) == classes).mean())
    assert report.likelihood.value == pytest.approx(-np.log(right).mean(), abs=1e-4)


def test_onnx(exported, files, expected):
    np.testing.assert_allclose(vitrail.Predictor(exported).probabilities(files), expected, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["model", "onnx"])
def test_serve(kind, files, expected, request):
    model = "pane" if kind == "model" else str(request.getfixturevalue("exported"))
    names = vitrail.load("pane").labels
    found = []
    with command_line("--model", model) as server:
        for file in files:
            url = f"{server.url}/v1/classify?top={len(names)}"
            kinds = {"Content-Type": "application/octet-stream"}
            with urllib.request.urlopen(urllib.request.Request(url, file.read_bytes(), kinds)) as answer:
                labels = json.loads(answer.read())["labels"]
            found.append(to_row([(each["label"], each["probability"]) for each in labels], names))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_the_report(files, expected, tmp_path, monkeypatch):
    show_all = functools.partial(fit_images, show=PHOTOS)  # a report shows eight
    monkeypatch.setattr("vitrail.inspection.inspect.fit_images", show_all)
    names = vitrail.load("pane").labels
    result = vitrail.inspect("pane", images=files, out=tmp_path / "report.html", most=PHOTOS, device="cpu")
    (guesses,) = result.guesses.values()
    assert len(guesses) == PHOTOS
    for (_, labels), wanted in zip(guesses, expected, strict=True):
        row = to_row(labels, names)
        assert (~np.isnan(row)).sum() == 5
        np.testing.assert_allclose(row[~np.isnan(row)], wanted[~np.isnan(row)], atol=TOLERANCE)
