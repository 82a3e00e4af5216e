"""Runs that compare views: what their loader gives, what a configuration may say, and that they learn."""

from __future__ import annotations

import signal

import pytest
import runs
import torch

from vitrail.errors import ConfigError, Stopped
from vitrail.evaluation.training_fewshot import open_training_fewshot
from vitrail.system.ranks import Ranks
from vitrail.training import loop
from vitrail.training.build import build_training_loader, prepare_run
from vitrail.training.resolve import resolve
from vitrail.training.run_training import run_training

PLAIN = {"num_classes": 0, "dropout": 0.0, "stochastic_depth": 0.0}
KINDS = pytest.mark.parametrize("objective", [runs.JOINT, runs.TAUGHT], ids=["LeJEPA", "DINO"])


@pytest.mark.parametrize("on_device", [False, True])
def test_the_loader_gives_whole_images(tmp_path, on_device):
    views = {**runs.NO_FLIP, "source_scale": 1.5}
    config = runs.config(tmp_path, model=PLAIN, objective={**runs.JOINT, "views": views}, data={"on_device": on_device})
    setup = prepare_run(config, Ranks(0, 1, torch.device("cpu")))
    batch = next(build_training_loader(setup, 0))
    assert batch.images.shape == (32, 1, 24, 24)
    again = next(build_training_loader(setup, 32 * 48))  # the next epochs show the same pixels
    shared = sorted(set(batch.indices.tolist()) & set(again.indices.tolist()))
    for sample in shared:
        one, other = (b.images[b.indices.tolist().index(sample)] for b in (batch, again))
        assert torch.equal(one, other)


def test_augmentation_is_refused(tmp_path):
    tree = runs.tree(tmp_path, objective=runs.JOINT)
    tree["data"]["augmentation"] = {"flip": 0.0}
    with pytest.raises(ConfigError, match=r"data\.augmentation means nothing to objective\.kind = \"lejepa\""):
        resolve(tree)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("objective.prototypes=8", "prototypes means nothing"),
        ("objective.hidden=0.5", "hidden means nothing"),
        ("objective.views.local_cuont=1", "local_count"),
        ("objective.views.local_count=-1", "local_count"),
        ("objective.normality=0", "normality"),
    ],
)
def test_wrong_settings_are_named(tmp_path, override, told):
    with pytest.raises(ConfigError, match=told):
        resolve(runs.tree(tmp_path, objective=runs.JOINT), [override])


def test_views_are_settings_like_others(tmp_path):
    config = resolve(runs.tree(tmp_path, objective=runs.JOINT), ["objective.views.local_count=4"])
    assert config.objective.views.local_count == 4
    assert config.objective.views.global_area == (0.5, 1.0)


@KINDS
def test_a_stopped_run_ends_with_the_same_bits(tmp_path, monkeypatch, objective):
    """With the teacher, if there is one, and in parts."""
    sections = {"model": {"num_classes": 0, "depth": 1}, "objective": objective, "optimizer": {"accumulate": 2}}
    sections |= {"schedule": {"steps": 6, "warmup_steps": 1}, "run": {"evaluate_every": None}}
    run_training(runs.config(tmp_path / "whole", **sections))
    ordinary = loop.train_step

    def step(run, state):
        if state.progress.step == 2:
            signal.raise_signal(signal.SIGTERM)
        ordinary(run, state)

    monkeypatch.setattr(loop, "train_step", step)
    with pytest.raises(Stopped, match="step 3 of 6"):
        run_training(runs.config(tmp_path / "parts", **sections))
    run_training(runs.config(tmp_path / "parts", **sections))
    runs.assert_same_run(tmp_path / "whole", tmp_path / "parts")
    tensors = runs.tensors(runs.checkpoints(tmp_path / "parts")[-1])
    assert any(name.startswith("objective/teacher.model.") for name in tensors) == (objective is runs.TAUGHT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "steps", "gain"),
    [
        ({**runs.JOINT, "projector_width": 256}, 300, 0.15),
        (
            {**runs.TAUGHT, "prototypes": 256, "projector_width": 256, "teacher_momentum": 0.99}
            | {"views": {**runs.NO_FLIP, "global_area": (0.4, 1.0), "local_count": 0, "blur": 0.0}},
            800,
            0.05,
        ),
    ],
    ids=["LeJEPA", "DINO"],
)
def test_representations_become_better(tmp_path, objective, steps, gain):
    """The few-shot accuracy on real digits, which no label has helped, rises from that of the initial weights."""
    config = runs.config(
        tmp_path,
        model={**PLAIN, "width": 64},
        data={"batch_size": 128},
        objective=objective,
        optimizer={"learning_rate": 1e-3 if objective["kind"] == "dino" else 2e-3, "averaging": 0.99},
        schedule={"steps": steps, "warmup_steps": 10},
        run={"log_every": 50, "evaluate_every": steps, "fewshot_every": steps, "fewshot_shots": 5}
        | {"evaluate_start": True, "checkpoint_every": steps, "threads": 1},
    )
    run_training(config, fewshot=open_training_fewshot)
    first, last = (entry["accuracy"] for entry in runs.records(tmp_path) if entry["kind"] == "fewshot")
    assert last > first + gain, (first, last)
