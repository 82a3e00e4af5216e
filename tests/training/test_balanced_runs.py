"""Whole runs that balance their classes: exact on resume, as one CUDA graph, and judged by every class alike."""

from __future__ import annotations

import numpy as np
import pytest
import runs
import torch

import vitrail
from vitrail.data.loader import Batch
from vitrail.data.sources.list_source import ListSource
from vitrail.errors import ConfigError, Stopped
from vitrail.objectives.balance import Balance
from vitrail.objectives.classification import Classification
from vitrail.system.ranks import Ranks
from vitrail.training import graph_step
from vitrail.training.averaging import Average
from vitrail.training.build import count_steps, open_training_data, prepare_run
from vitrail.training.config import OptimizerConfig
from vitrail.training.graph_step import GraphStep
from vitrail.training.optim import build_optimizer, initialise_state
from vitrail.training.run_training import run_training
from vitrail.training.validation import get_metric

SIZES = (60, 20, 5)
BALANCED = {"objective": {"balance": "logits"}, "data": {"balance": 0.5, "batch_size": 8}}
SHORT = {"schedule": {"steps": 6, "warmup_steps": 1}}


def make_images() -> ListSource:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), SIZES).tolist()
    return ListSource([(rng.integers(0, 255, (16, 16), dtype=np.uint8), label) for label in labels])


def test_a_balanced_run_that_is_stopped_goes_on_as_if_it_had_not_been(tmp_path):
    whole, broken = (runs.config(tmp_path / name, **BALANCED, **SHORT) for name in ("whole", "broken"))
    run_training(whole, source=make_images())

    def stop(kind, values):
        if kind == "train" and values["step"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(Stopped, match="of 6"):
        run_training(broken, source=make_images(), on_event=stop)
    run_training(broken, source=make_images())
    runs.assert_same_run(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize(("section", "key", "value"), [("objective", "balance", "loss"), ("data", "balance", 0.25)])
def test_another_balance_is_another_run(tmp_path, section, key, value):
    run_training(runs.config(tmp_path / "run", **BALANCED, **SHORT), source=make_images())
    changed = {**BALANCED, section: {**BALANCED[section], key: value}}
    with pytest.raises(ConfigError, match=rf"{section}\.{key}"):
        run_training(runs.config(tmp_path / "run", **changed, **SHORT), source=make_images())


def test_the_objective_knows_the_counts_and_an_epoch_is_the_longer_list(tmp_path):
    epochs = {"schedule": {"steps": None, "epochs": 2, "warmup_steps": 0}}
    config = runs.config(tmp_path / "run", **BALANCED, **epochs)
    counts = np.bincount(open_training_data(config.data, make_images()).training.labels(0, 76)).tolist()
    setup = prepare_run(config, Ranks(0, 1, torch.device("cpu")), source=make_images())
    objective = setup.learner.objective
    assert objective.balance.counts == counts == [54, 18, 4]
    assert objective.balance.drawn == [54, 36, 29]
    assert setup.steps == count_steps(config, 54 + 36 + 29)
    torch.testing.assert_close(objective.offsets.double(), (torch.tensor([54.0, 36.0, 29.0]).double() / 119).log())
    assert "offsets" not in objective.state_dict(), "it is no part of the weights"
    plain = prepare_run(runs.config(tmp_path / "plain", **SHORT), Ranks(0, 1, torch.device("cpu")))
    assert not plain.learner.objective.balance.is_wanted
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({}, "accuracy"),
        ({"objective": {"balance": "loss"}}, "balanced_accuracy"),
        ({"data": {"balance": 0.1}}, "balanced_accuracy"),
        ({"objective": {"kind": "masked-patches"}, "data": {"balance": 0.1}}, "loss"),
    ],
)
def test_weights_are_chosen_by_every_class_alike_where_classes_are_balanced(tmp_path, changes, metric):
    assert get_metric(runs.config(tmp_path, **changes)) == metric


def test_the_best_evaluation_is_the_one_with_the_best_balanced_accuracy(tmp_path):
    config = runs.config(tmp_path / "run", **BALANCED, **SHORT, run={"evaluate_every": 2})
    run_training(config, source=make_images())
    metrics = vitrail.Run(tmp_path / "run").metrics["evaluation"]
    best = vitrail.Run(tmp_path / "run").best
    assert best.metric == "balanced accuracy"
    assert best.value == max(metrics["balanced_accuracy"])


@pytest.mark.parametrize("kind", ["logits", "loss"])
def test_a_step_as_a_graph_is_balanced_too(monkeypatch, kind):
    """All but the graph: in its place the function itself."""
    monkeypatch.setattr(graph_step, "CudaGraph", lambda function, kept: function)
    model = vitrail.create_model("Ti/4", image_size=16, width=32, depth=1, num_heads=2, mlp_dim=64, num_classes=3)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 3, 16, 16), generator=generator, dtype=torch.uint8)
    batch = Batch(images, {"label": torch.arange(6) % 3}, torch.arange(6), torch.ones(6, dtype=torch.bool))
    objective = Classification(model, balance=Balance(kind, 1.0, SIZES)).train()
    expected = objective(batch, 0).sums["loss"]
    optimizer = build_optimizer(objective, OptimizerConfig(), torch.device("cpu"))
    for group in optimizer.param_groups:
        group["fused"] = True
    initialise_state(optimizer)
    sums, _ = GraphStep(objective, torch.float32, optimizer, 1.0, Average(objective, 0.9))(batch, 0, 1)
    assert torch.equal(sums["loss"], expected)
