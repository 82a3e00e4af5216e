"""A head in seconds: it is the model's own, its accuracy is honest, and wrong labels are found."""

from __future__ import annotations

import csv
import re

import numpy as np
import pytest
import torch
from pictures import make_parquet
from PIL import Image
from striped import stripes

import vitrail
from vitrail.data.loader import EvaluationLoader
from vitrail.data.open import open_data
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.linear_probe import OutOfFoldPredictions
from vitrail.inference.batches import InferenceOptions
from vitrail.system.intervals import wilson_interval
from vitrail.workflows import linear_head as workflow
from vitrail.workflows.linear_head import find_suspects, fit_linear_head

SMALL = {"image_size": 16, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64}
CPU = InferenceOptions(device="cpu")


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
    lines = list(fit_linear_head("photos", model, options=CPU))
    assert re.findall(r"\d+", lines[0])[:4] == ["60", "3", "16", "32"]  # images, classes, pixels, features
    assert float(re.search(r"([\d.]+)% of 60", lines[1])[1]) > 90
    assert "model: runs/quick-photos-from-small/model" in lines
    assert lines[-1].startswith('next: in Python, model = vitrail.load("runs/quick-photos-from-small")')
    saved = vitrail.load("runs/quick-photos-from-small")
    assert saved.labels == ("colour-0", "colour-1", "colour-2")
    assert accuracy_of(saved, open_data("photos")) > 0.95
    before = vitrail.load(model)
    assert all(
        torch.equal(value, saved.state_dict()[name])
        for name, value in before.encoder.state_dict(prefix="encoder.").items()
    )
    again = list(fit_linear_head("photos", model, options=CPU))
    assert again == lines, "the same command gives the same"


def test_planted_wrong_labels_are_found(here, model):
    folder = stripes(here / "photos", classes=3, images=30)
    planted = {}
    for number, (source, target) in enumerate([(0, 1), (1, 2), (2, 0), (0, 2)]):
        name = f"wrong-{number}.png"
        (folder / f"colour-{source}" / f"{number + 5:02}.png").rename(folder / f"colour-{target}" / name)
        planted[f"photos/colour-{target}/{name}"] = (f"colour-{target}", f"colour-{source}")
    lines = list(fit_linear_head("photos", model, options=CPU))
    with (here / "runs/quick-photos-from-small/mislabelled.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["name", "label", "thinks", "probability"]
    found = {row["name"]: (row["label"], row["thinks"]) for row in rows}
    assert found.items() >= planted.items()
    assert len(found) <= len(planted) + 2, "and hardly anything else"
    probabilities = [float(row["probability"]) for row in rows]
    assert probabilities == sorted(probabilities, reverse=True)
    printed = [line for line in lines if line.startswith("perhaps mislabelled: photos/")]
    assert len(printed) == len(rows)
    assert all(rows[0][key] in printed[0] for key in ("name", "label", "thinks"))


def test_no_more_than_twenty_are_printed(here, model, monkeypatch):
    stripes(here / "photos", classes=2, images=25)
    everything = [workflow.Suspect(row, 1 - row // 25, 0.9) for row in range(50)]
    monkeypatch.setattr(workflow, "find_suspects", lambda *_: everything)
    lines = list(fit_linear_head("photos", model, options=CPU))
    assert sum("is labelled" in line for line in lines) == 20
    assert any("50 of 50" in line and "mislabelled.csv" in line for line in lines)
    assert len((here / "runs/quick-photos-from-small/mislabelled.csv").read_text().splitlines()) == 51


def test_suspects_by_hand():
    """Thresholds are the mean probabilities of the own class: 0.6 for class 0, 0.7 for class 1."""
    judged = OutOfFoldPredictions(
        strength=1.0,
        losses={},
        known=torch.tensor([True, True, True, True, True, True, False]),
        guesses=torch.tensor([0, 1, 0, 1, 0, 1, 0]),
        confidence=torch.tensor([0.9, 0.8, 0.8, 1.0, 0.55, 0.65, 0.99], dtype=torch.float64),
        label_probability=torch.tensor([0.9, 0.2, 0.7, 1.0, 0.45, 0.65, 0.01], dtype=torch.float64),
    )
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    # The second looks like 1 with 0.8 ≥ 0.7; the fifth like 0 with 0.55 < 0.6; the last was judged by nobody.
    assert find_suspects(judged, labels, 2) == [(1, 1, 0.8)]


def test_a_class_that_is_hard_to_tell_is_not_suspected_as_a_whole():
    """Its threshold is 0.35: the first image has 0.4 of it, though it looks more like the other class."""
    given = torch.tensor([0.4, 0.3, 0.5, 0.5], dtype=torch.float64)
    confidence = torch.tensor([0.55, 0.7, 0.5, 0.5], dtype=torch.float64)
    judged = OutOfFoldPredictions(
        1.0, {}, torch.ones(4, dtype=torch.bool), torch.ones(4, dtype=torch.int64), confidence, given
    )
    assert find_suspects(judged, torch.tensor([0, 0, 1, 1]), 2) == [(1, 1, 0.7)]


def test_two_classes_of_five_images(here, model):
    stripes(here / "few", classes=2, images=5)
    lines = list(fit_linear_head("few", model, options=CPU))
    assert "of 10 (95% interval" in lines[1]
    assert accuracy_of(vitrail.load("runs/quick-few-from-small"), open_data("few")) == 1


def test_the_only_image_of_a_class_stays_in_training(here, model):
    folder = stripes(here / "photos", classes=3, images=6)
    for path in sorted((folder / "colour-2").iterdir())[1:]:
        path.unlink()
    lines = list(fit_linear_head("photos", model, options=CPU))
    assert lines[0].startswith("13 images of 3 classes")
    assert "of 12 (95% interval" in lines[1]
    saved = vitrail.load("runs/quick-photos-from-small")
    assert saved.num_classes == 3
    assert accuracy_of(saved, open_data("photos")) == 1


def test_one_image_of_each_class(here, model):
    stripes(here / "photos", classes=3, images=1)
    lines = list(fit_linear_head("photos", model, options=CPU))
    assert any("every class has one image" in line for line in lines)
    assert accuracy_of(vitrail.load("runs/quick-photos-from-small"), open_data("photos")) == 1


def test_parts_that_were_set_aside_are_scored_and_not_learned_from(here, model):
    stripes(here / "photos/train", classes=3, images=10)
    stripes(here / "photos/val", classes=3, images=7)
    stripes(here / "photos/test", classes=3, images=4)
    lines = list(fit_linear_head("photos", model, options=CPU))
    assert lines[0].startswith("30 images of 3 classes")
    saved = vitrail.load("runs/quick-photos-from-small")
    for part, count in (("val", 21), ("test", 12)):
        accuracy = accuracy_of(saved, open_data("photos", part))
        low, high = wilson_interval(round(accuracy * count), count)
        (line,) = [line for line in lines if line.startswith(f"{part} accuracy")]
        assert re.findall(r"[\d.]+%", line) == [f"{accuracy:.1%}", "95%", f"{low:.1%}", f"{high:.1%}"]


def test_folder_and_size_can_be_given_and_nothing_else(here, model):
    stripes(here / "photos", classes=2, images=5)
    lines = list(fit_linear_head("photos", model, ["folder=mine", "model.image_size=20"], options=CPU))
    assert "at 20 pixels" in lines[0]
    assert vitrail.load("mine").image_size == (20, 20)
    for override, word in {
        "schedule.steps=5": "schedule.steps",
        "imagesize=5": "did you mean 'image_size'",
        "steps": "is not key=value",
        "image_size=18": "18",
        "image_size=big": "image_size",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(word)):
            list(fit_linear_head("photos", model, [override], options=CPU))


def test_a_run_is_not_written_over(here, model):
    stripes(here / "photos", classes=2, images=5)
    (here / "mine").mkdir()
    (here / "mine/config.toml").write_text("")
    with pytest.raises(ConfigError, match=r"config\.toml"):
        list(fit_linear_head("photos", model, ["folder=mine"], options=CPU))
    assert [path.name for path in (here / "mine").iterdir()] == ["config.toml"]
    (here / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        list(fit_linear_head("photos", model, ["folder=file"], options=CPU))


def test_broken_images_are_left_out_and_told(here, model):
    folder = stripes(here / "photos", classes=2, images=6)
    (folder / "colour-0/03.png").write_bytes(b"no image")
    lines = list(fit_linear_head("photos", model, options=CPU))
    assert lines[0].startswith("11 images")
    assert "1 of 12 images" in lines[1]
    for path in (folder / "colour-1").iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match="colour-1"):
        list(fit_linear_head("photos", model, options=CPU))


@pytest.mark.parametrize(
    "options", [{"pool": "distilled", "registers": 1}, {"representation_size": 24}, {"num_classes": 0}]
)
def test_heads_of_every_kind(here, options):
    """Two that are averaged, one with a hidden layer, none."""
    stripes(here / "photos", classes=3, images=6)
    list(fit_linear_head("photos", save_model(here / "models", **options), options=CPU))
    assert vitrail.load("runs/quick-photos-from-models").num_classes == 3


def test_a_model_that_loads_as_something_else_is_no_success(here, model, monkeypatch):
    stripes(here / "photos", classes=2, images=5)
    save = workflow.save

    def wrong(network, folder, notes):
        network.head.weight.data[0, 0] += 0.01
        return save(network, folder, notes)

    monkeypatch.setattr(workflow, "save", wrong)
    with pytest.raises(vitrail.WeightsError, match="after loading"):
        list(fit_linear_head("photos", model, options=CPU))


def test_a_head_that_does_more_than_it_seems_is_refused(here, model, monkeypatch):
    stripes(here / "photos", classes=2, images=5)
    monkeypatch.setattr(
        "vitrail.model.vit.VisionTransformer.forward", lambda self, images: self.head(2 * self.embed(images))
    )
    with pytest.raises(ConfigError, match="representation"):
        list(fit_linear_head("photos", model, options=CPU))
    assert not (here / "runs").exists()


def test_a_part_that_cannot_be_scored_is_no_reason_to_lose_the_model(here, model):
    """As on the hub, where the labels of a test are kept back."""
    make_parquet(here / "data" / "train-0.parquet", [0, 1] * 10, names=("a", "b"))
    make_parquet(here / "data" / "test-0.parquet", [-1] * 20, names=("a", "b"))
    lines = list(fit_linear_head("data", model, options=CPU))
    assert any(line.startswith("test is not scored: ") for line in lines)
    assert vitrail.load("runs/quick-data-from-small").labels == ("a", "b")


def test_an_image_without_a_label_is_left_out(here, model):
    make_parquet(here / "data.parquet", [0, 1] * 10 + [-1], names=("a", "b"))
    lines = list(fit_linear_head("data.parquet", model, options=CPU))
    assert lines[0].startswith("20 images of 2 classes")


def test_another_model_is_not_written_over(here, model):
    vitrail.save(vitrail.load(model), here / "mine" / "model")
    stripes(here / "photos", classes=2, images=5)
    with pytest.raises(ConfigError, match="--quick"):
        list(fit_linear_head("photos", model, ["folder=mine"], options=CPU))
    for _ in range(2):
        list(fit_linear_head("photos", model, ["folder=ours"], options=CPU))


def test_a_weak_model_says_that_its_doubts_are_weak(here, model):
    """Of noise nothing can be learned."""
    rng = np.random.default_rng(0)
    for label in ("a", "b"):
        (here / "noise" / label).mkdir(parents=True)
        for number in range(12):
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(
                here / f"noise/{label}/{number}.png"
            )
    assert any("its own mistakes" in line for line in fit_linear_head("noise", model, options=CPU))
