"""A step as one CUDA graph: the same gradients, and what cannot be recorded is refused. A graph itself needs a GPU."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch

import vitrail
from vitrail.data.loader import Batch
from vitrail.data.mixing import Mixing
from vitrail.errors import ConfigError
from vitrail.fast.captured import Captured
from vitrail.objectives.classification import Classification
from vitrail.train import recorded
from vitrail.train.recorded import RecordedLearning, check_graphs
from vitrail.train.resolve import resolve

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
    return Batch(images, labels, torch.arange(6), torch.ones(6, dtype=torch.bool)).to(device)


def compare(one: Classification, other: RecordedLearning, learning: Classification, device: str) -> None:
    for key in range(3):
        one.zero_grad()
        outcome = one(batch(key, device), key)
        outcome.loss.backward()
        sums = other(batch(key, device), key)
        for name, pair in outcome.sums.items():
            torch.testing.assert_close(sums[name], pair)
        pairs = zip(one.named_parameters(), learning.parameters(), strict=True)
        for (name, plain), recorded_one in pairs:
            torch.testing.assert_close(recorded_one.grad, plain.grad, msg=lambda said, name=name: f"{name}: {said}")
        for parameter in learning.parameters():
            parameter.grad = None  # as an optimiser does that sets gradients to nothing


def test_the_same_gradients_as_step_by_step(monkeypatch):
    """All but the graph: in its place the function itself."""
    monkeypatch.setattr(recorded, "Captured", lambda function, kept: function)
    plain = objective()
    learning = copy.deepcopy(plain)
    other = RecordedLearning(learning, torch.float32)
    for key in range(3):
        plain.zero_grad()
        plain(batch(key), key).loss.backward()
        other._gradients = None  # without a graph every call makes new ones
        other(batch(key), key)
        for one, two in zip(plain.parameters(), learning.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=0)


@NEEDS_GPU
@pytest.mark.parametrize("stem", [None, ((16, 3, 2), (32, 3, 2))])
def test_a_graph_gives_the_same_gradients(stem):
    plain = objective(conv_stem=stem).cuda()
    learning = copy.deepcopy(plain)
    compare(plain, RecordedLearning(learning, torch.float32), learning, "cuda")
    for (name, one), two in zip(plain.named_buffers(), learning.buffers(), strict=True):
        torch.testing.assert_close(one, two, msg=lambda said, name=name: f"{name}: {said}")


@NEEDS_GPU
def test_each_replay_draws_from_the_generators_as_they_stand():
    own = torch.Generator("cuda")

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.rand(4, device="cuda", generator=own), x + torch.rand(4, device="cuda")

    captured, x = Captured(function, generators=[own]), torch.zeros(4, device="cuda")
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
