"""A head in seconds: it is the model's own, its accuracy is honest, and wrong labels are found."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import make_parquet
from PIL import Image
from striped import stripes

import vitrail
from commands import runner
from vitrail.data.loader import EvaluationLoader
from vitrail.data.open import open_data
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.discriminant import CrossFit, Shrinkage
from vitrail.inference.batches import InferenceOptions
from vitrail.system.intervals import estimate_share
from vitrail.workflows import linear_head as workflow
from vitrail.workflows.linear_head import fit_linear_head
from vitrail.workflows.suspects import SuspectRow, find_suspects

SMALL = {"image_size": 16, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64}
SIZE = {"image_size": 20}
CPU = InferenceOptions(device="cpu")


def fit(data, model, report=False, settings=None, **options):
    """The result, and the events without progress; without a report, which takes seconds, unless it is asked for."""
    events = []
    if isinstance(settings, list):
        settings = [*settings, f"run.report={str(report).lower()}"]
    else:
        settings = {"run.report": report, **(settings or {})}

    def listen(kind, values):
        if kind != "progress":
            events.append((kind, values))

    return fit_linear_head(data, model, options=CPU, settings=settings, on_event=listen, **options), events


def same_weights(one, other) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


def save_model(path, **options):
    """Untrained: colours are seen all the same."""
    vitrail.save(
        vitrail.create_model("Ti/4", seed=0, **{**SMALL, "pool": "average", "num_classes": 5, **options}), path
    )
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture
def run(monkeypatch, capsys):
    return runner(monkeypatch, capsys)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def accuracy_of(model, source) -> float:
    (batch,) = EvaluationLoader(source, model.preprocessing, batch_size=len(source))
    with torch.inference_mode():
        guesses = model(vitrail.data.transforms.preprocess.normalise(batch.images, model.preprocessing)).argmax(dim=1)
    return (guesses == batch.labels).double().mean().item()


def test_a_folder_becomes_a_classifier(here, model):
    stripes(here / "photos", classes=3, images=20)
    result, events = fit("photos", model, report=True)
    assert [kind for kind, _ in events] == ["features", "cross_validation", "report"]
    features = {"images": 60, "all_images": 60, "classes": 3, "image_size": [16, 16], "features": 32}
    features["precision"] = "fp32"
    assert events[0][1] == {"model": model, **features}
    assert result.accuracy.value > 0.9
    assert events[1][1] == {"accuracy": result.accuracy._asdict(), "images": 60}
    assert (result.evaluated, result.config, result.report) == (60, None, result.folder / "report.html")
    assert result.judged.top1 == result.accuracy
    assert result.weights == result.folder / "model" == Path("runs/photos-quick-from-small/model")
    saved = vitrail.load("runs/photos-quick-from-small")
    assert same_weights(result.model, saved)
    assert saved.labels == ("colour-0", "colour-1", "colour-2")
    assert accuracy_of(saved, open_data("photos")) > 0.95
    before = vitrail.load(model)
    assert all(
        torch.equal(value, saved.state_dict()[name])
        for name, value in before.encoder.state_dict(prefix="encoder.").items()
    )
    again, _ = fit("photos", model, report=True)
    assert again == result, "the same call gives the same"
    assert same_weights(again.model, result.model)


def test_planted_wrong_labels_are_found(here, model):
    folder = stripes(here / "photos", classes=3, images=30)
    planted = {}
    for number, (source, target) in enumerate([(0, 1), (1, 2), (2, 0), (0, 2)]):
        name = f"wrong-{number}.png"
        (folder / f"colour-{source}" / f"{number + 5:02}.png").rename(folder / f"colour-{target}" / name)
        planted[f"photos/colour-{target}/{name}"] = (f"colour-{target}", f"colour-{source}")
    result, _ = fit("photos", model)
    with (here / "runs/photos-quick-from-small/mislabelled.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["name", "label", "thinks", "probability"]
    found = {row["name"]: (row["label"], row["thinks"]) for row in rows}
    assert found.items() >= planted.items()
    assert len(found) <= len(planted) + 2, "and hardly anything else"
    probabilities = [float(row["probability"]) for row in rows]
    assert probabilities == sorted(probabilities, reverse=True)
    assert [list(row.values())[:3] for row in rows] == [list(suspect[:3]) for suspect in result.suspects]
    assert rows[0]["name"] in result._repr_html_()
    assert result.to_dict()["suspects"][0]["label"] == rows[0]["label"]


def test_rare_classes_are_told_beside_the_accuracy(here, model, run):
    """Noise of which nothing can be learned: whoever takes the common class is often right, but not on the whole."""
    rng = np.random.default_rng(0)
    for name, count in {"common": 40, "rare": 8}.items():
        (here / "photos" / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(here / "photos" / name / f"{number}.png")
    printed = run("finetune", "--data", "photos", "--from", model, "--quick", "run.report=false")[1]
    result, _ = fit("photos", model)
    recalls = [found.hits / found.images for found in result.judged.classes]
    assert result.balanced_accuracy.value == pytest.approx(sum(recalls) / 2)
    share = f"{result.balanced_accuracy.value:.1%}"
    assert share != f"{result.accuracy.value:.1%}"
    assert f"balanced accuracy, where rare classes count as much as common ones: {share} (95% interval " in printed
    assert ("balanced accuracy", share) in result.summary()


@pytest.mark.slow
def test_the_five_most_doubtful_are_printed(here, model, monkeypatch, run):
    stripes(here / "photos", classes=2, images=25)
    everything = [SuspectRow(row, 1 - row // 25, 0.9) for row in range(50)]
    monkeypatch.setattr(workflow, "find_suspects", lambda *_: everything)
    lines = run("finetune", "--data", "photos", "--from", model, "--quick")[1].splitlines()
    assert sum("is labelled" in line for line in lines) == 5
    assert any("50 of 50" in line and "mislabelled.csv" in line for line in lines)
    assert len((here / "runs/photos-quick-from-small/mislabelled.csv").read_text().splitlines()) == 51


def test_suspects_by_hand():
    """Thresholds are the mean probabilities of the own class: 0.6 for class 0, 0.7 for class 1."""
    judged = CrossFit(
        shrinkage=Shrinkage(1.0, 1.0),
        known=torch.tensor([True, True, True, True, True, True, False]),
        guesses=torch.tensor([0, 1, 0, 1, 0, 1, 0]),
        confidence=torch.tensor([0.9, 0.8, 0.8, 1.0, 0.55, 0.65, 0.99], dtype=torch.float64),
        label_probability=torch.tensor([0.9, 0.2, 0.7, 1.0, 0.45, 0.65, 0.01], dtype=torch.float64),
        label_rank=torch.ones(7, dtype=torch.int64),
    )
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    # The second looks like 1 with 0.8 ≥ 0.7; the fifth like 0 with 0.55 < 0.6; the last was judged by nobody.
    assert find_suspects(judged, labels, 2) == [(1, 1, 0.8)]


def test_a_class_that_is_hard_to_tell_is_not_suspected_as_a_whole():
    """Its threshold is 0.35: the first image has 0.4 of it, though it looks more like the other class."""
    given = torch.tensor([0.4, 0.3, 0.5, 0.5], dtype=torch.float64)
    confidence = torch.tensor([0.55, 0.7, 0.5, 0.5], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.int64)
    judged = CrossFit(Shrinkage(1.0, 1.0), torch.ones(4, dtype=torch.bool), ones, confidence, given, ones)
    assert find_suspects(judged, torch.tensor([0, 0, 1, 1]), 2) == [(1, 1, 0.7)]


def test_two_classes_of_five_images(here, model):
    stripes(here / "few", classes=2, images=5)
    result, _ = fit("few", model)
    assert result.evaluated == 10
    assert result.accuracy.low < result.accuracy.value
    assert accuracy_of(vitrail.load("runs/few-quick-from-small"), open_data("few")) == 1


def test_the_only_image_of_a_class_stays_in_training(here, model):
    folder = stripes(here / "photos", classes=3, images=6)
    for path in sorted((folder / "colour-2").iterdir())[1:]:
        path.unlink()
    result, events = fit("photos", model)
    assert events[0][1]["images"] == 13
    assert result.evaluated == 12, "nobody can judge it"
    saved = vitrail.load("runs/photos-quick-from-small")
    assert saved.num_classes == 3
    assert accuracy_of(saved, open_data("photos")) == 1


def test_one_image_of_each_class(here, model):
    stripes(here / "photos", classes=3, images=1)
    result, events = fit("photos", model)
    assert events[1] == ("cross_validation", {"accuracy": None, "images": 0})
    assert (result.accuracy, result.evaluated, result.suspects) == (None, 0, ())
    assert "not measured" in repr(result)
    assert accuracy_of(vitrail.load("runs/photos-quick-from-small"), open_data("photos")) == 1


def test_parts_that_were_set_aside_are_scored_and_not_learned_from(here, model):
    stripes(here / "photos/train", classes=3, images=10)
    stripes(here / "photos/val", classes=3, images=7)
    stripes(here / "photos/test", classes=3, images=4)
    result, events = fit("photos", model)
    assert events[0][1]["images"] == 30
    saved = vitrail.load("runs/photos-quick-from-small")
    for part, count in (("val", 21), ("test", 12)):
        accuracy = accuracy_of(saved, open_data("photos", part))
        assert result.scores[part] == estimate_share(round(accuracy * count), count)
        score = {"split": part, "accuracy": result.scores[part]._asdict(), "images": count, "problem": ""}
        assert ("score", score) in events


def test_folder_and_size_can_be_given_and_nothing_else(here, model):
    stripes(here / "photos", classes=2, images=5)
    for given in ({"settings": ["folder=mine", "model.image_size=20"]}, {"folder": "ours", "settings": SIZE}):
        result, events = fit("photos", model, **given)
        assert events[0][1]["image_size"] == [20, 20]
        assert vitrail.load(result.folder).image_size == result.model.image_size == (20, 20)
    assert result.folder == Path("ours")
    with pytest.raises(ConfigError, match="twice"):
        fit("photos", model, folder="ours", settings={"run.folder": "mine"})
    for override, word in {
        "schedule.steps=5": "schedule.steps",
        "imagesize=5": "did you mean 'image_size'",
        "steps": "is not key=value",
        "image_size=18": "18",
        "image_size=big": "image_size",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(word)):
            fit("photos", model, settings=[override])


def test_a_run_is_not_written_over(here, model):
    stripes(here / "photos", classes=2, images=5)
    (here / "mine").mkdir()
    (here / "mine/config.toml").write_text("")
    with pytest.raises(ConfigError, match=r"config\.toml"):
        fit("photos", model, folder="mine")
    assert [path.name for path in (here / "mine").iterdir()] == ["config.toml"]
    (here / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        fit("photos", model, folder="file")


def test_broken_images_are_left_out_and_told(here, model):
    folder = stripes(here / "photos", classes=2, images=6)
    (folder / "colour-0/03.png").write_bytes(b"no image")
    _, events = fit("photos", model)
    assert (events[0][1]["images"], events[0][1]["all_images"]) == (11, 12)
    for path in (folder / "colour-1").iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match="colour-1"):
        fit("photos", model)


@pytest.mark.parametrize(
    "options", [{"pool": "distilled", "registers": 1}, {"representation_size": 24}, {"num_classes": 0}]
)
def test_heads_of_every_kind(here, options):
    """Two that are averaged, one with a hidden layer, none."""
    stripes(here / "photos", classes=3, images=6)
    fit("photos", save_model(here / "models", **options))
    assert vitrail.load("runs/photos-quick-from-models").num_classes == 3


def test_a_model_that_loads_as_something_else_is_no_success(here, model, monkeypatch):
    stripes(here / "photos", classes=2, images=5)
    save = workflow.save

    def wrong(network, folder, notes):
        network.head.weight.data[0, 0] += 0.01
        return save(network, folder, notes)

    monkeypatch.setattr(workflow, "save", wrong)
    with pytest.raises(vitrail.WeightsError, match="after loading"):
        fit("photos", model)


def test_a_head_that_does_more_than_it_seems_is_refused(here, model, monkeypatch):
    stripes(here / "photos", classes=2, images=5)
    monkeypatch.setattr(
        "vitrail.model.vit.VisionTransformer.forward", lambda self, images: self.head(2 * self.embed(images))
    )
    with pytest.raises(ConfigError, match="representation"):
        fit("photos", model)
    assert not (here / "runs").exists()


def test_a_part_that_cannot_be_scored_is_no_reason_to_lose_the_model(here, model):
    """As on the hub, where the labels of a test are kept back."""
    make_parquet(here / "data" / "train-0.parquet", [0, 1] * 10, names=("a", "b"))
    make_parquet(here / "data" / "test-0.parquet", [-1] * 20, names=("a", "b"))
    result, events = fit("data", model)
    (score,) = [values for kind, values in events if kind == "score"]
    assert (score["split"], score["accuracy"]) == ("test", None)
    assert score["problem"]
    assert result.scores == {}
    assert vitrail.load("runs/data-quick-from-small").labels == ("a", "b")


def test_an_image_without_a_label_is_left_out(here, model):
    make_parquet(here / "data.parquet", [0, 1] * 10 + [-1], names=("a", "b"))
    _, events = fit("data.parquet", model)
    assert events[0][1]["images"] == 20


def test_another_model_is_not_written_over(here, model):
    vitrail.save(vitrail.load(model), here / "mine" / "model")
    stripes(here / "photos", classes=2, images=5)
    with pytest.raises(ConfigError, match="quick"):
        fit("photos", model, folder="mine")
    for _ in range(2):
        fit("photos", model, folder="ours")


def test_a_weak_model_says_that_its_doubts_are_weak(here, model):
    """Of noise nothing can be learned."""
    rng = np.random.default_rng(0)
    for label in ("a", "b"):
        (here / "noise" / label).mkdir(parents=True)
        for number in range(12):
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(
                here / f"noise/{label}/{number}.png"
            )
    result, _ = fit("noise", model)
    assert result.suspects
    assert result.has_weak_suspects
    assert "own mistakes" in repr(result)


def test_a_share_of_the_images(here, model):
    stripes(here / "photos", classes=3, images=20)
    events = {}
    result = vitrail.finetune(
        "photos",
        model,
        quick=True,
        settings=["data.share=0.25", "report=false"],
        on_event=lambda kind, values: events.setdefault(kind, values),
    )
    assert events["features"]["all_images"] == 15
    assert result.evaluated == 15
