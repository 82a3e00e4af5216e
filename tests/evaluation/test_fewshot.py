"""vitrail fewshot, from parts of data to the table that is printed."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import typer
from pictures import make_parquet
from striped import stripes
from typer.testing import CliRunner

import vitrail
from vitrail.cli.fewshot import fewshot as command
from vitrail.data.open import open_data
from vitrail.errors import ConfigError, DataError, VitrailError, WeightsError
from vitrail.evaluation.features import extract_features
from vitrail.evaluation.fewshot import METHODS, fewshot, open_train_and_test
from vitrail.evaluation.least_squares import score_few_shot
from vitrail.evaluation.neighbours import find_similar, score_knn
from vitrail.inference.batches import InferenceOptions
from vitrail.system.intervals import wilson_interval

CPU = InferenceOptions(device="cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    sizes = {"image_size": 16, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64, "pool": "average"}
    folder = tmp_path_factory.mktemp("models") / "small"
    return str(vitrail.save(vitrail.create_model("Ti/4", seed=0, num_classes=0, **sizes), folder))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    stripes(root / "whole", classes=3, images=20)
    for part, images in (("train", 12), ("val", 5), ("test", 6)):
        stripes(root / "split" / part, classes=3, images=images)
    stripes(root / "other", classes=3, images=7)
    stripes(root / "one", classes=1, images=4)
    stripes(root / "single", classes=3, images=1)
    stripes(root / "more", classes=4, images=3)
    return root


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_the_rows_are_what_the_rooms_measure(model, data):
    report = fewshot(model, str(data / "split"), shots=(1, 5), seeds=(0, 1), device="cpu")
    network = vitrail.load(model)
    train, test = (
        extract_features(network, open_data(str(data / "split"), part), CPU, None) for part in ("train", "test")
    )
    expected = [(row.shots, row.seed, row.accuracy) for row in score_few_shot(train, test, 3, (1, 5), (0, 1))]
    assert [(r.shots, r.seed, r.accuracy) for r in report.rows if r.method == "least-squares"] == expected
    (near,) = [row.accuracy for row in report.rows if row.method == "knn, k=1"]
    assert near == score_knn(train, test, 3, k=1)
    (linear,) = [row for row in report.rows if row.method == "linear"]
    assert linear.accuracy > 0.8
    assert linear.details["strength"] > 0
    assert [row.seed for row in report.rows if row.method == "clusters"] == [0, 1]
    assert (report.train_images, report.test_images, report.classes) == (36, 18, 3)
    summary = next(one for one in report.summaries() if one.shots == 5)
    accuracies = [row.accuracy for row in report.rows if row.shots == 5]
    assert summary.accuracy == pytest.approx(np.mean(accuracies))
    assert summary.deviation == pytest.approx(np.std(accuracies, ddof=1))


@pytest.fixture(scope="module")
def with_hidden_layer():
    sizes = {"image_size": 16, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64}
    return vitrail.create_model("Ti/4", seed=0, num_classes=5, representation_size=24, **sizes).eval()


def test_features_are_y_or_the_layer_before_the_logits(with_hidden_layer, data):
    quick = {"shots": (1, 5), "seeds": (0,), "methods": ["least-squares"], "device": "cpu"}
    sources = [open_data(str(data / "split"), part) for part in ("train", "test")]
    representation = [extract_features(with_hidden_layer, source, CPU, None) for source in sources]
    hidden = with_hidden_layer.head.hidden
    with torch.no_grad():
        pre_logits = [replace(part, values=torch.tanh(hidden(part.values))) for part in representation]
    for features, parts in (("representation", representation), ("pre-logits", pre_logits)):
        report = fewshot(with_hidden_layer, str(data / "split"), features=features, **quick)
        expected = [row.accuracy for row in score_few_shot(*parts, 3, (1, 5), (0,))]
        assert [row.accuracy for row in report.rows] == expected
        assert report.features == features
        assert any(note.startswith("features") and "pre-logits" in note for note in report.notes)
    assert fewshot(with_hidden_layer, str(data / "split"), **quick).features == "representation"


def test_without_a_layer_before_the_logits_the_features_are_y(model, data):
    quick = {"shots": (1,), "methods": ["least-squares"], "device": "cpu"}
    plain = fewshot(model, str(data / "split"), **quick)
    report = fewshot(model, str(data / "split"), features="pre-logits", **quick)
    assert report.rows == plain.rows
    assert report.features == "representation"
    assert "no pre-logits layer" in " ".join(report.notes)
    assert not plain.notes


def test_features_from_the_command_line(with_hidden_layer, data, run, here):
    model = str(vitrail.save(with_hidden_layer, here / "model"))
    arguments = [
        "--model",
        model,
        "--data",
        str(data / "split"),
        "--methods",
        "knn",
        "--features",
        "pre-logits",
        "--json",
    ]
    assert json.loads(run(*arguments).stdout)["features"] == "pre-logits"


def test_what_is_tested_on(data):
    def found(name, test=None):
        train, tested, told = open_train_and_test(
            str(data / name), None if test is None else test.replace("DATA", str(data))
        )
        return len(train), len(tested), told.replace(str(data), "DATA")

    assert found("split") == (36, 18, "the test part of DATA/split")
    assert found("split", "validation") == (36, 15, "the val part of DATA/split")
    assert found("whole") == (48, 12, "a fifth of every class of DATA/whole, held out")
    assert found("whole", "DATA/other") == (60, 21, "DATA/other")
    assert found("whole", "DATA/split") == (60, 18, "the test part of DATA/split")
    with pytest.raises(ConfigError, match="--test train"):
        found("split", "train")
    with pytest.raises(DataError, match="'test'"):
        found("whole", "test")


def test_the_held_out_fifth_is_not_learned_from(data):
    train, test, _ = open_train_and_test(str(data / "whole"), None)
    names = [{source.name(index) for index in range(len(source))} for source in (train, test)]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 60


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("whole", {"methods": ["least-square"]}, "'least-squares'"),
        ("whole", {"methods": ["zzz"]}, "least-squares, linear, knn, clusters"),
        ("whole", {"methods": []}, "one method"),
        ("whole", {"shots": [5, 0]}, "shots = 0"),
        ("whole", {"l2": 0}, "l2 = 0"),
        ("whole", {"l2": float("nan")}, "l2 = nan"),
        ("whole", {"l2": float("inf")}, "l2 = inf"),
        ("whole", {"features": "prelogits"}, "'pre-logits'"),
        ("one", {}, "1 class"),
        ("single", {}, "test on"),
        ("whole", {"test": "DATA/more"}, "'colour-3' is only"),
        ("more", {"test": "DATA/other"}, "'colour-3' is not"),
        ("nowhere", {}, "no data set"),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(model, data, name, options, sentence):
    if "test" in options:
        options = {**options, "test": options["test"].replace("DATA", str(data))}
    with pytest.raises(VitrailError, match=re.escape(sentence)) as raised:
        fewshot(model, str(data / name), device="cpu", **options)
    assert "\n" not in str(raised.value)


def test_classes_with_few_images_are_told(model, data):
    report = fewshot(model, str(data / "split"), shots=(5, 25), seeds=(0,), methods=["least-squares"], device="cpu")
    assert "25 shots: 3 of 3 classes have fewer images, and give all they have" in list(report.lines())
    assert not any(line.startswith("5 shots") for line in report.lines())


def test_a_class_of_one_image_leaves_the_probe_out(model, data):
    report = fewshot(
        model, str(data / "single"), str(data / "other"), shots=(1,), methods=["linear", "knn"], device="cpu"
    )
    assert [row.method for row in report.rows] == ["knn, k=20", "knn, k=1"]
    assert any(line.startswith("linear: left out") for line in report.lines())


def test_features_are_computed_once(model, data, here, monkeypatch):
    fewshot(model, str(data / "split"), methods=["knn"], device="cpu")
    assert len(list((here / "cache/features").iterdir())) == 2
    monkeypatch.setattr("vitrail.evaluation.features.run_batches", lambda *_, **__: pytest.fail("computed again"))
    fewshot(model, str(data / "split"), methods=["knn"], device="cpu")


def test_the_nearest_of_an_image_is_itself(model, data):
    image = str(data / "whole/colour-1/07.png")
    found = find_similar(model, str(data / "whole"), image, number=4, device="cpu")
    assert (found[0].name, found[0].label, found[0].similarity) == (image, "colour-1", 1.0)
    assert len(found) == 4
    assert [near.similarity for near in found] == sorted((near.similarity for near in found), reverse=True)
    with pytest.raises(DataError, match=r"nowhere\.jpg"):
        find_similar(model, str(data / "whole"), "nowhere.jpg", device="cpu")


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(command)

    def run(*arguments):
        result = CliRunner().invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


def test_the_table(run, model, data, here):
    given = ["--model", model, "--data", str(data / "whole"), "--device", "cpu", "--out", "out.json"]
    result = run(*given, "--shots", "1,5", "--seeds", "2")
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert lines[0] == ["method", "shots", "accuracy", "deviation", "95% from", "to"]
    assert [line[:2] for line in lines[1:]] == [
        ["least-squares", "1"],
        ["least-squares", "5"],
        ["linear", "all"],
        ["knn, k=20", "all"],
        ["knn, k=1", "all"],
        ["clusters", "all"],
    ]
    assert re.fullmatch(r"\d+\.\d%", lines[1][2])
    assert re.fullmatch(r"± \d+\.\d%", lines[1][3])
    assert lines[3][3] == ""
    assert [float(cell.rstrip("%")) / 100 for cell in lines[3][4:]] == pytest.approx(
        wilson_interval(round(float(lines[3][2].rstrip("%")) * 12 / 100), 12), abs=6e-4
    )
    assert "48 images of 3 classes to learn from, 12 to test on" in result.stderr
    assert "held out" in result.stderr
    assert "chance: 33.3%; always the most frequent class: 33.3%" in result.stderr
    written = json.loads((here / "out.json").read_text())
    assert (written["model"], written["data"]) == (model, str(data / "whole"))
    assert (written["train_images"], written["test_images"]) == (48, 12)
    assert len(written["rows"]) == 2 * 2 + 1 + 2 + 2
    assert {row["method"] for row in written["rows"]} == {
        "least-squares",
        "linear",
        "knn, k=20",
        "knn, k=1",
        "clusters",
    }
    assert written["summaries"][0]["accuracy"] == pytest.approx(
        np.mean([row["accuracy"] for row in written["rows"][:2]])
    )


def test_neighbours_are_printed(run, model, data):
    image = str(data / "whole/colour-2/03.png")
    result = run(
        "--model", model, "--data", str(data / "whole"), "--device", "cpu", "--neighbours", image, "--no-cache"
    )
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert lines[0] == ["name", "label", "similarity"]
    assert lines[1] == [image, "colour-2", "1.0000"]
    assert len(lines) == 11


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--shots", "1,many"], "--shots 1,many"),
        (["--methods", "lineer"], "'linear'"),
        (["--out", "nowhere/out.json"], "--out nowhere/out.json"),
        (["--precision", "fp7"], "fp7"),
    ],
)
def test_a_wrong_command(run, model, data, arguments, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        run("--model", model, "--data", str(data / "whole"), *arguments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_measures_the_same(model, data):
    ours, theirs = (fewshot(model, str(data / "split"), device=name, cache=None) for name in ("cpu", "cuda"))
    for one, other in zip(ours.summaries(), theirs.summaries(), strict=True):
        assert one.accuracy == pytest.approx(other.accuracy, abs=0.06), one.method


def test_the_command_offers_the_methods_that_there_are():
    from inspect import signature

    assert signature(command).parameters["methods"].default.split(",") == list(METHODS)


def test_what_was_learned_from_is_not_tested_on(model, data):
    with pytest.raises(ConfigError, match="learned from"):
        fewshot(model, str(data / "whole"), str(data / "whole"), device="cpu")


def test_a_test_part_without_labels_gives_way_to_val(here):
    for part, labels in (("train", [0, 1] * 10), ("val", [0, 1] * 3), ("test", [-1] * 5)):
        make_parquet(here / "data" / f"{part}-0.parquet", labels, names=("a", "b"))
    _, tested, told = open_train_and_test("data", None)
    assert (len(tested), told) == (6, "the val part of data")


def test_damaged_weights_are_no_result(here, data):
    broken = vitrail.create_model("Ti/4", image_size=16, width=32, depth=1, num_heads=2, mlp_dim=32, num_classes=0)
    torch.nn.init.constant_(broken.encoder.norm.weight, float("nan"))
    vitrail.save(broken, here / "broken")
    with pytest.raises(WeightsError, match="not finite"):
        fewshot("broken", str(data / "whole"), device="cpu")
    assert not list((here / "cache").rglob("*.features"))


def test_one_process_is_enough(model, data, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without torchrun"):
        fewshot(model, str(data / "whole"), device="cpu")


def test_images_that_cannot_be_read_are_counted_in_both_parts():
    def parts(*broken):
        pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), dtype=np.uint8)
        return [(b"no image" if number in broken else image, f"{number % 2}") for number, image in enumerate(pixels)]

    model = vitrail.create_model(
        "Ti/8", image_size=16, width=32, depth=1, num_heads=2, mlp_dim=32, seed=0, num_classes=0
    )
    report = fewshot(model, parts(3, 4), test=parts(11), shots=[1], methods="least-squares", device="cpu", cache=None)
    assert (report.train_images, report.test_images, report.unreadable) == (10, 11, 3)
    assert report.most_frequent == 6 / 11
