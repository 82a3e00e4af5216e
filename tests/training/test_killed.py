"""A run that is ended in any way and started again is the run that was never ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import runs
from annotated import write_table

from vitrail.training.resolve import read_toml

HERE = Path(__file__).parent
STEPS = 8
"""Of a run for each time that it is killed: so many that it does not end before."""


@pytest.mark.parametrize(
    ("changes", "kills"),
    [
        ({}, 2),
        pytest.param({}, 20, marks=pytest.mark.slow),
        pytest.param({"data": {"workers": 2}}, 20, marks=pytest.mark.slow),
        pytest.param({"objective": runs.MASKED, "model": {"num_classes": 0}}, 10, marks=pytest.mark.slow),
        pytest.param({"objective": runs.AUTOENCODED, "model": {"num_classes": 0}}, 5, marks=pytest.mark.slow),
        pytest.param({"objective": runs.JOINT, "model": {"num_classes": 0}}, 5, marks=pytest.mark.slow),
        pytest.param({"objective": runs.TAUGHT, "model": {"num_classes": 0}}, 5, marks=pytest.mark.slow),
    ],
    ids=["a few times", "often", "with two workers", "masked patches", "masked autoencoding", "LeJEPA", "DINO"],
)
def test_killed_at_random_moments(tmp_path, changes, kills):
    broken = compare_with_killed(tmp_path, changes, kills, {"fewshot_every": 4, "fewshot_shots": 2})
    assert sum(entry["kind"] == "fewshot" for entry in runs.records(broken)) == kills * STEPS // 4


@pytest.mark.slow
def test_a_run_on_tags_killed_at_random_moments(tmp_path):
    data = {"source": str(write_table(tmp_path / "photos", "tags")), "task": "tags"}
    broken = compare_with_killed(tmp_path, {"data": data}, 3, {})
    assert read_toml(broken / "config.toml")["objective"]["kind"] == "task"


def compare_with_killed(tmp_path: Path, changes: dict, kills: int, run: dict) -> Path:
    """Make a run that is left alone, and the same one killed so often; check that they agree, and return the second."""
    folders = [tmp_path / "whole", tmp_path / "broken"]
    for folder in folders:
        steps = {"steps": kills * STEPS, "warmup_steps": 4}
        tree = runs.tree(folder, **changes, schedule=steps, run=run)
        folder.with_suffix(".json").write_text(json.dumps(tree))
    child = subprocess.run(
        [
            *(sys.executable, str(HERE / "killed.py")),
            *(str(folder.with_suffix(".json")) for folder in folders),
            *(str(kills), "0", *(["soon"] if kills < 10 else [])),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=280,
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert found["killed"] == kills, "the run ended before it was killed so often; make it longer"
    assert len(set(found["steps"])) >= min(4, kills), found["steps"]
    runs.assert_same_run(*folders)
    steps = [entry["step"] for entry in runs.records(folders[1]) if entry["kind"] == "train"]
    assert steps == list(range(1, kills * STEPS + 1))
    return folders[1]
