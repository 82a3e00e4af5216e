"""Commands that are printed can be typed as they are, whatever the folder is called."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from vitrail.cli.next_step import describe_next_step
from vitrail.cli.train import describe_training_result

FOLDER = Path("runs/two words & $HOME 'quoted'")


@pytest.mark.parametrize("kind", ["classification", "masked-patches"])
@pytest.mark.parametrize("problem", [None, "stopped", "a full disk"])
def test_paths_are_quoted(kind, problem):
    config = SimpleNamespace(objective=SimpleNamespace(kind=kind))
    measured = {"evaluation": None, "evaluated": 0, "fewshot": None}
    result = SimpleNamespace(**measured, folder=FOLDER, weights=FOLDER / "model", config=config)
    path = str(FOLDER / "report.html") if problem is None else None
    report = {"folder": str(FOLDER), "path": path, "problem": problem}
    lines = list(describe_training_result(result, report))
    commands = [words for line in lines if line.startswith(("next:", "report: ")) for words in split_commands(line)]
    assert commands
    assert all(str(FOLDER) in words for words in commands)


def test_the_next_step_learns_the_same():
    """The command after a quick one keeps what says what is learned, and gets a folder of its own."""
    given = {"task": "tags", "labels": "my tags", "labels_from": None, "minutes": None, "sweep": False}
    settings = ["folder=runs/quick", "run.folder=runs/quick", "objective.balance=none", "run.seed=3"]
    line = describe_next_step(FOLDER, "my photos.csv", "pane", given, settings)
    predict, again = split_commands(line.replace("; or train", "\nor train").replace("often better:", "\n"))
    assert predict[:5] == ["vitrail", "predict", "PHOTO", "--model", str(FOLDER)]
    assert again[:6] == ["vitrail", "finetune", "--data", "my photos.csv", "--task", "tags"]
    assert again[6:] == [
        "--labels",
        "my tags",
        "--from",
        "pane",
        "--minutes",
        "10",
        "objective.balance=none",
        "run.seed=3",
    ]


def split_commands(line: str) -> list[list[str]]:
    """Return the words of each command in a line, as a shell would take them."""
    return [shlex.split(line[match.start() :].split("; in Python")[0]) for match in re.finditer("vitrail [a-z]", line)]
