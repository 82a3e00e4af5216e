"""train and finetune as a person types them. Whatever is wrong is one sentence, before any training starts."""

from __future__ import annotations

import io
import shlex
import signal
import sys

import numpy as np
import pytest
from PIL import Image

from vitrail.cli.train import train
from vitrail.recipes import RECIPES
from vitrail.training import run_training as starting


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, images in (("cat", 6), ("dog", 6)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(images):
            pixels = np.full((20, 24, 3), 20 * number, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quickstart", "optimizer.learnin_rate=1"], "did you mean 'learning_rate'?"),
        (["quickstart", "warmup=1"], "did you mean 'warmup_steps'?"),
        (["quickstart", "optimiser.kind=sgd"], "did you mean 'optimizer'?"),
        (["quickstart", "schedule.steps=many"], "schedule.steps = 'many'"),
        (["quickstart", "optimizer.kind=lion"], "'muon'"),
        (["quickstart", "model.pol=average"], "did you mean 'pool'?"),
        (["quickstart", "model.pool=avrage"], "pool = 'avrage'"),
        (["quickstart", "steps"], "'steps' is not key=value"),
        (["quickstrat"], "did you mean 'quickstart'?"),
        (["nowhere.toml"], "nowhere.toml"),
        (["cifar10-scratch"], "data.source=DATA"),
        (["quickstart", "data.batch_size=5000"], "1438"),
        (["quickstart", "model.image_size=18"], "18"),
        (["quickstart", "schedule.warmup_steps=900"], "warmup_steps = 900"),
        (["quickstart", "run.device=tpu"], "device = 'tpu'"),
        (["quickstart", "run.precision=fp16", "run.device=cpu"], "GPU"),
        (["quickstart", "data.batch_size=65", "optimizer.accumulate=2"], "data.batch_size = 65"),
        (["quickstart", "objective.corrupted=0.15"], "objective.kind"),
        (["quickstart", "data.workers=100000"], "data.workers = 100000: input should be less than or equal to 1024"),
        (["quickstart", "run.threads=100000"], "run.threads = 100000: input should be less than or equal to 1024"),
        (["quickstart", f"run.seed={2**64}"], "run.seed"),
        (["quickstart", f"data.holdout_seed={2**64}"], "data.holdout_seed"),
        (["quickstart", f"model.image_size={10**16}"], "at most 16384"),
        (["quickstart", "model.image_size=[16,20000]"], "at most 16384"),
        (["quickstart", "run.folder=runs/\udcff"], r"run.folder = 'runs/\udcff': it is not UTF-8"),
        (["quickstart", "data.source=\udcff"], r"data.source = '\udcff': it is not UTF-8"),
        (["quickstart", "schedule.final_learning_rate=0.1"], "schedule.final_learning_rate = 0.1"),
        ([], "vitrail train --list"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_configuration_is_one_sentence_and_exit_code_2(here, run, monkeypatch, arguments, words):
    monkeypatch.setattr(starting, "train", lambda *_: pytest.fail("training started"))
    code, out, err = run("train", *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("nowhere", "there is no data set 'nowhere'"),
        ("empty", "expected a folder for each class"),
        ("photos/cat", "expected a folder for each class"),
    ],
)
def test_missing_data_is_one_sentence_and_exit_code_1(here, run, source, sentence):
    for arguments in (["train", "quickstart", f"data.source={source}"], ["finetune", "--data", source]):
        code, _, err = run(*arguments)
        assert code == 1
        assert sentence in err
        assert err.count("\n") == 1
        assert not (here / "runs").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_folder_whose_name_is_not_utf_8_is_one_sentence(here, run):
    (here / "photos").rename(here / "ph\udcff")
    for arguments in (["quickstart", "--folder", "q\udcff"], ["finetune", "--data", "ph\udcff", "steps=2"]):
        code, _, err = run(*arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert "UTF-8" in err
        assert not (here / "runs").exists()
        assert not (here / "q\udcff").exists()


def test_one_class_is_none(here, run):
    (here / "photos/dog").rename(here / "dog")
    code, _, err = run("train", "quickstart", "data.source=photos", "data.batch_size=2", "model.in_channels=3")
    assert code == 1
    assert "one class" in err


def test_the_recipes_are_listed_without_torch(run):
    code, out, _ = run("train", "--list")
    assert code == 0
    rows = [line.split("\t") for line in out.splitlines()]
    assert rows[0] == ["name", "what", "cost", "expected", "command"]
    assert all(len(row) == 5 and all(row) for row in rows)
    assert [
        name for name in ("jft-h14", "finetune-cifar10", "mpp-b16", "quickstart") if name in {row[0] for row in rows}
    ] == ["jft-h14", "finetune-cifar10", "mpp-b16", "quickstart"]


def test_a_terminal_shows_what_a_recipe_costs_and_gives(monkeypatch):
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    train(list_them=True)
    shown = sys.stdout.getvalue()
    lines = [line.split("│") for line in shown.splitlines() if line.count("│") == 3]
    assert [name.strip() for _, name, _, _ in lines if name.strip()] == list(RECIPES)  # none is broken
    words = " ".join(text for _, _, text, _ in lines).split()
    for recipe in RECIPES.values():
        for part in (f"cost: {recipe.cost}", f"expected: {recipe.expected}"):
            assert " ".join(part.split()) in " ".join(words)


def test_the_whole_configuration_can_be_seen_and_used(here, run):
    code, out, _ = run("train", "quickstart", "steps=7", "warmup_steps=2", "--show")
    assert code == 0
    assert "steps = 7" in out
    (here / "mine.toml").write_text(out)
    again = run("train", "mine.toml", "--show")[1]
    assert again == out


def test_a_run_goes_on_only_as_it_was_begun(here, run):
    small = ["schedule.steps=4", "schedule.warmup_steps=1", "model.depth=1", "run.trackers=[]", "run.report=false"]
    code, out, _ = run("train", "quickstart", *small)
    assert code == 0
    assert "model: runs/quickstart/model" in out
    code, _, err = run("train", "quickstart", *small, "optimizer.learning_rate=0.5")
    assert code == 2
    assert "optimizer.learning_rate = 0.002" in err
    code, _, _ = run("train", "quickstart", *small, "data.workers=1", "run.keep=3")
    assert code == 0


def test_a_model_without_classes_is_followed_by_commands_that_work(here, run):
    small = ["schedule.steps=2", "schedule.warmup_steps=1", "model.depth=1", "run.trackers=[]", "run.report=false"]
    masked = ["objective.kind=masked-patches", "run.folder=runs/masked patches"]
    code, out, _ = run("train", "quickstart", *small, *masked)
    assert code == 0
    commands = [part.split(": ")[-1] for part in out.splitlines()[-1].split("; ")]
    assert not [command for command in commands if command.startswith(("vitrail evaluate", "vitrail predict"))]
    (finetune,) = (shlex.split(command) for command in commands if command.startswith("vitrail finetune"))
    (fewshot,) = (shlex.split(command) for command in commands if command.startswith("vitrail fewshot"))
    assert finetune[1:6] == ["finetune", "--data", "DATA", "--from", "runs/masked patches"]
    arguments = ["digits" if word == "DATA" else word for word in fewshot[1:6]]
    code, out, err = run(*arguments, "--shots", "1", "--seeds", "1", "--methods", "least-squares", "--no-cache")
    assert code == 0, err


@pytest.mark.parametrize(
    "command",
    [["train", "quickstart"], ["finetune", "--data", "digits", "schedule.steps=5"], ["quickstart"]],
    ids=" ".join,
)
def test_sigterm_before_training_begins_is_exit_code_3(here, run, monkeypatch, command):
    before = signal.getsignal(signal.SIGTERM)

    def send(*_, **__):
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("it went on")

    monkeypatch.setattr(starting, "prepare_run", send)
    code, _, err = run(*command)
    assert code == 3
    assert "same command" in err.splitlines()[-1]
    assert signal.getsignal(signal.SIGTERM) is before
