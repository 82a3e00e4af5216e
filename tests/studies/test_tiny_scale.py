"""Every study at the tiny scale, on a CPU. Trainings that several studies need are done once."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import vitrail
from vitrail.studies.catalogue import NAMES, find_study
from vitrail.studies.results import RESULTS_FILE, read_rows
from vitrail.studies.scales import TINY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("studies")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_study_runs_and_decides(name, folder):
    result = vitrail.study(name, seeds=1, folder=folder, device="cpu", on_event=lambda *_: None)
    assert result.verdict in ("holds here", "does not hold here", "not decided")
    assert result.results.arms == [arm.name for arm in find_study(name).list_arms(TINY)]
    assert (result.folder / "figure.png").stat().st_size > 5000
    assert find_study(name).claim in (result.folder / "page.md").read_text()


@pytest.mark.slow
def test_a_quick_study_decides(tmp_path):
    """One that trains little: its three arms are a trained model, an untrained one and a fixed map."""
    result = vitrail.study("attention-focus", seeds=2, folder=tmp_path, device="cpu", on_event=lambda *_: None)
    assert len(result.checks) == 2
    assert all(check.difference.low < check.difference.value < check.difference.high for check in result.checks)
    centre = result.results.list_values("centre of the image")
    assert centre[0] == centre[1]


@pytest.mark.slow
def test_a_killed_study_goes_on_and_ends_with_the_same_numbers(tmp_path):
    """Killed with a row written and another training under way."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = [sys.executable, "-m", "vitrail", "study", "pooling", "--seeds", "1", "--device", "cpu", "--folder"]
    subprocess.run([*command, str(whole)], check=True, capture_output=True, timeout=200)
    rows = killed / "tiny/pooling" / RESULTS_FILE
    with subprocess.Popen([*command, str(killed)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        deadline = time.monotonic() + 120
        while not rows.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        child.kill()
    kept = read_rows(rows)
    assert 0 < len(kept) < 4
    subprocess.run([*command, str(killed)], check=True, capture_output=True, timeout=200)
    again, once = read_rows(rows), read_rows(whole / "tiny/pooling" / RESULTS_FILE)
    assert again[: len(kept)] == kept
    assert {row["arm"]: row["measured"] for row in again} == {row["arm"]: row["measured"] for row in once}
