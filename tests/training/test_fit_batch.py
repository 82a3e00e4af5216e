"""`data.batch_size=auto`: a batch is computed in as few parts as fit into the memory, found by trying."""

from __future__ import annotations

import pytest
import runs
import torch
from test_memory_of_a_step import limit_images

from vitrail.errors import ConfigError, TrainingError
from vitrail.system.ranks import Ranks
from vitrail.training.fit_batch import fit_batch
from vitrail.training.resolve import to_toml
from vitrail.workflows.train import read_config, train

CPU = Ranks(0, 1, torch.device("cpu"))


@pytest.mark.parametrize(("most", "parts"), [(32, 1), (31, 2), (8, 4), (1, 32)])
def test_as_few_parts_as_fit(tmp_path, monkeypatch, most, parts):
    limit_images(monkeypatch, most)
    messages: list[str] = []
    config = fit_batch(runs.config(tmp_path), CPU, lambda kind, values: messages.append(values["text"]))
    assert config.optimizer.accumulate == parts
    assert config.data.batch_size == 32
    assert [f"{parts} parts: {32 // parts} at a time" in text for text in messages] == [True] * (parts > 1)
    assert not any(tmp_path.iterdir())


def test_parts_need_not_be_halves_of_halves(tmp_path, monkeypatch):
    tried = limit_images(monkeypatch, 5)
    config = fit_batch(runs.config(tmp_path, data={"batch_size": 30}), CPU, lambda *_: None)
    assert (config.optimizer.accumulate, tried) == (6, [30, 15, 10, 6, 5])


def test_no_fewer_parts_than_asked_for(tmp_path, monkeypatch):
    tried = limit_images(monkeypatch, 31)
    config = fit_batch(runs.config(tmp_path, optimizer={"accumulate": 4}), CPU, print)
    assert (config.optimizer.accumulate, tried) == (4, [8])


def test_a_training_that_fits_only_in_parts(tmp_path, monkeypatch):
    """It starts with the weights and the order of a run that was given the parts, so it has its losses."""
    limit_images(monkeypatch, 10)
    settings = {"data.batch_size": "auto", "schedule.steps": 3, "schedule.warmup_steps": 0}
    result = train(runs.config(tmp_path / "auto"), settings)
    given = {**settings, "data.batch_size": 32, "optimizer.accumulate": 4}
    train(runs.config(tmp_path / "given"), given)
    assert result.config.optimizer.accumulate == 4
    assert runs.losses(tmp_path / "auto") == runs.losses(tmp_path / "given")
    again = train(runs.config(tmp_path / "auto"), settings)  # the same call goes on, here with nothing left to do
    assert again.config == result.config


def test_not_even_one_image_fits(tmp_path, monkeypatch):
    limit_images(monkeypatch, 0)
    with pytest.raises(TrainingError, match="too little memory"):
        fit_batch(runs.config(tmp_path), CPU, print)


@pytest.mark.parametrize(("section", "ranks"), [({}, 2), ({"graphs": True}, 1)])
def test_what_cannot_be_tried_is_told(tmp_path, section, ranks):
    with pytest.raises(ConfigError, match=r"data\.batch_size = 'auto': .*give a number"):
        fit_batch(runs.config(tmp_path, run=section), Ranks(0, ranks, torch.device("cpu")), print)


def test_the_batch_is_the_recipes(tmp_path):
    recipe = runs.config(tmp_path)
    assert read_config(recipe, ["data.batch_size=auto"]) == (recipe, True)
    assert read_config(recipe, {"batch_size": "auto"}) == (recipe, True)
    assert read_config(recipe, ["data.batch_size=auto", "data.batch_size=16"])[1] is False
    assert read_config(recipe) == (recipe, False)
    file = tmp_path / "own.toml"
    file.write_text(to_toml(recipe).replace("batch_size = 32", 'batch_size = "auto"'))
    config, fits_batch = read_config(file)
    assert (config.data.batch_size, fits_batch) == (128, True)
    assert read_config(file, ["data.batch_size=64"])[1] is False
