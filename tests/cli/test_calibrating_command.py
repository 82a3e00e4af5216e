"""calibrate as a person types it, and what predict then prints."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from PIL import Image

import vitrail
from calibrated import calibrate_once, calibrated_model, draw_noise, draw_plain, make_model
from vitrail.inference.predictor import Predictor


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A calibrated and a plain model, a known and a strange image."""
    folder = tmp_path_factory.mktemp("calibrated")
    vitrail.save(calibrated_model(), folder / "sure")
    vitrail.save(make_model(), folder / "plain")
    (folder / "images").mkdir()
    known, strange = draw_noise(4, seed=8)[0][0], draw_plain(2)[0][0]
    for name, pixels in (("known", known), ("strange", strange)):
        Image.fromarray(pixels).save(folder / "images" / f"{name}.png")
    return folder


@pytest.fixture
def predict(run, folder, monkeypatch):
    monkeypatch.chdir(folder)
    return lambda *words, model="sure": run("predict", "images", *words, "--model", model, "--device", "cpu")


def test_text_json_and_csv_say_the_same(predict, folder):
    images = [str(folder / "images" / f"{name}.png") for name in ("known", "strange")]
    predictor = Predictor(folder / "sure", device="cpu")
    sets, familiarities = predictor.sets(images, coverage=0.9), predictor.unknown(images)
    assert [each.is_unknown for each in familiarities] == [False, True]
    words = ("--coverage", "0.9", "--unknown")
    text = [line.split("\t") for line in predict(*words)[1].splitlines()]
    assert [line[1] for line in text] == ["known", "unknown"]
    assert [line[2::2] for line in text] == [[name for name, _ in ranked] for ranked in sets]
    objects = [json.loads(line) for line in predict("--json", *words)[1].splitlines()]
    assert [each["unknown"] for each in objects] == [False, True]
    assert [len(each["labels"]) for each in objects] == [len(ranked) for ranked in sets]
    assert objects[0]["known_share"] == pytest.approx(familiarities[0].share, abs=0.005)
    rows = list(csv.DictReader(io.StringIO(predict("--csv", *words)[1])))
    assert [row["label"] for row in rows] == [name for ranked in sets for name, _ in ranked]
    assert {row["file"]: row["unknown"] for row in rows} == {"images/known.png": "false", "images/strange.png": "true"}


@pytest.mark.parametrize(("form", "ending"), [("--json", "jsonl"), ("--csv", "csv")])
def test_a_file_has_what_is_printed(predict, tmp_path, form, ending):
    words, out = ("--unknown", "--coverage", "0.9"), tmp_path / f"out.{ending}"
    code, told, _ = predict(*words, "--out", str(out))
    assert (code, told) == (0, "")
    assert out.read_text() == predict(*words, form)[1]
    assert "known_share" in out.read_text()


def test_one_of_the_two_alone(predict):
    assert all(len(line.split("\t")) == 8 for line in predict("--unknown")[1].splitlines())  # all three labels
    assert all("unknown" not in json.loads(line) for line in predict("--json", "--coverage", "0.9")[1].splitlines())
    assert predict("--csv")[1].splitlines()[0] == "file,rank,label,probability"


def test_a_model_without_classes_tells_unknown_images(predict, folder):
    model = vitrail.create_model("Ti/4", num_classes=0, image_size=16, width=32, depth=1, num_heads=2, mlp_dim=32)
    result = vitrail.calibrate(model, draw_noise(120), device="cpu", on_event=lambda kind, values: None)
    vitrail.save(result.model, folder / "bare")
    assert [line.split("\t")[1] for line in predict("--unknown", model="bare")[1].splitlines()] == ["known", "unknown"]


@pytest.mark.parametrize(
    ("words", "model", "reason"),
    [
        (("--coverage", "0.9"), "plain", "vitrail calibrate --model MODEL"),
        (("--unknown",), "plain", "cannot tell unknown images"),
        (("--coverage", "95"), "sure", "did you mean 0.95"),
    ],
)
def test_what_is_not_fitted_or_no_share_is_refused(predict, words, model, reason):
    code, _, stderr = predict(*words, model=model)
    assert code == 2
    assert reason in stderr


def write_table(folder: Path, pairs) -> Path:
    """Write images in one folder for each class."""
    for number, (pixels, label) in enumerate(pairs):
        (folder / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return folder


def test_the_command_fits_what_the_function_fits(run, tmp_path):
    folder = vitrail.save(make_model(), tmp_path / "model")
    data, unlike = write_table(tmp_path / "data", draw_noise(120)), write_table(tmp_path / "other", draw_plain(20))
    words = ("--model", str(folder), "--data", str(data), "--device", "cpu")
    code, _, stderr = run("calibrate", *words)
    assert (code, "--no-sets" in stderr) == (1, True)
    code, stdout, _ = run("calibrate", *words, "--no-sets", "--unlike", str(unlike))
    assert (code, "unknown images: by" in stdout) == (0, True)
    told = json.loads(run("calibrate", *words, "--no-sets", "--unlike", str(unlike), "--json")[1])
    assert (told["images"], set(told["aurocs"])) == (120, {"softmax", "energy", "neighbours"})
    assert vitrail.load(folder).reliability.unknown.kind == told["score"]


def test_the_result_reads_well():
    tables = calibrate_once(unlike=True).tables()
    assert tables["Sets of labels"][0] == ("coverage", "right label inside", "labels in a set", "sets of one label")
    assert len(tables["Scores of unknown images"]) == 4
    json.dumps(calibrate_once().to_dict())
