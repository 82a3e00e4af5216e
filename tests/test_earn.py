"""The plan of benchmarks/earn.py: every run can be, and what is kept of one is what the pages read."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from pathlib import Path

import pytest

from vitrail.recipes import find
from vitrail.train.resolve import resolve

SCRIPT = Path(__file__).parent.parent / "benchmarks/earn.py"
spec = importlib.util.spec_from_file_location("earn", SCRIPT)
earn = sys.modules["earn"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(earn)


@pytest.mark.parametrize("name", earn.PLAN)
def test_every_run_is_a_command_that_can_be(name):
    planned = earn.PLAN[name]
    _, verb, recipe, *changes = shlex.split(planned.command("somewhere", "pane"))
    assert verb == "train"
    config = resolve(find(recipe).config, changes)
    assert config.data.source == "somewhere"
    assert config.model.weights == ("pane" if planned.begins_from else None)
    assert planned.begins_from is None or planned.begins_from in earn.PLAN


def test_what_begins_from_another_waits_for_it(tmp_path):
    assert not earn.ready(tmp_path, "pane-to-cifar10", ["pane", "pane-to-cifar10"])
    assert earn.ready(tmp_path, "pane-to-cifar10", ["pane-to-cifar10"])  # then the pane inside the package
    (tmp_path / "pane/model").mkdir(parents=True)
    (tmp_path / "pane/model/config.json").write_text("{}")
    assert earn.ready(tmp_path, "pane-to-cifar10", ["pane", "pane-to-cifar10"])


def test_what_is_kept_is_about_the_run_and_its_curves(tmp_path):
    run = tmp_path / "pane"
    run.mkdir()
    lines = [
        {"kind": "train", "step": 5, "accuracy": 0.1, "clock": {"seconds": 12.34}},
        {"kind": "evaluation", "step": 5, "accuracy": 0.2},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half": ')
    about, *curves = earn.collected(tmp_path, "pane", 3, ["a=b"], ["cifar10-stem"])
    assert curves == [{**line, "name": "pane"} for line in lines]
    assert about["command"] == "vitrail train tiny-imagenet data.source=tiny-imagenet a=b"
    assert (about["seed"], about["gpu_seconds"], about["beside"]) == (3, 12.3, "cifar10-stem")
    assert (about["steps_done"], about["finished"]) == (5, True)
