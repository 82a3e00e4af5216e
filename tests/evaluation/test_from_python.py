"""evaluate, fewshot, find_similar and compare_models as a notebook calls them: results, events, errors, any engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from striped import stripes

import vitrail
from samples import randomise
from vitrail.data.open import open_data
from vitrail.data.sources.source import compute_fingerprint
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.compare import compare_models
from vitrail.evaluation.evaluate import evaluate
from vitrail.evaluation.fewshot import fewshot
from vitrail.evaluation.neighbours import find_similar
from vitrail.exporting.export import export

CLASSES = ("colour-0", "colour-1", "colour-2")


@pytest.fixture(scope="module")
def model():
    sizes = {"image_size": 16, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64, "pool": "average"}
    built = randomise(vitrail.create_model("Ti/4", seed=0, num_classes=3, **sizes))
    built.labels = CLASSES
    return built.eval()


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    stripes(tmp_path / "photos", classes=3, images=10)
    return tmp_path


@pytest.fixture
def pairs(here) -> list[tuple[Path, int]]:
    return [(path, number) for number in range(3) for path in sorted((here / "photos" / CLASSES[number]).iterdir())]


class Heard(list):
    """A listener that keeps all events."""

    def __call__(self, kind, values):
        json.dumps(values)
        self.append((kind, values))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self]


def test_a_report_of_a_loaded_model(here, model):
    heard = Heard()
    report = evaluate(model, "photos", batch_size=8, device="cpu", on_event=heard)
    assert report.accuracy == report.top1
    assert report.images == 30
    assert report.top1.low <= report.top1.value <= report.top1.high
    assert [score.name for score in report.classes] == list(CLASSES)
    assert (report.model, report.data, report.was_trained_on) == ("VisionTransformer", "photos", False)
    assert (report.about["precision"], report.about["runtime"]) == ("fp32", "PyTorch")
    assert heard == [("progress", {"task": "evaluating", "done": done, "total": 30}) for done in (0, 8, 16, 24, 30)]
    assert report.files == ()
    assert {path.name for path in here.iterdir()} == {"photos", "cache"}, "no report is written"
    assert "top-1 accuracy" in repr(report)


def test_the_files_of_a_report(here, model):
    report = evaluate(model, "photos", device="cpu", folder="report")
    assert report.files[0] == Path("report/report.json")
    assert json.loads(report.files[0].read_text()) == json.loads(json.dumps(report.to_dict()))
    assert [path.name for path in report.figures()][:2] == ["confusion.png", "calibration.png"]
    assert report._repr_html_().count("<img") == len(report.figures())
    assert evaluate(model, "photos", device="cpu", folder="auto").files[0].parent.parent == Path("runs")


def test_what_was_learned_from_is_told(here, model):
    taught = vitrail.load(vitrail.save(model, here / "model"))
    taught.learned_from = compute_fingerprint(open_data("photos"))
    report = evaluate(taught, "photos", device="cpu")
    assert report.was_trained_on
    assert "learned" in repr(report)


@pytest.mark.parametrize("share", [0.1, 0.2])
def test_val_is_what_the_training_held_out_and_chose_by(here, model, share):
    taught = vitrail.load(vitrail.save(model, here / "model"))
    taught.learned_from = compute_fingerprint(open_data("photos", "train", share))
    held_out = open_data("photos", "val", share)
    report = evaluate(taught, "photos", "val", device="cpu")
    assert (report.images, report.was_trained_on, report.chose_weights) == (len(held_out), False, False)
    taught.chosen_by = compute_fingerprint(held_out)
    report = evaluate(taught, "photos", "val", device="cpu")
    assert (report.images, report.chose_weights) == (len(held_out), True)
    assert "chose the weights" in repr(report)
    assert not evaluate(taught, "photos", device="cpu").chose_weights
    assert evaluate(model, "photos", "val", device="cpu").images == len(open_data("photos", "val"))


def test_lists_give_what_the_folder_gives(here, model, pairs):
    wanted = evaluate(model, "photos", device="cpu")
    report = evaluate(model, pairs, device="cpu")
    assert (report.top1, report.likelihood) == (wanted.top1, wanted.likelihood)
    assert "30" in report.data
    named = evaluate(model, [(Image.open(path), CLASSES[number]) for path, number in pairs], device="cpu")
    assert named.top1 == wanted.top1
    assert [score.name for score in named.classes] == list(CLASSES)


def test_names_are_escaped_in_a_notebook(here, model, pairs):
    other = vitrail.load(vitrail.save(model, here / "model"))
    other.labels = ("<i>a</i>", "b", "c")
    names = dict(enumerate(other.labels))
    report = evaluate(other, [(path, names[number]) for path, number in pairs], device="cpu")
    assert "&lt;i&gt;a" in report._repr_html_()
    assert "<i>a" not in report._repr_html_()


@pytest.mark.slow
def test_an_export_and_int8_are_scored_as_the_model(here, model):
    export(model, here / "model.onnx", "onnx")
    exact = evaluate(model, "photos", device="cpu")
    exported = evaluate("model.onnx", "photos", device="cpu")
    quick = evaluate(model, "photos", device="cpu", precision="int8")
    assert exported.likelihood.value == pytest.approx(exact.likelihood.value, abs=1e-5)
    assert (exported.top1, exported.labels) == (exact.top1, exact.labels)
    assert (exported.about["precision"], exported.about["runtime"]) == ("exported", "onnxruntime")
    assert quick.likelihood.value == pytest.approx(exact.likelihood.value, abs=0.05)
    assert quick.likelihood.value != exact.likelihood.value
    assert quick.about["precision"] == "int8"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"split": "tset"}, ConfigError, "'test'"),
        ({"data": "nowhere"}, DataError, "nowhere"),
        ({"precision": "fp8"}, ConfigError, "int8"),
        ({"precision": "fp7"}, ConfigError, "fp7"),
        ({"batch_size": 0}, ConfigError, "batch_size"),
        ({"real": "real.json"}, ConfigError, "1000 classes"),
        ({"folder": "photos/colour-0/00.png"}, ConfigError, "is a file"),
        ({"model": 3}, ConfigError, "int"),
    ],
)
def test_errors_are_the_sentences_of_the_command(here, model, options, error, words):
    with pytest.raises(error, match=words):
        evaluate(**{"model": model, "data": "photos", "device": "cpu", **options})


def test_an_interrupted_evaluation_writes_nothing(here, model):
    def stop(kind, values):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(model, "photos", device="cpu", folder="report", on_event=stop)
    assert not list((here / "report").iterdir())


def test_few_shot_of_a_loaded_model(here, model, pairs):
    heard = Heard()
    options = {"shots": (1, 5), "seeds": (0, 1), "device": "cpu"}
    report = fewshot(model, "photos", **options, out="few.json", on_event=heard)
    assert heard == [
        ("progress", {"task": "features", "done": done, "total": total})
        for done, total in ((0, 24), (24, 24), (0, 6), (6, 6))
    ]
    assert json.loads(Path("few.json").read_text()) == report.to_dict()
    assert {row.method for row in report.rows} >= {"least-squares", "linear", "clusters"}
    assert "least-squares, 5 shots" in repr(report)
    assert "held out" in report._repr_html_()
    listed = fewshot(model, pairs, pairs[::2], **options, methods=["knn"])
    assert (listed.train_images, listed.test_images) == (30, 15)
    assert "15 images" in listed.tested_on


def test_features_that_were_computed_before_an_interrupt_are_found_again(here, model):
    def stop(kind, values):
        if values["done"] > 8:
            raise KeyboardInterrupt

    options = {"methods": ["knn"], "batch_size": 8, "device": "cpu"}
    with pytest.raises(KeyboardInterrupt):
        fewshot(model, "photos", **options, on_event=stop)
    heard = Heard()
    report = fewshot(model, "photos", **options, on_event=heard)
    assert [values["done"] for _, values in heard if values["total"] == 24] == [16, 24], (
        "of three batches two were kept"
    )
    assert report.rows == fewshot(model, "photos", **options, cache=None, on_event=heard).rows


def test_int8_has_features_of_its_own(here, model):
    for precision in ("fp32", "int8", "fp32", "int8"):
        fewshot(model, "photos", methods=["knn"], device="cpu", precision=precision)
    assert len(list((here / "cache" / "features").glob("*.features"))) == 4, "two sets of images in two precisions"


def test_an_export_with_a_head_has_no_features(here, model):
    export(model, here / "model.onnx", "onnx")
    with pytest.raises(ConfigError, match="representations"):
        fewshot("model.onnx", "photos", device="cpu")


def test_similar_images(here, model):
    image = here / "photos" / "colour-1" / "07.png"
    similar = find_similar(model, "photos", image, 4, device="cpu", out="similar.json")
    assert len(similar) == 4
    assert (similar[0].label, similar[0].similarity) == ("colour-1", 1.0)
    assert json.loads(Path("similar.json").read_text()) == similar.to_dict()
    pixels = np.asarray(Image.open(image).convert("RGB"))
    assert find_similar(model, "photos", pixels, 4, device="cpu").neighbours == similar.neighbours
    assert "colour-1" in repr(similar)
    with pytest.raises(DataError, match=r"nowhere\.png"):
        find_similar(model, "photos", "nowhere.png", device="cpu")


@pytest.mark.slow
def test_models_of_all_kinds_side_by_side(here, model):
    export(model, here / "model.onnx", "onnx")
    heard = Heard()
    result = compare_models([model, "nowhere", "model.onnx"], "photos", batch_size=16, device="cpu", on_event=heard)
    loaded, exported = result.rows
    assert loaded.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (exported.parameters, exported.flops, exported.training) == (None, None, None)
    assert loaded.top1 == exported.top1
    assert min(row.images_per_second for row in result.rows) > 0
    assert [name for name, _ in result.failures] == ["nowhere"]
    assert heard.kinds() == [*["progress"] * 3, "compared", "failed", *["progress"] * 3, "compared"]
    assert heard[0][1]["task"] == "evaluating VisionTransformer"
    head, *rows = result.tables()["On photos"]
    cells = [dict(zip(head, row, strict=True)) for row in rows]
    assert rows[1][1:3] == ["–", "–"]
    assert rows[0][2] == f"{loaded.flops / 1e9:,.3g}"
    assert cells[0]["balanced"].endswith("%")
    accuracy = f"{loaded.top1.value:.2%} (95% interval {loaded.top1.low:.2%} to {loaded.top1.high:.2%})"
    assert [name for name, _ in result.summary()][:2] == ["data", "VisionTransformer"]
    assert result.summary()[1][1] == accuracy
    assert result.summary()[-1][1].startswith("failed: ")
    assert "model.onnx" in repr(result)
    assert json.loads(json.dumps(result.to_dict()))["failures"][0]["model"] == "nowhere"
    with pytest.raises(ConfigError, match="models"):
        compare_models([], "photos")


def test_numbers_of_numpy_and_a_single_method_are_as_good_as_lists(here, model):
    asked = {"methods": "least-squares", "cache": "features"}
    report = fewshot(model, here / "photos", shots=np.array([1, 2]), seeds=np.arange(2), **asked)
    assert [(row.shots, row.seed) for row in report.rows] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    json.dumps(report.to_dict())
    assert list((here / "features").iterdir())
    assert fewshot(model, here / "photos", shots=[1, 2], seeds=[0, 1], **asked).rows == report.rows


def test_what_is_no_list_of_models_or_has_no_images_is_a_sentence(here, model):
    with pytest.raises(ConfigError, match="list"):
        compare_models(model, here / "photos")
    with pytest.raises(DataError, match="the list is empty"):
        evaluate(model, [])
