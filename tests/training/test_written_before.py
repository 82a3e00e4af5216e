"""A run folder and a model folder that commit 9b16ebf wrote, before the rooms were moved, still resume and load.

`written_by_9b16ebf/run` was stopped after step 10 of 20; `expected.json` is of the same run left alone, by that commit.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import runs
import torch

import vitrail
from vitrail.training.resolve import read_toml, resolve
from vitrail.training.run_training import run_training

FOLDER = Path(__file__).parent / "written_by_9b16ebf"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
IMAGES = torch.linspace(0, 1, 2 * 16 * 16).view(2, 1, 16, 16)


def test_an_old_run_resumes_and_ends_where_it_would_have(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FOLDER / "run", "run")
    run_training(resolve(read_toml(Path("run/config.toml"))))
    assert runs.losses(Path("run")) == pytest.approx(EXPECTED["losses"], rel=1e-5)
    with torch.inference_mode():
        logits = vitrail.load("run")(IMAGES)
    torch.testing.assert_close(logits, torch.tensor(EXPECTED["logits"]), rtol=1e-4, atol=1e-5)


def test_an_old_model_folder_loads_and_computes_the_same():
    with torch.inference_mode():
        logits = vitrail.load(FOLDER / "model")(IMAGES)
    torch.testing.assert_close(logits, torch.tensor(EXPECTED["logits"]), rtol=1e-5, atol=1e-6)


def test_keys_that_are_newer_than_a_run_have_the_meaning_it_was_begun_with():
    config = resolve(read_toml(FOLDER / "run/config.toml"))
    assert config.optimizer.averaging_ramp
    assert config.schedule.final_learning_rate == 0
