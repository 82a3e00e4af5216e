"""vitrail study: what is printed, and where."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vitrail.studies.catalogue import NAMES

pytestmark = pytest.mark.slow  # each starts a Python of its own


def run(*words, folder):
    command = [sys.executable, "-m", "vitrail", "study", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=240)


def test_the_list_has_every_study(tmp_path):
    child = run("--list", folder=tmp_path)
    assert child.returncode == 0
    heading, *lines = child.stdout.splitlines()
    assert heading.split("\t")[:2] == ["name", "claim"]
    assert [line.split("\t")[0] for line in lines] == list(NAMES)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ((), "--list"),
        (("position",), "positions"),
        (("positions", "--scale", "huge"), "tiny or small"),
        (("positions", "--scale", "small"), "--data"),
    ],
)
def test_mistakes_are_one_line_with_the_next_step(words, hint, tmp_path):
    child = run(*words, folder=tmp_path)
    assert child.returncode == 2
    assert len(child.stderr.splitlines()) == 1
    assert hint in child.stderr


@pytest.mark.slow
def test_a_study_is_printed_and_kept(tmp_path):
    words = ("attention-focus", "--seeds", "2", "--device", "cpu")
    child = run(*words, folder=tmp_path)
    assert child.returncode == 0, child.stderr
    assert "6 of 6" in child.stderr
    assert "left" in child.stderr
    assert "verdict:" in child.stdout
    again = run(*words, "--json", folder=tmp_path)
    (result,) = json.loads(again.stdout)
    assert result["name"] == "attention-focus"
    assert len(result["rows"]) == 6
    assert not again.stderr
