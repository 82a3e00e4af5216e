"""--which best: every verb that takes MODEL can take the best weights of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import vitrail
from commands import runner
from samples import randomise

SMALL = {"image_size": 16, "in_channels": 1, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64, "num_classes": 10}


@pytest.fixture
def run_folder(tmp_path, monkeypatch) -> Path:
    """A finished run, whose best weights are not the last."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/x")
    (folder / "checkpoints").mkdir(parents=True)
    vitrail.save(randomise(vitrail.create_model("Ti/4", **SMALL)), folder / "model")
    best = randomise(vitrail.create_model("Ti/4", **SMALL))
    with torch.no_grad():
        best.head.bias.copy_(torch.tensor([100.0, *[0.0] * 9]))  # it says 0 to everything
    vitrail.save(best, folder / "best")
    (folder / "best.json").write_text(json.dumps({"folder": "best", "step": 3, "metric": "accuracy", "value": 0.5}))
    return folder


def test_convert(run_folder, monkeypatch, capsys):
    code, _, err = runner(monkeypatch, capsys, "convert")(str(run_folder), "out", "--to", "timm", "--which", "best")
    assert code == 0, err
    assert vitrail.load("out").head.bias[0] == 100


def test_evaluate_names_the_weights(run_folder, monkeypatch, capsys):
    run = runner(monkeypatch, capsys, "evaluate")
    code, out, err = run("--model", str(run_folder), "--data", "digits", "--which", "best", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["model"].endswith("best")
    assert {row["accuracy"]["value"] for row in report["classes"]} == {0.0, 1.0}  # one class takes all
    assert [path.name for path in Path("runs").glob("evaluate-*")] == ["evaluate-digits-x-best"]


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "--model", "pane", "--data", "digits"],
        ["evaluate", "--compare", "pane", "--data", "digits"],
        ["predict", "photo.png", "--model", "pane"],
        ["predict", "photo.png"],
        ["export", "pane", "model.onnx", "--to", "onnx"],
        ["fewshot", "--model", "pane", "--data", "digits"],
        ["inspect", "pane"],
        ["convert", "pane", "out", "--to", "timm"],
        ["serve", "--model", "pane"],
    ],
)
def test_a_model_that_is_no_run_has_no_best(words, run_folder, monkeypatch, capsys):
    Path("photo.png").touch()  # predict first looks whether there is a photo
    code, _, err = runner(monkeypatch, capsys, *words)("--which", "best")
    assert code == 2
    assert "no run" in err
