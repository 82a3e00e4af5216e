"""evaluate as a person types it: the table, the files, models side by side, and what cannot be."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import runs
import torch
from PIL import Image

import vitrail
from vitrail.config import TrainingCost
from vitrail.inference import batches as passes
from vitrail.model.cost import compute_cost as count_cost
from vitrail.tasks.tags import Tags
from vitrail.training.run_training import run_training

SMALL = {"image_size": 16, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 32}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Photos of two kinds, bright cats and dark dogs; a model that tells them apart, and one that does not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(passes, "choose_device", lambda _: torch.device("cpu"))
    for name, level in (("cat", 200), ("dog", 40)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            Image.fromarray(np.full((20, 24, 3), level + number, np.uint8)).save(f"photos/{name}/{number}.png")
    (tmp_path / "empty").mkdir()
    for name, labels in (("good", ["cat", "dog"]), ("others", ["ant", "bee"])):
        model = vitrail.create_model("Ti/4", num_classes=2, pool="average", seed=0, **SMALL)
        model.labels = labels
        vitrail.save(model, tmp_path / name)
    return tmp_path


def table(text: str) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in csv.reader(text.splitlines(), delimiter="\t") if row}


def test_the_report_is_printed_and_written(here, run):
    code, out, err = run("evaluate", "--model", "good", "--data", "photos")
    assert (code, err) == (0, "")
    rows = table(out)
    # A new head starts at zero: it says the first class of all, with one half.
    assert rows["top-1 accuracy"] == ["50.00%", "25.38%", "74.62%"]
    assert rows["negative log-likelihood"][0] == f"{np.log(2):.4f}"
    assert rows["calibration error"][0] == "0.0000"
    assert rows["cat"] == ["6", "100.00%", "60.97%", "100.00%"]
    assert rows["dog"] == ["cat", "6"]  # taken for what
    assert "--split val scores those that `vitrail finetune` held out" in out
    folder = here / "runs" / "evaluate-photos-good"
    assert {path.name for path in folder.iterdir()} == {
        *("report.json", "confusion.png", "confusion.svg", "calibration.png", "calibration.svg"),
        *("mistakes.png", "mistakes.svg"),
    }
    report = json.loads((folder / "report.json").read_text())
    assert report["confusion"] == [[0, 0, 6], [1, 0, 6]]
    assert {mistake["label"] for mistake in report["most_confident_mistakes"]} == {"dog"}


def test_json_on_the_screen(here, run):
    code, out, _ = run("evaluate", "--model", "good", "--data", "photos", "--json", "--out", "elsewhere")
    assert code == 0
    assert json.loads(out) == json.loads((here / "elsewhere" / "report.json").read_text())


def test_a_map_says_which_class_is_which(here, run):
    (here / "map.json").write_text('{"cat": "bee", "dog": ["ant"]}')
    code, out, _ = run("evaluate", "--model", "others", "--data", "photos", "--map", "map.json")
    assert code == 0
    assert table(out)["dog"][1] == "100.00%"  # the first class, ant, is what a new head says


def test_models_side_by_side(here, run):
    model = vitrail.load("good")
    model.training_cost = TrainingCost(flops=2e18, device_seconds=7200, devices=("a GPU",))
    vitrail.save(model, here / "cheap")
    code, out, _ = run("evaluate", "--data", "photos", "--batch-size", "4", "--compare", "good", "cheap")
    assert code == 0
    rows = table(out)
    for name, spent in (("good", ["–", "–"]), ("cheap", ["2", "2"])):
        parameters, flops, speed, images, *accuracy, operations, hours = rows[name]
        assert images == "12"
        assert int(parameters) == sum(p.numel() for p in model.parameters())
        assert float(flops) == pytest.approx(count_cost(model.architecture).flops / 1e9, rel=1e-2)
        assert float(speed) > 0
        assert accuracy == ["50.00%", "25.38%", "74.62%", "50.00%", "0.00%"]  # the last: balanced, the worst class
        assert [operations, hours] == spent
    assert "good: its weights" in out


def test_models_that_know_other_classes_are_told_apart(here, run):
    model = vitrail.create_model("Ti/4", num_classes=2, seed=0, **SMALL)
    model.labels = ["cat", "emu"]
    vitrail.save(model, here / "half")
    code, out, _ = run("evaluate", "--data", "photos", "--batch-size", "4", "--compare", "good", "half")
    assert code == 0
    assert [table(out)[name][3] for name in ("good", "half")] == ["12", "6"]
    assert "half: scored without 6" in out


@pytest.mark.slow
def test_int8_and_an_export_are_measured_like_the_model(here, run):
    model = vitrail.load("good")
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    vitrail.save(model, here / "sure")
    assert run("export", "sure", "sure.onnx", "--to", "onnx")[0] == 0
    likelihoods = {}
    for name, words in {"sure": [], "sure.onnx": [], "sure-int8": ["--precision", "int8"]}.items():
        code, out, _ = run("evaluate", "--model", name.removesuffix("-int8"), "--data", "photos", *words)
        assert code == 0
        report = json.loads((here / "runs" / f"evaluate-photos-{name}" / "report.json").read_text())
        likelihoods[name] = report["negative_log_likelihood"]["value"]
        assert ("computed" in out) == (name != "sure")
    assert likelihoods["sure.onnx"] == pytest.approx(likelihoods["sure"], abs=1e-5)
    assert likelihoods["sure-int8"] == pytest.approx(likelihoods["sure"], abs=0.05)
    assert likelihoods["sure-int8"] != likelihoods["sure"]
    code, out, _ = run("evaluate", "--data", "photos", "--batch-size", "4", "--compare", "sure.onnx")
    assert (code, table(out)["sure.onnx"][:2]) == (0, ["–", "–"])


def test_a_model_that_fails_does_not_take_the_others_along(here, run):
    code, out, err = run("evaluate", "--data", "photos", "--compare", "nowhere", "good", "others")
    assert code == 1
    assert table(out)["good"][3] == "12"
    assert [line.split(":")[1].strip() for line in err.splitlines()] == ["nowhere", "others"]


def test_ctrl_c_says_what_there_is(here, run, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("vitrail.evaluation.evaluate.score_model", interrupted)
    code, _, err = run("evaluate", "--model", "good", "--data", "photos")
    assert (code, err) == (130, "stopped: nothing was written\n")


def test_ids_are_shown_with_words(here, run):
    for name, wnid in (("cat", "n02123045"), ("dog", "n02085620")):
        (here / "photos" / name).rename(here / "photos" / wnid)
    model = vitrail.load("good")
    model.labels = ["n02123045", "n02085620"]
    vitrail.save(model, here / "ids")
    _, out, _ = run("evaluate", "--model", "ids", "--data", "photos")
    assert "n02123045 tabby" in out
    assert "n02085620 Chihuahua" in out


@pytest.mark.slow
def test_what_training_cost_travels_with_the_weights_and_adds_up(tmp_path):
    first = run_training(runs.config(tmp_path / "first", schedule={"steps": 4, "warmup_steps": 1}))
    cost = vitrail.load(first.folder).training_cost
    flops = count_cost(vitrail.load(first.folder).architecture).flops
    assert cost.complete
    assert cost.flops == 3 * flops * 4 * 32
    tree = runs.tree(tmp_path / "second", schedule={"steps": 2, "warmup_steps": 0})
    tree["model"] = {"weights": str(first.weights), "dropout": 0.0}
    second = vitrail.load(run_training(runs.resolve(tree)).folder).training_cost
    assert second.complete
    assert second.flops == cost.flops + 3 * flops * 2 * 32
    assert second.device_seconds > cost.device_seconds
    assert second.devices == ("CPU",)
    card = (tmp_path / "second" / "model" / "README.md").read_text()
    assert "cost of pre-training" in card
    assert "cost of fine-tuning" in card


def test_weights_of_unknown_cost_make_it_incomplete():
    here = TrainingCost(flops=1e18, device_seconds=10, devices=("CPU",))
    assert not here.after(None).complete
    assert not here.after(here.after(None)).complete


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ([], 2, "--data is missing"),
        (["--data", "photos"], 2, "--model is missing"),
        (["--data", "photos", "--model", "good", "--precision", "fp8"], 2, "bf16"),
        (["--data", "photos", "--model", "good", "steps=3"], 2, "key=value for --suite"),
        (["--data", "photos", "--compare"], 2, "--compare has no models"),
        (["--data", "photos", "--compare", "good", "--suite", "paper"], 2, "--compare takes"),
        (["--data", "photos", "--model", "good", "--suite", "papr"], 2, "did you mean 'paper'?"),
        (["--data", "photos", "--model", "good", "--suite", "paper", "--rates", "much"], 2, "--rates much"),
        (["--data", "photos", "--model", "good", "--suite", "paper", "--json"], 2, "--suite takes"),
        (["--data", "photos", "--model", "good", "--suite", "paper", "--workers", "2"], 2, "without dashes"),
        (["--data", "photos", "--model", "good", "--runs", "2"], 2, "are for --suite"),
        (["--data", "photos", "--model", "good", "--split", "test"], 1, "has no split 'test'"),
        (["--data", "photos", "--model", "good", "--split", "tset"], 2, "did you mean 'test'?"),
        (["--data", "photos", "--model", "others"], 1, "fine-tune"),
        (["--data", "photos", "--model", "good", "--real", "real.json"], 2, "ImageNet's 1000 classes"),
        (["--data", "photos", "--model", "nowhere"], 1, "nowhere"),
        (["--data", "empty", "--model", "good"], 1, "empty"),
        (["--data", "photos", "--model", "good", "--out", "good/config.json"], 2, "is a file"),
        (["--data", "photos", "--model", "good", "--out", "good/config.json/there"], 2, "cannot be made"),
    ],
)
def test_a_wrong_command_is_one_sentence(here, run, arguments, code, sentence):
    found, out, err = run("evaluate", *arguments)
    assert (found, out) == (code, "")
    assert sentence in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--data", "photos", "--from", "scratch", "--quick"], "--from MODEL"),
        (["--data", "photos", "--from", "good", "--quick", "--sweep"], "--sweep"),
    ],
)
def test_a_wrong_quick_command(here, run, arguments, sentence):
    code, _, err = run("finetune", *arguments)
    assert code == 2
    assert sentence in err


@pytest.mark.slow
def test_quick_by_its_command(here, run):
    code, out, _ = run("finetune", "--data", "photos", "--from", "good", "--quick")
    assert code == 0
    assert "model: runs/photos-quick-from-good/model" in out
    for split in ([], ["--split", "val"]):
        code, out, _ = run("evaluate", "--model", "runs/photos-quick-from-good", "--data", "photos", *split)
        assert code == 0
        assert table(out)["top-1 accuracy"][0] == "100.00%"
        assert "warning: " in out


@pytest.mark.slow
def test_images_that_were_held_out_were_not_learned_but_chose_the_weights(here, run):
    small = ["schedule.steps=1", "batch_size=4", "image_size=16", "workers=0", "run.trackers=[]", "run.device=cpu"]
    assert run("finetune", "--data", "photos", "--from", "good", "run.folder=tuned", *small)[0] == 0
    held_out = run("evaluate", "--model", "tuned", "--data", "photos", "--split", "val")[1]
    assert "warning: these images chose the weights" in held_out
    assert held_out.count("warning: ") == 1
    assert (
        "warning: the model has learned"
        in run("evaluate", "--model", "tuned", "--data", "photos", "--split", "train")[1]
    )


def test_suites_by_their_command(here, run):
    """That the options arrive; what suites do is tested where they live."""
    for name in ("train", "test"):
        (here / "sets" / "pets").mkdir(parents=True, exist_ok=True)
        (here / "sets" / "pets" / name).symlink_to(here / "photos")
    small = ["schedule.steps=1", "batch_size=4", "image_size=16", "workers=0", "run.trackers=[]", "run.device=cpu"]
    options = ["--runs", "1", "--rates", "0.01", "--out", "suite"]
    code, out, _ = run("evaluate", "--model", "good", "--data", "sets", "--suite", "paper", *options, *small)
    assert code == 0
    assert "pets: learning rate 0.01: the only one" in out
    found = json.loads((here / "suite" / "suite.json").read_text())
    assert list(found["sets"]) == ["pets"]
    assert "cifar10 has no data" in out


@pytest.fixture
def tagged(here):
    """A table of tags beside the photos, with a row that is wrong, and a model that says "bright" of every image."""
    rows = ["image,tags", *(f"cat/{number}.png,bright" for number in range(6)), *(f"dog/{n}.png," for n in range(6))]
    rows[3] = "cat/2.png,brihgt"
    (here / "photos" / "tags.csv").write_text("\n".join(rows) + "\n")
    model = vitrail.create_model("Ti/4", num_classes=0, seed=0, **SMALL)
    model.give_task(Tags(names=("bright",), column="tags", thresholds=(0.4,)))  # a new head says one half
    vitrail.save(model, here / "tags")
    return here


def test_a_model_of_tags_prints_the_measures_of_tags(tagged, run):
    code, out, _ = run("evaluate", "--model", "tags", "--data", "photos/tags.csv", "--out", "found")
    assert code == 0
    rows = table(out)
    assert rows["mAP"][0] == "45.45%"  # five of the eleven that were scored
    assert rows["micro F1"][0] == "62.50%"
    assert rows["bright"] == ["5", "0.4545", "0.625", "0.4"]
    assert "cat/2.png: photos/tags.csv, line 4: 'brihgt' is no tag, did you mean 'bright'?" in out
    assert {path.name for path in (tagged / "found").glob("*.png")} == {"tags.png", "worst.png"}
    report = json.loads((tagged / "found" / "report.json").read_text())
    assert (report["task"], report["images"], report["broken"]) == ("tags", 11, 1)
    assert {each["truth"] for each in report["worst_images"]} == {"no tag"}


def test_columns_with_other_names_are_named(tagged, run):
    text = (tagged / "photos" / "tags.csv").read_text()
    (tagged / "photos" / "words.csv").write_text(text.replace("image,tags", "image,words"))
    code, out, _ = run("evaluate", "--model", "tags", "--data", "photos/words.csv", "--labels", "words", "--json")
    assert code == 0
    assert json.loads(out)["measures"][0]["value"] == pytest.approx(5 / 11)


def test_what_is_for_labels_is_refused_for_tags(tagged, run):
    code, _, err = run("evaluate", "--model", "tags", "--data", "photos/tags.csv", "--among-data-classes")
    assert code == 2
    assert "among is for models that answer with one label, and this one answers with tags" in err
    code, _, err = run("evaluate", "--model", "tags", "--data", "photos/cat")
    assert code == 1
    assert "photos/cat has no table, which task = 'tags' needs" in err


def test_models_of_tags_side_by_side(tagged, run):
    code, out, err = run("evaluate", "--data", "photos/tags.csv", "--batch-size", "4", "--compare", "tags", "good")
    assert code == 1
    assert table(out)["model"][4:7] == ["mAP", "95% from", "to"]
    assert table(out)["tags"][4] == "45.45%"
    assert "good: it answers with labels, and tags with tags: compare models of one task" in err
