"""A step as one CUDA graph: the same weights, and what cannot be recorded is refused. A graph itself needs a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import vitrail
from vitrail.data.loader import Batch
from vitrail.data.transforms.mixing import Mixing
from vitrail.errors import ConfigError
from vitrail.fast.gpu.cuda_graph import CudaGraph
from vitrail.objectives.classification import Classification
from vitrail.objectives.metrics import Sums
from vitrail.training import graph_step
from vitrail.training.averaging import Average
from vitrail.training.checkpoint import name_tensors
from vitrail.training.clipping import clip_gradients
from vitrail.training.config import OptimizerConfig
from vitrail.training.graph_step import GraphStep, check_graphs
from vitrail.training.optim import build_optimizer, initialise_state, set_learning_rate
from vitrail.training.resolve import resolve

TREE = {"model": {"name": "Ti/4"}, "data": {"source": "digits"}, "schedule": {"steps": 10}}
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


@dataclass
class One:
    """What is asked of ranks."""

    device: torch.device
    size: int = 1


def objective(**options) -> Classification:
    small = {"image_size": 16, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64, "num_classes": 5, "seed": 0}
    model = vitrail.create_model("Ti/4", **small, **options)
    return Classification(model, label_smoothing=0.1, mixing=Mixing(mixup=0.8, cutmix=1.0)).train()


def batch(seed: int, device: str = "cpu") -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (6, 3, 16, 16), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 5, (6,), generator=generator)
    return Batch(images, {"label": labels}, torch.arange(6), torch.ones(6, dtype=torch.bool)).to(device)


class Learner:
    """A classifier with all that a step changes."""

    def __init__(self, kind: str, device: str, **options) -> None:
        self.objective = objective(**options).to(device)
        # Keys have a bias without effect, whose gradient is noise: eps keeps Adam from following it.
        config = OptimizerConfig(kind=kind, momentum=0.9, weight_decay=0.3, eps=1e-3)
        self.optimizer = build_optimizer(self.objective, config, torch.device(device))
        for group in self.optimizer.param_groups:
            group["fused"] = True  # on a CPU too: only such leave out a step by themselves
        initialise_state(self.optimizer)
        self.average = Average(self.objective, 0.9)

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.named().items()}

    def named(self) -> dict[str, Tensor]:
        return name_tensors(self.objective, self.optimizer, self.average)

    def step(self, made: Batch, number: int, most: float | None) -> tuple[Sums, Tensor]:
        """One thing after the other."""
        self.objective.zero_grad()
        outcome = self.objective(made, number)
        outcome.loss.backward()
        norm = clip_gradients(self.objective.parameters(), most)
        if norm.isfinite():
            self.optimizer.step()
            self.average.update(number)
        return outcome.sums, norm


def compare(kind: str, device: str, most: float | None, *, fails: int | None = 2, **options) -> None:
    """Four steps, of which the one with number `fails` has no finite gradient."""
    plain, learner = (Learner(kind, device, **options) for _ in range(2))
    step = GraphStep(learner.objective, torch.float32, learner.optimizer, most, learner.average)
    for number, rate in enumerate((1e-3, 3e-3, 2e-3, 1e-3)):
        made, before = batch(number, device), learner.state()
        if number == fails:
            made = replace(made, images=made.images * torch.inf)
        for each in (plain, learner):
            set_learning_rate(each.optimizer, rate)
        sums, norm = plain.step(made, number, most)
        found, length = step(made, number, number)
        assert all(type(group["lr"]) is float for group in learner.optimizer.param_groups)
        assert norm.isfinite() == (number != fails)
        torch.testing.assert_close(length, norm, equal_nan=True)
        for name, pair in sums.items():
            torch.testing.assert_close(found[name], pair, equal_nan=True)
        for name, tensor in learner.named().items():
            torch.testing.assert_close(tensor, plain.named()[name], rtol=2e-5, atol=2e-6, msg=f"{number}: {name}")
        changed = {name for name, tensor in learner.named().items() if not torch.equal(tensor, before[name])}
        head = {"objective/model.head.weight", "average/model.head.weight"}
        assert changed == set() if number == fails else head <= changed


KINDS = pytest.mark.parametrize(("kind", "most"), [("muon", 1.0), ("adamw", None), ("adam", 0.5), ("sgd", 1.0)])


@KINDS
def test_a_step_is_what_it_is_one_thing_after_the_other(monkeypatch, kind, most):
    """All but the graph: in its place the function itself."""
    monkeypatch.setattr(graph_step, "CudaGraph", lambda function, kept: function)
    compare(kind, "cpu", most)


@NEEDS_GPU
@KINDS
@pytest.mark.parametrize("stem", [None, ((16, 3, 2), (32, 3, 2))])
def test_a_graph_makes_the_same_steps(monkeypatch, kind, most, stem):
    # Muon in float32: rounded to bf16, a learning rate in float32 and one in float64 are a step apart after three.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    # What is infinite would get into the stem's running statistics, and from there into their average.
    compare(kind, "cuda", most, conv_stem=stem, fails=2 if stem is None else None)


def test_recording_changes_nothing_that_a_step_changes(monkeypatch):
    monkeypatch.setattr(graph_step, "CudaGraph", lambda function, kept: kept)
    learner = Learner("muon", "cpu", conv_stem=((16, 3, 2), (32, 3, 2)))
    kept = GraphStep(learner.objective, torch.float32, learner.optimizer, 1.0, learner.average)._graph
    restored = {tensor.data_ptr() for tensor in kept}
    assert {name for name, tensor in learner.named().items() if tensor.data_ptr() not in restored} == set()


@NEEDS_GPU
def test_each_replay_draws_from_the_generators_as_they_stand():
    own = torch.Generator("cuda")

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.rand(4, device="cuda", generator=own), x + torch.rand(4, device="cuda")

    captured, x = CudaGraph(function, generators=[own]), torch.zeros(4, device="cuda")
    for seed in (5, 6, 5):
        own.manual_seed(seed)
        torch.manual_seed(seed)
        found = [one.clone() for one in captured(x)]
        own.manual_seed(seed)
        torch.manual_seed(seed)
        for one, two in zip(found, function(x), strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("given", "device", "size", "precision", "told"),
    [
        ([], "cpu", 1, torch.bfloat16, "one GPU"),
        ([], "cuda", 2, torch.bfloat16, "one GPU"),
        (["objective.kind=masked-patches"], "cuda", 1, torch.bfloat16, "classification"),
        (["optimizer.accumulate=2"], "cuda", 1, torch.bfloat16, "accumulate = 1"),
        ([], "cuda", 1, torch.float16, "bf16 or fp32"),
        (["run.gradient_checkpointing=true"], "cuda", 1, torch.bfloat16, "gradient_checkpointing"),
    ],
)
def test_what_cannot_be_recorded_is_refused(given, device, size, precision, told):
    config = resolve(TREE, ["run.graphs=true", *given])
    with pytest.raises(ConfigError, match=rf"run\.graphs needs .*{told}"):
        check_graphs(config, One(torch.device(device), size), precision)
    check_graphs(resolve(TREE, ["run.graphs=true"]), One(torch.device("cuda")), torch.bfloat16)
