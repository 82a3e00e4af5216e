"""Saving: a folder is whole or absent, and only a folder of ours is ever replaced."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest
import torch

import vitrail
from samples import images, small_vit
from vitrail.config import Origin, TrainingCost
from vitrail.weights import save as save_module
from vitrail.weights.formats.native import format_checksums


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_native_folder_is_replaced(tmp_path):
    vitrail.save(small_vit(depth=1), tmp_path / "model")
    vitrail.save(small_vit(depth=2), tmp_path / "model")
    assert vitrail.load(tmp_path / "model").architecture.depth == 2
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("kind", ["a file", "photos", "a native folder with more in it", "a damaged config"])
def test_what_is_not_ours_is_never_replaced(kind, tmp_path):
    target = tmp_path / "target"
    if kind == "a file":
        target.write_text("precious")
    else:
        vitrail.save(small_vit(depth=1), target)
        if kind == "photos":
            shutil.rmtree(target)
            target.mkdir()
        if kind == "a damaged config":
            (target / "config.json").write_text("{")
        (target / "photo.jpg").write_text("precious")
    before = {path: path.read_bytes() for path in [target, *target.rglob("*")] if path.is_file()}
    with pytest.raises(vitrail.WeightsError, match="there already"):
        vitrail.save(small_vit(depth=2), target)
    assert {path: path.read_bytes() for path in before} == before
    assert names(tmp_path) == ["target"]


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "model").mkdir()
    assert vitrail.load(vitrail.save(small_vit(), tmp_path / "model")).num_classes == 7


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights on Windows")
def test_a_link_stays_a_link(tmp_path):
    vitrail.save(small_vit(depth=1), tmp_path / "first")
    (tmp_path / "latest").symlink_to("first")
    vitrail.save(small_vit(depth=2), tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    assert vitrail.load(tmp_path / "first").architecture.depth == 2


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    vitrail.save(small_vit(depth=1), tmp_path / "model")

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(save_module, "write_tensors", full)
    with pytest.raises(vitrail.WeightsError, match="no space left"):
        vitrail.save(small_vit(depth=2), tmp_path / "model")
    assert names(tmp_path) == ["model"]
    assert vitrail.load(tmp_path / "model").architecture.depth == 1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no umask")
def test_files_have_the_permissions_that_new_files_get_here(tmp_path):
    before = os.umask(0o027)
    try:
        folder = vitrail.save(small_vit(), tmp_path / "model")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}


def test_with_another_default_device(tmp_path):
    model = small_vit()
    with torch.device("meta"):
        vitrail.save(model, tmp_path / "model")
        loaded = vitrail.load(tmp_path / "model")
    assert {p.device.type for p in loaded.parameters()} == {"cpu"}
    assert torch.equal(loaded(images()), model(images()))


def test_home_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert vitrail.save(small_vit(), "~/model") == tmp_path / "model"
    assert vitrail.load("~/model").num_classes == 7


def test_a_card_tells_of_origin_and_training(tmp_path):
    model = vitrail.create_model("Ti/16", image_size=32, width=32, depth=1, num_heads=2, mlp_dim=32, seed=0)
    model.origin = Origin(source="elsewhere", format="timm", notes=("the heads were concluded",))
    card = (vitrail.save(model, tmp_path / "model", notes="A head fitted to 12 images.") / "README.md").read_text()
    assert "\n- the heads were concluded" in card
    assert "## Training\n\nA head fitted to 12 images." in card


PRE_TRAINING = TrainingCost(flops=2.5e16, device_seconds=480, devices=("a GPU",))


def test_a_card_tells_pre_training_and_fine_tuning_apart(tmp_path):
    def rows(cost):
        model = small_vit()
        model.training_cost = cost
        loaded = vitrail.load(vitrail.save(model, tmp_path / "model"))
        assert loaded.training_cost == cost
        card = (tmp_path / "model/README.md").read_text()
        return [tuple(line.strip("| ").split(" | ")) for line in card.splitlines() if "cost" in line]

    tuning = TrainingCost(flops=3e12, device_seconds=90, devices=("CPU",))
    head = TrainingCost(flops=4e9, device_seconds=2, devices=("CPU",), kind="linear head")
    before = ("cost of pre-training", "25 petaFLOPs, 8 minutes on a GPU")
    after = ("cost of fine-tuning", "3 teraFLOPs, 1.5 minutes on CPU")
    assert rows(None) == []
    assert rows(PRE_TRAINING) == [("training cost", before[1])]
    tuned = tuning.after(PRE_TRAINING)
    assert (tuned.flops, tuned.device_seconds, tuned.devices) == (2.5e16 + 3e12, 570, ("a GPU", "CPU"))
    assert rows(tuned) == [before, after]
    assert rows(tuning.after(None)) == [("cost of pre-training", "unknown"), after]
    assert rows(head.after(tuned)) == [before, after, ("cost of the linear head", "4 gigaFLOPs, 2 seconds on CPU")]
    twice = tuning.after(tuned)
    assert [name for name, _ in rows(twice)] == [before[0], f"{after[0]}, number 1", f"{after[0]}, number 2"]
    assert {text for _, text in rows(twice)[1:]} == {after[1]}
    assert rows(tuning.after(tuning.after(None)))[0] == ("cost of pre-training", "unknown")


def test_a_cost_that_an_earlier_version_wrote_is_read(tmp_path):
    model = small_vit()
    model.training_cost = PRE_TRAINING
    folder = vitrail.save(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["training_cost"] = {"flops": 2e18, "device_seconds": 7200.0, "devices": ["a GPU", "CPU"], "complete": False}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "SHA256SUMS").write_text(format_checksums(folder))
    cost = vitrail.load(folder).training_cost
    assert (cost.exaflops, cost.device_hours, cost.complete, cost.earlier) == (2, 2, False, None)
    assert PRE_TRAINING.after(cost).stages == (cost, PRE_TRAINING.after(cost).own)
