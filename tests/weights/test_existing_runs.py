"""Someone who names a run that does not exist is told which do."""

from __future__ import annotations

import os
import re

import pytest

import vitrail
from vitrail.weights.source import choose_weights


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Makes a run of that name, each newer than the last."""
    monkeypatch.chdir(tmp_path)
    made = []

    def make(name: str, finished: bool = True) -> None:
        folder = tmp_path / "runs" / name
        (folder / ("model" if finished else "checkpoints")).mkdir(parents=True)
        if finished:
            (folder / "model" / "config.json").write_text("{}")
        made.append(name)
        os.utime(folder, (1000 + len(made),) * 2)

    return make


def refuse(model: str) -> str:
    with pytest.raises(vitrail.WeightsError) as error:
        vitrail.load(model)
    return str(error.value)


def list_told(message: str) -> list[str]:
    return re.search("these runs exist: (.*)$", message)[1].removesuffix(" and 2 more").split(", ")


def test_the_nearest_comes_first_then_the_newest(runs):
    for name in ("older", "finetune-photos-from-pane", "suite/inner", "newer"):
        runs(name)
    runs("unfinished", finished=False)
    message = refuse("runs/foto")
    assert "did you mean 'runs/finetune-photos-from-pane'?" in message
    assert list_told(message) == [
        "runs/finetune-photos-from-pane",
        *("runs/unfinished", "runs/newer", "runs/suite/inner", "runs/older"),
    ]
    assert "did you mean" not in refuse("runs/zebra")
    assert list_told(refuse("zebra"))[0] == "runs/unfinished", "also without the folder"


def test_at_most_ten(runs):
    for number in range(12):
        runs(f"x{number}")
    told = list_told(refuse("runs/something"))
    assert told == [f"runs/x{number}" for number in range(11, 1, -1)]


def test_trials_of_a_sweep_are_no_runs_of_their_own(runs):
    runs("mine")
    runs("mine/sweep-0.01")
    assert list_told(refuse("runs/other")) == ["runs/mine"]


def test_the_best_of_no_run(runs):
    runs("mine")
    with pytest.raises(vitrail.ConfigError, match="runs/mine"):
        choose_weights("runs/minn", "best")


def test_without_any_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "these runs exist" not in refuse("runs/foto")
    assert "hf:someone/model" in refuse("someone/model")
