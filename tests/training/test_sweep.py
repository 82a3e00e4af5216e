"""Choosing a learning rate, and a held-out share of data that has a part to validate on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import runs
from pictures import make_folder

from vitrail.data.open import open_data
from vitrail.errors import ConfigError, DataError, Stopped, TrainingError
from vitrail.model.create import create_model
from vitrail.training import loop
from vitrail.training.build import open_training_data
from vitrail.training.config import DataConfig
from vitrail.training.resolve import build_config, change_config, read_toml, to_toml
from vitrail.training.result import TrainingResult
from vitrail.training.sweep import Trial, choose_best, run_trials


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("vitrail.training.result.draw_curves", lambda *_: None)


def short(folder: Path, **sections):
    return runs.config(folder, schedule={"steps": 4, "warmup_steps": 0}, **sections)


def test_each_rate_has_a_run_of_its_own(tmp_path, monkeypatch):
    config = short(tmp_path / "run")
    tried = list(run_trials(config, [0.001, 0.03]))
    assert [trial.rate for trial in tried] == [0.001, 0.03]
    assert [trial.folder for trial in tried] == [tmp_path / "run/sweep-0.001", tmp_path / "run/sweep-0.03"]
    for trial in tried:
        assert f"learning_rate = {trial.rate}" in (trial.folder / "config.toml").read_text()
        last = runs.records(trial.folder)[-1]
        assert (last["kind"], last["accuracy"], last["loss"]) == ("evaluation", trial.accuracy, trial.loss)
    monkeypatch.setattr(loop, "train_step", lambda run, state: pytest.fail("finished runs are not trained again"))
    assert list(run_trials(config, [0.001, 0.03])) == tried


def test_a_rate_that_diverges_does_not_end_the_others(tmp_path):
    config = short(tmp_path / "run", optimizer={"clip_norm": None, "kind": "sgd"}, run={"most_skipped": 2})
    first, second = run_trials(config, [1e30, 0.01])
    assert first.failure.startswith("no finite gradient in the 2 steps")
    assert math.isnan(first.accuracy)
    assert not second.failure
    assert choose_best([first, second]) is second


@pytest.mark.parametrize("error", [TrainingError("the disk is full"), Stopped("stopped after step 1")])
def test_what_says_nothing_about_the_rate_ends_the_sweep(tmp_path, monkeypatch, error):
    def fail(config, **options):
        raise error

    monkeypatch.setattr("vitrail.training.sweep.run_training", fail)
    with pytest.raises(type(error), match=str(error)):
        list(run_trials(short(tmp_path), [0.01, 0.03]))


def test_the_best_is_the_most_accurate_and_of_equals_the_one_with_the_lower_loss():
    here = Path()
    low, high, even = Trial(0.1, here, 0.5, 0.1), Trial(0.2, here, 0.75, 0.9), Trial(0.3, here, 0.75, 0.8)
    diverged = Trial(0.4, here, failure="no finite gradient")
    assert choose_best([low, high]) is high
    assert choose_best([low, high, even, diverged]) is even
    assert choose_best([high, Trial(0.5, here, 0.75, 0.9)]) is high, "of equals in both the first"
    with pytest.raises(TrainingError, match=r"\(0.4\)"):
        choose_best([diverged])


def test_a_loss_that_is_no_number_is_not_chosen(tmp_path, monkeypatch):
    config = short(tmp_path)
    measured = TrainingResult(
        model=create_model("Ti/16", device="meta"),
        folder=tmp_path,
        weights=tmp_path / "model",
        config=config,
        steps=4,
        accuracy=None,
        evaluation={"accuracy": 1.0, "loss": math.nan},
        evaluated=9,
        choosing={"accuracy": 1.0, "loss": math.nan},
    )
    monkeypatch.setattr("vitrail.training.sweep.run_training", lambda config, **options: measured)
    (trial,) = run_trials(config, [0.01])
    assert trial.failure == "its loss is no number"


def test_a_change_keeps_everything_else(tmp_path):
    config = short(tmp_path / "run")
    other = change_config(config, {"optimizer": {"learning_rate": 0.5}, "run": {"seed": 7}}, "inner")
    assert other.run.folder == tmp_path / "run/inner"
    assert (other.optimizer.learning_rate, other.run.seed) == (0.5, 7)
    assert change_config(other, {"optimizer": {"learning_rate": 3e-3}, "run": {"seed": 0}}).model == config.model
    assert other.optimizer.averaging == config.optimizer.averaging


# ---- Held out of train, though there is a part val -------------------------------------------------------------------


@pytest.fixture
def data(tmp_path):
    for number, part in enumerate(("train", "val")):
        make_folder(tmp_path / "data" / part, {"a": 10, "b": 20}, first=100 * number)
    return str(tmp_path / "data")


def names(source) -> set[str]:
    return {source.name(index) for index in range(len(source))}


def test_a_share_of_train_is_held_out_where_the_data_has_a_part_val(data):
    parts = open_training_data(DataConfig(source=data, validate_on="holdout", holdout=0.2))
    whole = names(open_data(data, "train"))
    assert len(parts.training) == 24
    assert len(parts.evaluation) == 6
    assert names(parts.training) | names(parts.evaluation) == whole
    assert names(parts.training).isdisjoint(names(parts.evaluation))
    assert not whole & names(open_data(data, "val"))
    assert sorted(parts.evaluation.labels(0, 6)) == [0, 0, 1, 1, 1, 1]
    other = open_training_data(DataConfig(source=data, validate_on="holdout", holdout=0.2, holdout_seed=1))
    assert names(other.evaluation) != names(parts.evaluation)


def test_otherwise_a_part_val_is_what_is_validated_on(data):
    parts = open_training_data(DataConfig(source=data, holdout=0.2))
    assert (len(parts.training), names(parts.evaluation)) == (30, names(open_data(data, "val")))


def test_a_part_test_that_is_not_there_is_told_with_what_to_give(data, tmp_path):
    for source, has in ((data, "it has train, val"), (str(tmp_path / "data/val"), "it has one part")):
        with pytest.raises(DataError, match=rf"'test'.*{has}"):
            open_training_data(DataConfig(source=source, validate_on="test"))


def test_a_tenth_is_held_out_where_no_share_is_given(data, tmp_path):
    assert len(open_training_data(DataConfig(source=data, validate_on="holdout")).evaluation) == 3
    whole = str(tmp_path / "data/val")  # in one part
    assert len(open_training_data(DataConfig(source=whole, validate_on="holdout", holdout=0.5)).evaluation) == 15


def test_nothing_cannot_be_held_out_and_looked_at(data):
    with pytest.raises(ConfigError, match=r"holdout = 0"):
        DataConfig(source=data, validate_on="holdout", holdout=0)


def test_a_file_keeps_it(data, tmp_path):
    config = runs.config(tmp_path, data={"source": data, "validate_on": "holdout", "holdout": 0.2})
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert build_config(read_toml(tmp_path / "config.toml")) == config


def test_one_image_of_each_class_leaves_none_to_validate_on(tmp_path):
    source = str(make_folder(tmp_path / "data", {"a": 1, "b": 1}))
    for options in ({}, {"validate_on": "holdout"}):
        with pytest.raises(DataError, match="no images to validate on"):
            open_training_data(DataConfig(source=source, **options))
    assert len(open_training_data(DataConfig(source=source, validate_on="none")).training) == 2
