"""The card of a trained model: how it was trained, without where on this machine."""

from __future__ import annotations

import re
import tomllib

import numpy as np
import pytest
import runs
from PIL import Image

import vitrail
from vitrail.system.files import hide_folders
from vitrail.training.config import RunConfig
from vitrail.training.resolve import resolve
from vitrail.training.run_training import run_training
from vitrail.training.trained_model import linear_head_cost


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("/home/ada/photos", "photos"),
        ("/home/ada/photos/", "photos"),
        ("~/photos", "photos"),
        ("../ada/labels.csv", "labels.csv"),
        (r"C:\\Users\\ada\\photos", "photos"),
        ("runs/pets/model", "pets"),
        ("/home/ada/runs/pets/best", "pets-best"),
        ("model", "model"),
        ("digits", "digits"),
        ("hf:ada/photos", "hf:ada/photos"),
        ("timm:vit_tiny", "timm:vit_tiny"),
        ("a list of 12 images", "a list of 12 images"),
        ("/", "data"),
        ("..", "data"),
    ],
)
def test_names_without_folders(name, short):
    assert hide_folders(name) == short


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run, and one from its weights, both below a folder named lovelace."""
    home = tmp_path_factory.mktemp("home") / "lovelace"
    generator = np.random.default_rng(0)
    for number in range(16):
        folder = home / "photos" / "train" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    data = {"source": str(home / "photos"), "batch_size": 4, "validate_on": "holdout", "holdout": 0.5}
    schedule = {"steps": 3, "warmup_steps": 1}
    sections = {"data": data, "schedule": schedule, "run": {"evaluate_every": 1, "trackers": []}}
    first = runs.tree(home / "runs" / "first", **sections)
    first["model"] = {"name": "Ti/8", "image_size": 16, "width": 16, "depth": 1, "num_heads": 1, "mlp_dim": 16}
    first = run_training(resolve(first))
    second = runs.tree(home / "runs" / "second", **sections)
    second["model"] = {"weights": str(first.weights)}
    return home, first, run_training(resolve(second))


def test_nothing_that_is_shared_says_where_it_was_made(trained):
    home, *results = trained
    for result in results:
        assert str(home) in (result.folder / "config.toml").read_text(), "the run itself must find its data again"
        models = [result.folder / name for name in ("model", "best") if (result.folder / name).is_dir()]
        assert models
        for path in (path for model in models for path in model.iterdir()):
            for place in (str(home), "lovelace", str(home.parent)):
                assert place.encode() not in path.read_bytes(), path


def test_the_card_still_says_how_it_was_trained(trained):
    _, _, second = trained
    card = (second.weights / "README.md").read_text()
    config = RunConfig(**tomllib.loads(re.search(r"```toml\n(.*?)```", card, re.DOTALL).group(1)))
    assert (config.data.source, config.model.weights, str(config.run.folder)) == ("photos", "first", "second")
    assert config.schedule == second.config.schedule
    assert "images of `photos`, from `first`" in card


def test_the_cost_of_both_trainings_is_told_apart(trained):
    _, first, second = trained
    before, after = first.model.training_cost, vitrail.load(second.folder).training_cost
    assert after.stages[0] == before
    assert after.own.flops + before.flops == pytest.approx(after.flops)
    assert after.own.devices == ("CPU",)
    card = (second.weights / "README.md").read_text()
    assert "| cost of pre-training |" in card
    assert "| cost of fine-tuning |" in card
    assert "| training cost |" in (first.weights / "README.md").read_text()


def test_the_cost_of_a_linear_head(trained):
    _, _, second = trained
    model = vitrail.load(second.folder)
    cost = linear_head_cost(model, 10, 2.5, next(model.parameters()).device)
    assert cost.stages[:-1] == model.training_cost.stages
    assert (cost.own.kind, cost.own.device_seconds) == ("linear head", pytest.approx(2.5))
    assert cost.own.flops == pytest.approx(second.model.training_cost.own.flops * 10 / (3 * 3 * 4))
