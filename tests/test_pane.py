"""The model inside the package: there without a network, meant where no model is named, and as its card says."""

from __future__ import annotations

import json
import logging
import os
import re
import runpy
import socket
from pathlib import Path

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from striped import stripes

import vitrail
from commands import runner
from vitrail.errors import ConfigError, WeightsError
from vitrail.inspection import inspect
from vitrail.training.resolve import resolve
from vitrail.weights import source
from vitrail.weights.source import PANE_FOLDER
from vitrail.workflows import quickstart
from vitrail.workflows.start_model import SCRATCH

MOST = 12_000_000
"""Bytes of all files together."""
SAID = "no model named: using pane, the small one inside vitrail ("
TRAINED_ON = "Tiny-ImageNet-200"
MAKER = Path(__file__).parent.parent / "benchmarks/pane_card.py"
SHORT = ["steps=1", "batch_size=4", "image_size=16", "workers=0", "run.trackers=[]", "run.report=false"]


@pytest.fixture(scope="module")
def pane():
    return vitrail.load("pane")


@pytest.fixture(scope="module")
def card():
    return (PANE_FOLDER / "README.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The two photographs inside scikit-learn, and a few made images of two classes."""
    root = tmp_path_factory.mktemp("images")
    for name, pixels in zip(("china.jpg", "flower.jpg"), load_sample_images().images, strict=True):
        Image.fromarray(pixels).save(root / name)
    stripes(root / "stripes", classes=2, images=6, size=16)
    return root


@pytest.fixture
def here(folder, tmp_path, monkeypatch):
    """A folder to work in, without a network."""

    def cut(self, address):
        raise OSError("no network here")

    monkeypatch.setattr(socket.socket, "connect", cut)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.fixture
def run(here, monkeypatch, capsys):
    return runner(monkeypatch, capsys)


def told(text: str, row: str) -> str:
    """What the card says in a row of a table."""
    return re.search(rf"^\| {row} \| (.*?) \|", text, re.MULTILINE)[1]


# Loading


def test_it_is_a_native_folder_of_half_precision_that_loads_in_full(pane):
    assert {path.name for path in PANE_FOLDER.iterdir()} == {
        "model.safetensors",
        "config.json",
        "README.md",
        "SHA256SUMS",
    }
    assert sum(path.stat().st_size for path in PANE_FOLDER.iterdir()) <= MOST
    assert {parameter.dtype for parameter in vitrail.load(PANE_FOLDER).parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in pane.parameters()} == {torch.float32}
    assert next(vitrail.load("pane", dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16
    assert pane.labels is not None
    assert len(set(pane.labels)) == pane.num_classes == 200
    assert not pane.training
    assert pane.origin.source == "pane"


def test_the_word_alone_means_it_and_a_folder_of_that_name_is_a_path(here, pane, caplog, monkeypatch):
    vitrail.save(vitrail.create_model("Ti/4", image_size=8, width=8, depth=1, num_heads=1, mlp_dim=8), here / "pane")
    with caplog.at_level(logging.WARNING, logger="vitrail"):
        assert vitrail.load("pane").architecture == pane.architecture
    assert "what lies in this folder is ./pane" in caplog.text
    for path in ("./pane", Path("pane"), here / "pane"):
        assert vitrail.load(path).image_size == (8, 8)
    for name in ("config.toml", "metrics.jsonl"):
        (here / "pane" / name).write_text("")
    assert inspect.find_run_folder("pane") is None
    assert inspect.find_run_folder("./pane") == Path("pane")
    (here / "linked").mkdir()
    (here / "linked/pane").symlink_to(here / "china.jpg")
    monkeypatch.chdir(here / "linked")
    assert inspect._shorten("pane") == "pane"
    assert inspect.name_models(["pane", "./pane"]) == ["pane", "china.jpg"]


def test_where_it_is_missing_or_taken_for_an_architecture(monkeypatch, tmp_path):
    monkeypatch.setattr(source, "PANE_FOLDER", tmp_path / "pane")
    with pytest.raises(WeightsError, match="no pane"):
        vitrail.load("pane")
    with pytest.raises(vitrail.ConfigError, match=r"give it to vitrail\.load"):
        vitrail.create_model("pane")
    with pytest.raises(WeightsError, match="timm:name or pane"):
        vitrail.load("nowhere")
    with pytest.raises(WeightsError, match="did you mean 'pane'"):
        vitrail.load("pnae")
    (tmp_path / "finetune-photos-from-pane").mkdir()
    with pytest.raises(WeightsError, match=r"did you mean '.*/finetune-photos-from-pane'"):
        vitrail.load(tmp_path / "finetune-photos")


# No model named


def test_predict(run, pane):
    code, out, err = run("predict", "china.jpg", "flower.jpg", "--top", "3", "--json", "--device", "cpu")
    assert code == 0
    assert err.startswith(f"{SAID}200 classes, {pane.image_size[0]} pixels); --model MODEL takes another\n")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["file"] for row in rows] == ["china.jpg", "flower.jpg"]
    named = vitrail.Predictor(pane, device="cpu")("china.jpg", top=3)
    assert [label["label"] for label in rows[0]["labels"]] == [label for label, _ in named]
    assert run("predict", "china.jpg", "--model", "pane")[2].startswith("1 image, ")
    assert "no images" in run("predict")[2]


def test_inspect(run, here, monkeypatch):
    monkeypatch.setattr(inspect, "draw_findings", lambda *given: {})  # which takes the longest
    code, out, err = run("inspect", "--most", "2", "--device", "cpu")
    assert code == 0
    assert err.startswith(SAID)
    assert out.splitlines()[-1] == "report: runs/inspect-pane/report.html"
    assert TRAINED_ON in (here / "runs/inspect-pane/report.html").read_text(), "with its card"


def test_a_finished_run_comes_first(run, here, monkeypatch, capsys):
    (here / "runs/mine/model").mkdir(parents=True)
    for name in ("runs/mine/config.toml", "runs/mine/model/config.json"):
        (here / name).write_text("")
    monkeypatch.setattr(inspect, "open_engine", lambda model, **options: pytest.fail(model))
    with pytest.raises(pytest.fail.Exception, match="runs/mine"):
        run("inspect")
    assert capsys.readouterr().err.startswith("no model named: using runs/mine,")


def test_serve(run, monkeypatch):
    served = {}

    def serve(models, settings, ready):
        served.update(models)
        ready()

    ended = []
    monkeypatch.setattr("vitrail.serving.server.run_server", serve)
    monkeypatch.setattr("vitrail.cli.serve._end_process", lambda: ended.append(True))
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port = asked.getsockname()[1]
    code, out, err = run("serve", "--port", str(port), "--threads", "1")
    assert code == 0
    assert out.startswith(f"serving pane (200 classes) at http://127.0.0.1:{port}: up to 256 waiting images, 20 MB a ")
    assert out.endswith("40 megapixels an image, deadline 10 s\n")
    assert out.count("\n") == 1
    assert err.startswith(SAID)
    assert err.endswith("loading pane\nstopped\n")
    assert list(served) == ["pane"]
    assert ended == [True]


@pytest.mark.slow
def test_export(run, here, pane):
    code, out, err = run("export", "out.pt2", "--to", "torch", "--images", "stripes")
    assert code == 0
    assert err == f"{SAID}200 classes, {pane.image_size[0]} pixels); vitrail export MODEL TARGET takes another\n"
    assert out.endswith("written: out.pt2\n")
    code, _, err = run("export", "runs/mine", "--to", "onnx")
    assert (code, err) == (
        2,
        "error: runs/mine is no .onnx file to write: `vitrail export runs/mine.onnx --to onnx` exports pane, "
        "`vitrail export runs/mine model.onnx --to onnx` the model runs/mine\n",
    )
    code, _, err = run("export", "a", "b.onnx", "c", "--to", "onnx")
    assert (code, err) == (2, "error: 'c' is one word too many: vitrail export MODEL TARGET --to onnx\n")


def test_fewshot(run):
    code, out, err = run("fewshot", "--data", "stripes", "--shots", "1", "--methods", "least-squares,knn")
    assert code == 0
    assert err.startswith(SAID)
    assert out.splitlines()[1].startswith("least-squares\t1\t")


@pytest.mark.slow
def test_finetune_quickly(run, here):
    code, out, err = run("finetune", "--data", "stripes", "--quick")
    assert code == 0
    assert err.endswith("--from MODEL takes another, --from scratch none\n")
    assert "features each, from pane" in out.splitlines()[0]
    model = vitrail.load(here / "runs/stripes-quick")
    assert model.labels == ("colour-0", "colour-1")
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.slow
def test_finetune_and_from_scratch(run, here):
    code, _, err = run("finetune", "--data", "stripes", *SHORT)
    assert code == 0
    assert SAID in err
    tuned = vitrail.load(here / "runs/stripes")
    assert tuned.architecture.width == vitrail.load("pane").architecture.width
    small = ["model.width=8", "model.num_heads=1", "model.mlp_dim=8", "model.depth=1", *SHORT]
    code, out, err = run("finetune", "--data", "stripes", "--from", SCRATCH, *small)
    assert code == 0
    assert out.startswith("training from scratch, ")
    assert SAID not in err
    assert vitrail.load(here / "runs/stripes-scratch").architecture.width == 8
    code, out, err = run(
        "finetune", "--data", "stripes", "folder=mine", *small
    )  # an architecture asks for fresh weights
    assert (code, out.startswith("training from scratch, "), SAID in err) == (0, True, False)
    assert run("finetune", "--data", "stripes", "--from", "scrach")[2] == (
        "error: there is no model 'scrach', did you mean 'scratch'?\n"
    )
    assert run("finetune", "--data", "stripes", "weights=pane")[::2] == (
        2,
        "error: give --from MODEL (in Python: model) in place of model.weights\n",
    )


@pytest.mark.slow
def test_the_quickstart_beside_it(run, monkeypatch):
    short = {"schedule.steps": 1, "schedule.warmup_steps": 0, "run.trackers": (), "data.workers": 0}
    small = {**short, "data.batch_size": 2, "run.report": False}
    monkeypatch.setattr(quickstart, "resolve", lambda tree, settings: resolve(tree, {**small, **settings}))
    monkeypatch.setattr(quickstart, "TRANSFER", {**short, "model.image_size": 16, "data.batch_size": 4})
    code, out, _ = run("quickstart", "--from", "pane")
    assert code == 0
    lines = out.splitlines()
    assert [line[0] for line in lines if line[1:3] == ". "] == ["1", "2", "3", "4"]
    assert "4. fine-tuning pane on the same digits, at 32 pixels" in lines
    assert "model: runs/quickstart/transfer/model" in lines
    table = [line.split("\t") for line in lines[-3:]]
    assert [row[:2] for row in table] == [["from", "images in training"], ["scratch", "4"], ["pane", "4"]]
    assert all(re.fullmatch(r"\d+\.\d%", row[2]) for row in table[1:])
    assert run("quickstart", "--from", "nowhere")[:2] == (1, ""), "before any training"


# The card


def test_the_card_says_what_there_is_to_know(pane, card):
    assert told(card, "parameters") == f"{sum(each.numel() for each in pane.parameters()):,}"
    assert told(card, "recipe") == "tiny-imagenet"
    assert told(card, "command").startswith("`vitrail train tiny-imagenet ")
    assert told(card, "seed").isdigit()
    assert re.match(r"[\d,]+ seconds", told(card, "cost"))
    assert TRAINED_ON in card
    assert "https://image-net.org/download.php" in card
    assert len(re.findall(r"^\| [\d,]+ \| [\d.]+ \| ", card, re.MULTILINE)) >= 5, "the curve"
    assert re.fullmatch(r"\d+\.\d\d%", told(card, "top-1 accuracy"))


def test_the_card_is_made_of_the_raw_results(pane, card):
    maker = runpy.run_path(str(MAKER))
    lines = [json.loads(line) for line in maker["TRAINING"].read_text().splitlines()]
    evaluation = json.loads(maker["EVALUATION"].read_text())
    assert card == maker["card"](vitrail.load(PANE_FOLDER), lines, evaluation), "python benchmarks/pane_card.py card"
    assert card.count("\n| ") < 60, "of many evaluations some"


@pytest.mark.slow
@pytest.mark.skipif("TINY_IMAGENET" not in os.environ, reason="TINY_IMAGENET must name the data set's folder")
def test_the_accuracy_is_the_cards(here, card):
    from vitrail.evaluation.evaluate import evaluate

    report = evaluate("pane", os.environ["TINY_IMAGENET"], "val", device="cpu", folder=here / "report")
    assert f"{report.top1.value:.2%}" == told(card, "top-1 accuracy")


def test_the_name_may_be_a_path_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert next(vitrail.load(Path("pane")).parameters()).dtype == torch.float32
    with pytest.raises(ConfigError, match="NoneType"):
        vitrail.load(None)
