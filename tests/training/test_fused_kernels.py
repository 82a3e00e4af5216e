from __future__ import annotations

import pytest
import torch

import vitrail
from vitrail.errors import ConfigError
from vitrail.system.ranks import Ranks
from vitrail.training import fused_kernels
from vitrail.training.config import RunConfig
from vitrail.workflows.train import build_config

SMALL = {"image_size": 16, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64, "num_classes": 5, "seed": 0}


def config(**run):
    return RunConfig(model={"name": "Ti/4"}, data={"source": "digits"}, schedule={"steps": 1}, run=run)


def small(**options):
    return vitrail.create_model("Ti/4", **{**SMALL, **options})


def ranks():
    return Ranks(0, 1, torch.device("cpu"))


def test_left_out_it_is_for_wide_models_on_such_a_gpu_alone(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    wide = {"width": 768, "num_heads": 12}

    def obstacle(model, **run):
        return fused_kernels.use_fused_kernels(model, config(**run), ranks(), torch.bfloat16)

    assert "NVIDIA" in obstacle(small(**wide))  # on a CPU
    monkeypatch.setattr(fused_kernels, "explain_missing_kernels", lambda device: None)
    assert obstacle(small(**wide)) is None
    assert "B/16" in obstacle(small())
    assert "run.compile" in obstacle(small(**wide), compile=True)
    assert "run.compile" in obstacle(small(**wide), compile=False)
    assert "run.fused=false" in obstacle(small(**wide), fused=False)
    assert "B/16" in obstacle(vitrail.create_model("BiT-R50x1", num_classes=2))


@pytest.mark.parametrize("run", [{"fused": True}, {"fp8": True}])
def test_asked_for_where_it_cannot_be_it_says_why(run):
    with pytest.raises(ConfigError, match="NVIDIA GPUs"):
        fused_kernels.use_fused_kernels(small(), config(**run), ranks(), torch.bfloat16)


def test_fp8_without_fused_is_a_contradiction():
    with pytest.raises(ConfigError, match="fp8"):
        fused_kernels.use_fused_kernels(small(), config(fused=False, fp8=True), ranks(), torch.bfloat16)


@pytest.mark.parametrize(
    ("run", "options", "precision", "told"),
    [
        ({"deterministic": True}, {}, torch.bfloat16, "deterministic"),
        ({"gradient_checkpointing": True}, {}, torch.bfloat16, "gradient_checkpointing"),
        ({}, {}, torch.float32, "precision=bf16"),
        ({}, {"attention_dropout": 0.1}, torch.bfloat16, "dropout of attention weights"),
    ],
)
def test_what_does_not_go_together(monkeypatch, run, options, precision, told):
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(fused_kernels, "explain_missing_kernels", lambda device: None)
    with pytest.raises(ConfigError, match=told):
        fused_kernels.use_fused_kernels(small(**options), config(fused=True, **run), ranks(), precision)
    wide = small(width=768, num_heads=12, **options)
    assert told in fused_kernels.use_fused_kernels(wide, config(**run), ranks(), precision)


def test_a_fused_model_trains_by_the_kernels_and_evaluates_as_written(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    from vitrail.fast.gpu.training import FusedTraining

    monkeypatch.setattr(fused_kernels, "explain_missing_kernels", lambda device: None)
    model, images = small(), torch.randn(1, 3, 16, 16)
    plain = model.eval()(images)
    assert fused_kernels.use_fused_kernels(model, config(fused=True), ranks(), torch.bfloat16) is None
    assert isinstance(model.forward, FusedTraining)
    assert torch.equal(model(images), plain)


@pytest.mark.parametrize(
    ("obstacle", "run", "told"),
    [
        (None, {"fp8": True}, "vitrail's kernels, with FP8 after norms"),
        (None, {}, "vitrail's kernels"),
        (
            "they cannot train a model with a quick GELU",
            {"compile": True},
            "PyTorch, compiled; not vitrail's kernels: they ",
        ),
        ("they are for NVIDIA GPUs", {}, "PyTorch; not vitrail's kernels: they are for NVIDIA GPUs"),
        ("run.fused=false", {"graphs": True}, "PyTorch, each step one CUDA graph; not"),
    ],
)
def test_what_computes_a_run_is_said_with_the_reason(obstacle, run, told):
    is_compiled = bool(run.get("compile"))
    assert fused_kernels.describe_computation(obstacle, is_compiled, config(**run)).startswith(told)


def test_the_paper_s_recipe_is_computed_by_the_kernels_if_it_asks_for_them(monkeypatch):
    """imagenet-b16 with its dropout, on a GPU that has the kernels."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(fused_kernels, "explain_missing_kernels", lambda device: None)
    recipe = build_config("imagenet-b16", ["data.source=x", "run.fused=true"])
    assert recipe.model.options["dropout"] == 0.1
    model = vitrail.create_model("B/16", depth=1, num_classes=5, dropout=recipe.model.options["dropout"])
    plain = build_config("imagenet-b16", ["data.source=x"])
    assert "run.fused=true" in str(fused_kernels.use_fused_kernels(model, plain, ranks(), torch.bfloat16))
    obstacle = fused_kernels.use_fused_kernels(model, recipe, ranks(), torch.bfloat16)
    assert fused_kernels.describe_computation(obstacle, False, recipe) == "vitrail's kernels"
    assert fused_kernels.get_kernels(model) is model.forward
