"""The command line as a person meets it: in a process of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

import pytest
import typer

import vitrail
from commands import runner
from vitrail.cli import app


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "vitrail", *arguments], capture_output=True, text=True, timeout=120)


def seconds(*arguments: str) -> float:
    start = time.perf_counter()
    assert run(*arguments).returncode == 0
    return time.perf_counter() - start


def busy() -> float:
    """Seconds that children kept a core busy. Other tests run beside this one, and a clock would count them too."""
    spent = os.times()
    return spent.children_user + spent.children_system


def test_help_answers_at_once():
    taken = []
    for _ in range(3):
        before = busy()
        assert run("--help").returncode == 0
        taken.append(busy() - before)
    assert 0 < statistics.median(taken) < 0.4


def test_models_answers_soon():
    assert seconds("models") < 3


@pytest.mark.slow
def test_help_names_every_verb(monkeypatch, capsys):
    here = runner(monkeypatch, capsys)
    text = here("--help")[1]
    for verb in (
        "quickstart",
        "train",
        "finetune",
        "evaluate",
        "fewshot",
        "predict",
        "inspect",
        "models",
        "doctor",
        "convert",
        "export",
        "serve",
        "bench",
        "data",
    ):
        assert verb in text
        assert here(verb, "--help")[0] == 0


def test_a_flag_shows_no_type_in_the_help(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    here = runner(monkeypatch, capsys)
    commands = [[], ["data"], *([name] for name in typer.main.get_command(app).commands), ["data", "pack"]]
    for words in commands:
        text = here(*words, "--help")[1]
        assert "--help" in text
        assert "bool" not in text.lower(), words
    assert "--no-compile" in here("bench", "--help")[1]


def test_version():
    assert run("--version").stdout == f"vitrail {vitrail.__version__}\n"


def test_models_off_a_terminal_is_one_line_each():
    lines = run("models").stdout.splitlines()
    assert lines[0].split("\t") == ["name", "parameters", "GFLOPs", "tokens", "size"]
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in lines[1:]}
    assert rows["B/16"] == ["86567656", "35.1", "197", "224"]
    assert rows["BiT-R50x1"] == ["25549352", "8.2", "–", "224"]


def test_models_by_name_and_size():
    lines = run("models", "R50+B/16", "S/8", "--size", "384").stdout.splitlines()
    assert lines[1].split("\t")[:2] == ["R50+B/16", "98950952"]
    assert lines[2].split("\t")[3:] == ["2305", "384"]


def test_models_at_a_size_that_some_patches_do_not_divide():
    rows = {line.split("\t")[0]: line.split("\t") for line in run("models", "--size", "384").stdout.splitlines()}
    assert (rows["L/16"][4], rows["H/14"][4]) == ("384", "378")


def test_models_as_json():
    entries = json.loads(run("models", "--json").stdout)
    found = next(entry for entry in entries if entry["name"] == "B/16")
    assert found == {"name": "B/16", "parameters": 86567656, "gflops": 35.127656448, "tokens": 197, "image_size": 224}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["models", "B/17x"], "did you mean 'B/16'?"),
        (["models", "B/16", "--size", "225"], "225"),
        (["serve", "pane", "x"], "vitrail serve --model pane --model x"),
        (["train", "cifar10-scrath"], "did you mean 'cifar10-scratch'?"),
    ],
)
def test_wrong_input_is_one_line_on_stderr_and_exit_code_2(arguments, words):
    child = run(*arguments)
    assert child.returncode == 2
    assert child.stdout == ""
    assert child.stderr.startswith("error: ")
    assert words in child.stderr
    assert child.stderr.count("\n") == 1


def test_a_recipe_that_is_not_there_is_told_before_torch_is_imported():
    program = "import sys; from vitrail.cli import main; sys.argv = ['vitrail', 'train', 'quickstrat']\n"
    program += "try: main()\nfinally: print('torch' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (child.returncode, child.stdout) == (2, "False\n")


def test_a_size_below_one_is_refused():
    child = run("models", "--size", "-3")
    assert (child.returncode, child.stdout) == (2, "")
    assert "--size" in child.stderr


@pytest.mark.slow
def test_doctor_imports_torch_once():
    """It takes little more than `import torch`, which alone takes most of its time."""

    def measure(*arguments: str) -> tuple[float, float]:
        before, start = busy(), time.perf_counter()
        assert subprocess.run([sys.executable, *arguments], capture_output=True, timeout=120).returncode == 0
        return busy() - before, time.perf_counter() - start

    imports = min(measure("-c", "import torch")[0] for _ in range(3))
    taken = [measure("-m", "vitrail", "doctor") for _ in range(3)]
    assert min(busy for busy, _ in taken) < 1.6 * imports
    assert min(wall for _, wall in taken) < 3


def test_doctor_says_that_torch_is_broken(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    child = subprocess.run(
        [sys.executable, "-m", "vitrail", "doctor"], capture_output=True, text=True, timeout=120, env=environment
    )
    assert child.returncode == 0, child.stderr
    (line,) = (line for line in child.stdout.splitlines() if line.startswith("device\taccelerator"))
    assert "ImportError: no torch here" in line


def test_doctor_tells_versions_devices_and_bf16():
    child = run("doctor", "--json")
    assert child.returncode == 0, child.stderr
    rows = {(finding["subject"], finding["name"]): finding["state"] for finding in json.loads(child.stdout)}
    assert rows["version", "vitrail"] == vitrail.__version__
    assert rows["version", "torch"].startswith("2.")
    assert ("device", "cpu") in rows
    assert ("bf16 on the cpu", "products") in rows
    assert ("extra", "docs") in rows
