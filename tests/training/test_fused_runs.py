"""Runs by vitrail's kernels, in Triton's interpreter: dropout depends on seed, step and image, and on nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import runs
import torch

from vitrail.data.loader import Batch
from vitrail.data.order import derive_seed
from vitrail.errors import Stopped
from vitrail.training import loop
from vitrail.training.run_training import run_training
from vitrail.training.step import split_batch

pytest.importorskip("triton", reason="Triton, in whose interpreter the kernels run, is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")

RANDOM = {"dropout": 0.3, "stochastic_depth": 0.3, "layer_scale": 0.5}
MODEL = {**runs.MODEL, **RANDOM, "image_size": 8, "patch_size": 8, "width": 16, "mlp_dim": 16}
SECTIONS = {
    "model": MODEL,
    "data": {"batch_size": 4, "validate_on": "none", "holdout": 0.0},
    "schedule": {"steps": 2, "warmup_steps": 1},
    "run": {"fused": True, "checkpoint_every": 10, "evaluate_every": 10},
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    runs.force_kernels(monkeypatch.setattr)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sections(**changed: dict) -> dict:
    return {name: {**SECTIONS.get(name, {}), **changed.get(name, {})} for name in {**SECTIONS, **changed}}


def differ(one: Path, other: Path) -> float:
    """By how much gradients differ in length, at most: other masks make it several percent, other sums 1e-5."""
    lengths = (
        [entry["gradient_norm"] for entry in runs.records(each) if entry["kind"] == "train"] for each in (one, other)
    )
    return max(abs(a / b - 1) for a, b in zip(*lengths, strict=True))


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_bit(tmp_path, monkeypatch):
    whole, stopped, ordinary = tmp_path / "whole", tmp_path / "stopped", loop.train_step
    run_training(runs.config(whole, **sections()))

    def stop(run, state):
        if state.progress.step == 0:
            monkeypatch.setattr(loop, "train_step", ordinary)
            signal.raise_signal(signal.SIGTERM)
        assert run.learner.fused is not None
        ordinary(run, state)

    monkeypatch.setattr(loop, "train_step", stop)
    with pytest.raises(Stopped, match="after step 1 of 2"):
        run_training(runs.config(stopped, **sections()))
    torch.manual_seed(99)  # no generator's state matters
    run_training(runs.config(stopped, **sections()))
    runs.assert_same_run(whole, stopped)


@pytest.mark.parametrize(("rank", "ranks", "count"), [(0, 1, 1), (1, 4, 1), (1, 2, 3)])
def test_every_part_of_a_batch_knows_its_first_image(rank, ranks, count):
    steps = []
    run = SimpleNamespace(
        config=SimpleNamespace(optimizer=SimpleNamespace(accumulate=count), run=SimpleNamespace(seed=5)),
        ranks=SimpleNamespace(rank=rank),
        learner=SimpleNamespace(fused=SimpleNamespace(set_step=lambda *given: steps.append(given))),
    )
    share = 12 // ranks
    indices = torch.arange(share)
    batch = Batch(torch.zeros(share, 1), {"label": indices}, indices, torch.ones(share, dtype=torch.bool))
    parts = [part.indices for part, _, _ in split_batch(run, 7, batch)]
    assert steps == [(derive_seed(5, 7), rank * share + int(part[0])) for part in parts]


class Graph:
    """In place of a CUDA graph, which would read again what it read when it was recorded: its own inputs alone."""

    def __init__(self, function, kept) -> None:
        self.function, self.inputs = function, []

    def __call__(self, *inputs):
        self.inputs = self.inputs or [each.clone() for each in inputs]
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        found = self.function(*self.inputs)
        assert self.function.__self__._fused.key is self.inputs[2]
        return found


@pytest.mark.slow
def test_a_batch_in_parts_and_recorded_steps_make_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.training.build.check_graphs", lambda *_: None)
    monkeypatch.setattr("vitrail.training.graph_step.CudaGraph", Graph)
    build = torch.optim.AdamW.__init__
    monkeypatch.setattr(torch.optim.AdamW, "__init__", lambda *a, **options: build(*a, **{**options, "fused": True}))
    for name, changed in {
        "whole": {},
        "parts": {"optimizer": {"accumulate": 2}},
        "recorded": {"run": {"graphs": True}},
        "other dropout": {"model": {**MODEL, "dropout": 0.5}},
    }.items():
        run_training(runs.config(tmp_path / name, **sections(**changed)))
    assert differ(tmp_path / "whole", tmp_path / "parts") < 1e-4
    assert differ(tmp_path / "whole", tmp_path / "recorded") < 1e-4
    assert differ(tmp_path / "whole", tmp_path / "other dropout") > 1e-2


@pytest.mark.slow
def test_two_ranks_make_the_run_of_one(tmp_path):
    jobs = [{"size": size, "fused": True, "tree": runs.tree(tmp_path / str(size), **sections())} for size in (1, 2)]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    child = subprocess.run(
        [sys.executable, str(runs.HERE / "ranks.py"), str(tmp_path / "jobs.json")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        timeout=280,
    )
    assert child.returncode == 0, child.stderr
    assert [result["codes"] for result in json.loads(child.stdout)] == [[0], [0, 0]], child.stderr
    assert differ(tmp_path / "1", tmp_path / "2") < 1e-4
