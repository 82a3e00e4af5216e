"""Every precision on a CPU gives the model's own representation, nearly, and says where it cannot."""

from __future__ import annotations

import copy

import pytest
import torch

import vitrail
from vitrail.errors import ConfigError, NotApplicableError
from vitrail.fast.cpu import embedders as cpu
from vitrail.fast.cpu.embedders import PackedEmbedder, create_cpu_embedder
from vitrail.fast.timing import relative_distance
from vitrail.system.processor import ProbeResult

SMALL = {"image_size": 32, "width": 64, "depth": 2, "num_heads": 2, "mlp_dim": 128, "num_classes": 10, "seed": 0}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Ti/8", SMALL),
        ("Ti/8", {**SMALL, "position": "relative"}),
        ("Ti/8", {**SMALL, "block": "axial", "class_token": False, "pool": "average"}),
        pytest.param("BiT-R50x1", {"image_size": 32, "num_classes": 4}, marks=pytest.mark.slow),
    ],
)
def test_fp32_is_the_same_function(name, options):
    model = vitrail.create_model(name, **options).eval()
    before, head = copy.deepcopy(model.state_dict()), model.head
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = create_cpu_embedder(model, "fp32")(images)
    with torch.no_grad():
        assert relative_distance(found, model.embed(images)) < 1e-5
    assert model.head is head
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_a_model_in_training_is_embedded_without_dropout_and_stays_in_training():
    model = vitrail.create_model("Ti/8", **SMALL, dropout=0.5).train()
    images = torch.randn(2, 3, 32, 32)
    embed = create_cpu_embedder(model, "fp32")
    assert torch.equal(embed(images), embed(images))
    assert model.training


def test_bf16_where_the_probe_dies(monkeypatch):
    monkeypatch.setattr(cpu, "_probe_bf16", lambda: ProbeResult(works=False, detail="killed by SIGILL"))
    with pytest.raises(NotApplicableError, match="SIGILL"):
        create_cpu_embedder(vitrail.create_model("Ti/8", **SMALL), "bf16")


def test_bf16_where_the_probe_lives(monkeypatch):
    made = []
    monkeypatch.setattr(cpu, "_probe_bf16", lambda: ProbeResult(works=True, detail=""))
    monkeypatch.setattr(cpu, "PackedEmbedder", lambda model, dtype: made.append(dtype))  # bf16 may be deadly here
    create_cpu_embedder(vitrail.create_model("Ti/8", **SMALL), "bf16")
    assert made == [torch.bfloat16]


def test_what_is_refused():
    model = vitrail.create_model("Ti/8", **SMALL)
    with pytest.raises(ConfigError, match="'int8'"):
        create_cpu_embedder(model, "int9")
    with pytest.raises(NotApplicableError, match="float32"):
        create_cpu_embedder(model.double(), "fp32")


def test_other_types_than_the_models():
    model = vitrail.create_model("Ti/8", **SMALL)
    images = torch.randn(2, 3, 32, 32)
    found = PackedEmbedder(model, torch.float64)(images)
    assert found.dtype == torch.float32
    assert relative_distance(found, create_cpu_embedder(model, "fp32")(images)) < 1e-5
