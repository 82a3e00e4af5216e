"""The quickstart as promised: offline, under three minutes, 97% on digits that no stage of training has seen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import runs
from striped import stripes

import vitrail
from vitrail.data.open import open_data
from vitrail.recipes import find_recipe
from vitrail.training.build import open_training_data
from vitrail.training.resolve import resolve
from vitrail.workflows.finetune import finetune

WITHOUT_NETWORK = """
import socket, sys
connect = socket.socket.connect
def within(self, address):  # workers hand batches over through sockets of the machine's own
    if self.family != socket.AF_UNIX:
        raise OSError("no network here")
    return connect(self, address)
socket.socket.connect = within
sys.argv = ["vitrail", "quickstart"]
from vitrail.cli import main
main()
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    begin = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    child = subprocess.run(
        [sys.executable, "-c", WITHOUT_NETWORK],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=290,
        env=environment,
    )
    assert child.returncode == 0, child.stderr
    return folder, child.stdout.splitlines(), time.monotonic() - begin


@pytest.mark.slow
def test_it_keeps_its_promise(finished):
    folder, lines, seconds = finished
    assert seconds < 180
    found = re.fullmatch(r"test accuracy: (\d+\.\d)%", lines[-1])
    assert found
    assert float(found[1]) >= 97
    assert [path.name for path in folder.iterdir()] == ["runs"]


@pytest.mark.slow
def test_the_accuracy_it_prints_is_the_models(finished):
    folder, lines, _ = finished
    model = vitrail.load(folder / "runs/quickstart/finetune")
    test = open_data("digits", "val", holdout=0.2)
    loader = vitrail.EvaluationLoader(test, model.preprocessing, batch_size=len(test))
    (batch,) = loader
    guesses = model(vitrail.data.transforms.preprocess.normalise(batch.images, model.preprocessing)).argmax(dim=1)
    assert lines[-1] == f"test accuracy: {(guesses == batch.labels).float().mean().item():.1%}"
    assert model.image_size == (24, 24)
    assert vitrail.load(folder / "runs/quickstart/pretrain").image_size == (16, 16)


def pixels(source, index: int) -> bytes:
    return source.read(index).content.numpy().tobytes()


def test_no_stage_sees_the_test_part():
    """By content, not by number alone: also an equal image twice in the data would be found."""
    test = open_data("digits", "val", holdout=0.2)
    hidden = {pixels(test, index) for index in range(len(test))}
    for recipe in ("quickstart", "quickstart-finetune"):
        given = ["model.weights=none-yet"] if recipe.endswith("finetune") else []
        parts = open_training_data(resolve(find_recipe(recipe).config, given).data)
        assert parts.evaluation is None
        assert not {pixels(parts.training, index) for index in range(len(parts.training))} & hidden
        assert len(parts.training) + len(test) == 1797


def test_the_split_is_fixed_and_stratified():
    test = open_data("digits", "val", holdout=0.2)
    whole = open_data("digits")
    shares = np.bincount(test.labels(0, len(test))) / np.bincount(whole.labels(0, len(whole)))
    assert np.abs(shares - 0.2).max() < 0.005
    again = open_data("digits", "val", holdout=0.2)
    assert [again.name(index) for index in range(5)] == [test.name(index) for index in range(5)]


@pytest.mark.slow
def test_its_model_can_be_fine_tuned_on_a_folder(finished, tmp_path, monkeypatch):
    folder, _, _ = finished
    monkeypatch.chdir(tmp_path)
    stripes(tmp_path / "stripes", classes=3, images=20)
    settings = {"run.trackers": (), "run.report": False}
    result = finetune("stripes", folder / "runs/quickstart/finetune", settings=settings)
    assert result.model.image_size == (32, 32)
    assert result.model.labels == ("colour-0", "colour-1", "colour-2")
    first, *_, last = runs.losses(tmp_path / "runs/stripes-from-finetune")
    assert last < first - 0.1
