"""The plan of benchmarks/earn.py: every run can be, and what is kept of one is what the pages read."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from vitrail.recipes import find_recipe
from vitrail.training.resolve import resolve

SCRIPT = Path(__file__).parent.parent / "benchmarks/earn.py"
spec = importlib.util.spec_from_file_location("earn", SCRIPT)
earn = sys.modules["earn"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(earn)


@pytest.mark.parametrize("name", earn.PLAN)
def test_every_run_is_a_command_that_can_be(name):
    planned = earn.PLAN[name]
    verb, recipe, *changes = planned.words("some where", "pane", 3, ["run.log_every=7"])
    assert verb == "train"
    config = resolve(find_recipe(recipe).config, changes)
    assert config.data.source == "some where"
    assert (config.run.seed, config.run.log_every) == (3, 7)
    assert config.model.weights == ("pane" if planned.begins_from else None)
    assert planned.begins_from is None or planned.begins_from in earn.PLAN


def test_what_begins_from_another_waits_for_it(tmp_path):
    assert not earn.ready(tmp_path, "pane-to-cifar10", ["pane", "pane-to-cifar10"])
    assert earn.ready(tmp_path, "pane-to-cifar10", ["pane-to-cifar10"])  # then the pane inside the package
    (tmp_path / "pane/model").mkdir(parents=True)
    (tmp_path / "pane/model/config.json").write_text("{}")
    assert earn.ready(tmp_path, "pane-to-cifar10", ["pane", "pane-to-cifar10"])


def test_what_is_kept_is_about_the_run_and_its_curves_and_once(tmp_path):
    run = tmp_path / "pane-to-flowers"
    run.mkdir()
    lines = [
        {"kind": "train", "step": 5, "accuracy": 0.1, "clock": {"seconds": 12.34}},
        {"kind": "evaluation", "step": 5, "accuracy": 0.2},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half": ')
    for _ in range(2):
        earn.Earning(tmp_path, [], {}, 3, ["a=b"], "abc").keep("pane-to-flowers", ["pane"])
    about, *curves = (json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())
    assert curves == [{**line, "name": "pane-to-flowers, seed 3"} for line in lines]
    assert "'data.augmentation.crop_area=[0.35,1.0]'" in about["command"]
    assert about["command"].endswith("run.seed=3 a=b")
    assert (about["seed"], about["gpu_seconds"], about["beside"], about["commit"]) == (3, 12.3, "pane", "abc")
    assert (about["steps_done"], about["finished"]) == (5, True)


def test_what_ended_unseen_is_kept_by_the_next_start(tmp_path):
    run = tmp_path / "pane"
    (run / "model").mkdir(parents=True)
    (run / "model/config.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "clock": {"seconds": 1.0}}\n')
    assert earn.Earning(tmp_path, ["pane"], {}, 0, [], "abc").run() == 0
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2
