"""A batch that does not fit into the GPU's memory: one line names the number of parts that does fit."""

from __future__ import annotations

import pytest
import runs
import torch

from vitrail.errors import TrainingError
from vitrail.objectives.classification import Classification
from vitrail.training.run_training import run_training


def limit_images(monkeypatch, most: int) -> list[int]:
    """Let a forward pass of more images fail as on a GPU, and return a list that gets the sizes that are tried."""
    forward, tried = Classification.forward, list[int]()

    def compute(self, batch, key):
        if self.training:
            tried.append(len(batch.images))
            if len(batch.images) > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, batch, key)

    monkeypatch.setattr(Classification, "forward", compute)
    return tried


@pytest.mark.parametrize(("most", "accumulate"), [(31, 2), (16, 2), (15, 4), (4, 8), (1, 32)])
def test_what_fits_is_found_and_does(tmp_path, monkeypatch, most, accumulate):
    limit_images(monkeypatch, most)
    with pytest.raises(TrainingError) as caught:
        run_training(runs.config(tmp_path / "whole"))
    size = 32 // accumulate
    assert f"32 images at a time do not fit into the GPU's memory, {size} do" in str(caught.value)
    assert f"optimizer.accumulate={accumulate}," in str(caught.value)
    assert f"data.batch_size={size}" in str(caught.value)
    schedule, run = {"steps": 2, "warmup_steps": 0}, {"evaluate_every": None}
    parts = {"optimizer": {"accumulate": accumulate}, "schedule": schedule, "run": run}
    run_training(runs.config(tmp_path / "parts", **parts))
    assert len(runs.losses(tmp_path / "parts")) == 2


def test_parts_that_do_not_fit_are_told_too(tmp_path, monkeypatch):
    limit_images(monkeypatch, 4)
    with pytest.raises(TrainingError, match=r"^16 images at a time do not fit .*, 4 do: give optimizer.accumulate=8,"):
        run_training(runs.config(tmp_path / "run", optimizer={"accumulate": 2}))


def test_not_even_one_image(tmp_path, monkeypatch):
    tried = limit_images(monkeypatch, 0)
    with pytest.raises(TrainingError, match=r"too little memory: .*run\.gradient_checkpointing"):
        run_training(runs.config(tmp_path / "run"))
    assert tried == [32, 16, 8, 4, 2, 1]
