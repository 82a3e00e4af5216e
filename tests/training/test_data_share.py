"""`data.share`: a run on a part of the training images, with the same validation images for every share."""

from __future__ import annotations

import pytest
import runs

from vitrail.data.sources.source import Source
from vitrail.errors import ConfigError
from vitrail.training.build import open_training_data
from vitrail.training.config import DataConfig
from vitrail.training.resolve import read_toml
from vitrail.training.run_training import run_training

SHORT = {"steps": 2, "warmup_steps": 0}


def names(source: Source | None) -> set[str]:
    assert source is not None
    return {source.identity(index) for index in range(len(source))}


@pytest.mark.parametrize("options", [{}, {"holdout": 0.3}, {"validate_on": "holdout"}, {"in_memory": True}])
def test_every_share_is_validated_on_the_same_images(options):
    whole, tenth, hundredth = (
        open_training_data(DataConfig(source="digits", share=share, **options)) for share in (None, 0.1, 0.01)
    )
    assert names(whole.evaluation) == names(tenth.evaluation) == names(hundredth.evaluation)
    assert names(hundredth.training) < names(tenth.training) < names(whole.training)
    assert not names(whole.training) & names(whole.evaluation)
    assert len(tenth.training) == pytest.approx(0.1 * len(whole.training), abs=5)  # half an image of ten classes


def test_all_can_be_said_in_three_ways():
    values = [DataConfig(source="digits", **share).share for share in ({}, {"share": 1}, {"share": "none"})]
    assert values == [None, None, None]
    for wrong in (0, 1.1, -1):
        with pytest.raises(ValueError, match="share"):
            DataConfig(source="digits", share=wrong)


def test_an_epoch_is_the_share_and_the_share_stands_in_config_and_card(tmp_path):
    config = runs.config(
        tmp_path / "run",
        data={"share": 0.1, "share_seed": 3, "batch_size": 16},
        schedule={"steps": None, "epochs": 2, "warmup_steps": 0},
    )
    images = len(open_training_data(config.data).training)
    events = {}
    result = run_training(config, on_event=lambda kind, values: events.setdefault(kind, values))
    assert events["training"]["training_images"] == images < 200
    assert result.steps == -(-2 * images // 16)
    assert read_toml(tmp_path / "run/config.toml")["data"]["share"] == 0.1
    card = (tmp_path / "run/model/README.md").read_text()
    assert "share = 0.1" in card
    assert "share_seed = 3" in card


@pytest.mark.parametrize(
    "change",
    [
        {"share": 0.2},
        *(
            pytest.param(change, marks=pytest.mark.slow)
            for change in ({"share": None}, {"share_seed": 1}, {"holdout": 0.2})
        ),
    ],
)
def test_another_share_is_another_run_and_the_key_is_named(tmp_path, change):
    data = {"share": 0.1, "batch_size": 16}
    run_training(runs.config(tmp_path / "run", data=data, schedule=SHORT))
    run_training(runs.config(tmp_path / "run", data=data, schedule=SHORT))  # which is finished
    with pytest.raises(ConfigError, match=rf"data\.{next(iter(change))}"):
        run_training(runs.config(tmp_path / "run", data={**data, **change}, schedule=SHORT))


def test_a_share_without_an_image_of_a_class_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"share = 0\.001 leaves no image of class '\d'"):
        run_training(runs.config(tmp_path / "run", data={"share": 0.001}))
    assert not (tmp_path / "run").exists()
