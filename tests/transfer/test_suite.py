"""Suites from Python: what comes back, what is told on the way, and how it goes on after a stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import stand_ins

from vitrail.errors import ConfigError, DataError, Stopped, VitrailError
from vitrail.training import loop
from vitrail.transfer.suite import run_suite

WORDS = ["red", "green", "blue"]
SETTINGS = {
    "model.image_size": 16,
    "data.batch_size": 8,
    "data.workers": 0,
    "run.trackers": [],
    "run.threads": 1,
    "run.deterministic": True,
    "schedule.steps": 3,
}


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory):
    with stand_ins.quick(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return stand_ins.tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for name in ("pets", "cifar10"):
        stand_ins.in_parts(root / name, WORDS, train=8, test=4)
    return root


def test_a_suite_returns_its_results_and_tells_what_happens(model, data, tmp_path):
    events = []
    result = run_suite(
        "paper",
        Path(model),
        data,
        folder=tmp_path / "suite",
        runs=2,
        rates=[0.01, 0.1],
        settings=SETTINGS,
        on_event=lambda kind, values: events.append((kind, values)),
    )
    assert (result.suite, result.model, result.folder) == ("paper", model, tmp_path / "suite")
    assert list(result.sets) == ["cifar10", "pets"]
    pets = result.sets["pets"]
    assert pets.rate in (0.01, 0.1)
    assert pets.mean == pytest.approx(sum(run.hits for run in pets.runs) / 24)
    assert pets.deviation is not None
    assert [run.count for run in pets.runs] == [12, 12]
    assert any("protocol" in note for note in result.notes)
    kinds = [kind for kind, values in events if values.get("set") == "pets"]
    assert kinds == ["transfer", "trial", "trial", "chosen", "scored", "scored", "transferred"]
    last = dict(events)["transferred"]
    assert (last["mean"], last["runs"]) == (pets.mean, 2)
    assert sum(kind == "trained" for kind, _ in events) == 8
    assert {values["task"] for kind, values in events if kind == "progress"} >= {"testing"}
    json.dumps(events)  # plain data
    saved = json.loads((tmp_path / "suite/suite.json").read_text())
    assert json.loads(json.dumps(result.to_dict())) == saved
    assert (tmp_path / "suite/suite.md").read_text().splitlines()[2:] == result.lines()
    assert "CIFAR-10" in repr(result)
    assert "Oxford-IIIT Pets" in result._repr_html_()
    assert "learning rate" in repr(pets)


@pytest.mark.parametrize("kind", ["step", "scored"])
def test_a_suite_goes_on_where_it_was_interrupted(model, data, tmp_path, monkeypatch, kind):
    steps, plain = [], loop.train_step
    monkeypatch.setattr(loop, "train_step", lambda run, state: (steps.append(run.config.run.folder), plain(run, state)))
    (tmp_path / "sets.toml").write_text(f'pets = "{data}/pets"')
    seen = []

    def interrupt(event, values):
        seen.append(event)
        if seen.count(kind) == (7 if kind == "step" else 1) and event == kind:
            raise KeyboardInterrupt

    def run(on_event):
        folder = tmp_path / "suite"
        settings = {"runs": 2, "rates": [0.01, 0.1], "settings": SETTINGS, "on_event": on_event}
        return run_suite("paper", model, tmp_path / "sets.toml", folder=folder, **settings)

    with pytest.raises(Stopped if kind == "step" else KeyboardInterrupt):  # a training saves a checkpoint first
        run(interrupt)
    assert len(steps) < 12
    result = run(lambda event, values: None)
    assert len(steps) == 12, "what was trained is not trained again"
    assert len(result.sets["pets"].runs) == 2
    assert run(lambda event, values: None).to_dict() == result.to_dict()
    assert len(steps) == 12


def test_what_is_wrong_is_an_exception_with_a_sentence(model, data, tmp_path):
    def wrong(*given, **options) -> VitrailError:
        with pytest.raises(VitrailError) as raised:
            run_suite(*given, folder=tmp_path / "suite", **{"settings": SETTINGS, **options})
        return raised.value

    error = wrong("papr", model, data)
    assert isinstance(error, ConfigError)
    assert "did you mean 'paper'?" in str(error)
    assert isinstance(wrong("vtab", model, data / "pets"), DataError)
    assert "runs" in str(wrong("paper", model, data, settings={"run.seed": 3}))
    assert "one too many" in str(wrong("paper", model, data, settings={"learning_rate": 3}, rates=[0.1]))
    assert "above 0" in str(wrong("paper", model, data, rates=[0.0]))
    assert not (tmp_path / "suite").exists()
