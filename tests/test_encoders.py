"""Every kind of encoder can be looked into, trained, exported and served, and every way to compute it agrees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import vitrail
from encoders import ENCODERS, small_encoder, small_hybrid
from samples import images, randomise
from vitrail.fast.cpu.embedders import create_cpu_embedder
from vitrail.fast.optimize import optimize
from vitrail.inference.engine import open_engine
from vitrail.inspection import (
    attention_rollout,
    embedding_filters,
    head_attention,
    layer_similarity,
    mean_attention_distance,
    patch_components,
    rollout_by_layer,
    token_similarity,
)
from vitrail.inspection.findings import Absent
from vitrail.inspection.images import InspectionImages
from vitrail.inspection.inspect_model import inspect_model
from vitrail.model.attention import SelfAttention
from vitrail.serving.attention import AttentionRollout

KINDS = [*ENCODERS, "hybrid"]
WITH_TABLES = ("dinov2", "dinov2 giant, registers", "siglip", "eva-02", "perception encoder", "norms behind",
               "query and key norms", "hybrid")  # fmt: skip
"""Kinds whose learned position table is a figure."""
OTHER_SIZE = (24, 20)


def few(kinds: list[str], *chosen: str) -> list:
    """All kinds; of them only the chosen ones run by default, because each takes a second or more."""
    return [kind if kind in chosen else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


def make(kind: str, **options):
    return small_hybrid(**options) if kind == "hybrid" else small_encoder(kind, **options)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Two classes of eight photos."""
    draw, folder = np.random.default_rng(0), tmp_path_factory.mktemp("photos")
    for number, name in enumerate(("dark", "light")):
        (folder / name).mkdir()
        for image in range(8):
            pixels = draw.integers(80 * number, 80 * number + 120, (24, 32, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{image}.png")
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(16, 24), OTHER_SIZE])
@torch.no_grad()
def test_recorded_attention_times_values_is_what_attention_gives(kind, size):
    model, batch = make(kind).double(), images(2, size, dtype=torch.float64)
    calls = {}

    def keep(module, arguments, output):
        calls[module] = arguments, output

    layers = [part for part in model.modules() if isinstance(part, SelfAttention)]
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    plain = model(batch)
    with vitrail.record_attention(model) as maps:
        assert torch.equal(model(batch), plain)
    for hook in hooks:
        hook.remove()
    assert len(maps) == len(layers) == 2
    for layer, weights in zip(layers, maps.values(), strict=True):
        arguments, output = calls[layer]
        assert torch.allclose(weights.sum(dim=-1), torch.ones((), dtype=weights.dtype), rtol=0, atol=1e-12)
        _, _, values = layer.split_heads(*arguments)
        mixed = layer.out(layer.norm((weights @ values).transpose(1, 2).flatten(2)))
        assert torch.allclose(mixed, output, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_measured_has_the_shape_of_the_image(kind):
    model, batch = make(kind), images(4, OTHER_SIZE)
    grid, tokens = (6, 5), model.prefix + 30
    by_layer = rollout_by_layer(model, batch)
    assert by_layer.shape == (4, 2, tokens)
    np.testing.assert_allclose(by_layer.sum(axis=-1), 1, rtol=0, atol=1e-6)
    assert attention_rollout(model, batch).shape == (4, *grid)
    np.testing.assert_allclose(head_attention(model, batch).sum(axis=-1), 1, rtol=0, atol=1e-6)
    assert (mean_attention_distance(model, batch) > 0).all()
    components = patch_components(model, batch)
    assert components.shape == (4, *grid, 3)
    assert (components.std(axis=(0, 1, 2)) > 0).all()
    assert token_similarity(model, batch, None).shape == (4, *grid, *grid)
    assert layer_similarity(model, batch).shape == (2, 2)
    assert embedding_filters(model, 2).shape[0] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_absent_from_what_a_report_shows(kind):
    pixels = [torch.randint(0, 256, (3, 16, 24), dtype=torch.uint8) for _ in range(4)]
    picked = InspectionImages([(str(number), each) for number, each in enumerate(pixels)], pixels, "four", "four", ())
    found = inspect_model(make(kind), kind, picked)
    for part in (found.attention, found.components, found.tokens, found.layers, found.distance, found.filters):
        assert not isinstance(part, Absent), part
    assert found.components.values.shape == (4, 4, 6, 3)
    assert isinstance(found.positions, Absent) == (found.name not in WITH_TABLES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_report_is_written(kind, photos, tmp_path):
    result = vitrail.inspect(make(kind), images=photos, out=tmp_path / "report.html", on_event=lambda *_: None)
    assert {"rollout", "components", "tokens", "distance", "layers"} <= {path.stem for path in result.figure_files}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_faster_ways_to_compute_agree(kind):
    model, batch = make(kind), images(3)
    expected = model.embed(batch)
    packed = create_cpu_embedder(model, "fp32")(batch)
    assert (packed - expected).norm() < 1e-5 * expected.norm()
    fast = optimize(model, precision="int8")
    assert F.cosine_similarity(fast.embed(batch), expected).min() > 0.999
    assert fast.distance < 0.03


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_predictor_and_a_server_answer_as_the_model_does(kind, photos):
    model = make(kind)
    photo = photos / "dark" / "0.png"
    inputs = vitrail.prepare(photo, model.preprocessing)[None]
    predictor = vitrail.Predictor(model)
    expected = model(inputs).softmax(1)[0]
    answers = dict(predictor(photo, top=5))
    assert sorted(answers.values()) == pytest.approx(sorted(expected.tolist()), abs=1e-5)
    rollout = AttentionRollout(open_engine(model, device="cpu"))
    assert rollout.layers == 2
    shown = rollout(torch.zeros(1, 3, 16, 24, dtype=torch.uint8))
    assert shown.shape == (1, 2, 4, 6)
    assert (shown >= 0).all()
    assert 0 < shown[0, -1].sum() <= 1 + 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_good_for_few_shots(kind, photos):
    report = vitrail.fewshot(make(kind), photos, shots=(2,), seeds=(0,), cache=None, on_event=lambda *_: None)
    assert report


@pytest.mark.parametrize("kind", few(KINDS, "dinov3", "beit, shared bias", "eva-02", "mixed rope", "hybrid"))
def test_it_is_saved_trained_on_and_loaded_again(kind, photos, tmp_path):
    start = make(kind)
    vitrail.save(start, tmp_path / "start")
    settings = {
        "schedule.steps": 3,  # a head of zeros learns first
        "schedule.warmup_steps": 0,
        "schedule.result": "last",
        "optimizer.kind": "adamw",
        "optimizer.learning_rate": 0.03,
        "optimizer.layer_decay": 0.5,
        "model.stochastic_depth": 0.2,
        "data.workers": 0,
        "run.trackers": (),
        "run.report": False,
    }
    result = vitrail.finetune(
        photos, tmp_path / "start", folder=tmp_path / "run", settings=settings, on_event=lambda *_: None
    )
    again = vitrail.load(tmp_path / "run")
    assert again.architecture.stochastic_depth == 0.2
    assert again.labels == ("dark", "light")
    moved = dict(again.named_parameters())
    still = [
        name
        for name, parameter in start.named_parameters()
        if moved[name].shape == parameter.shape and torch.equal(moved[name], parameter)
    ]
    assert still == [], "every parameter learns"
    assert result.accuracy is not None


def test_random_numbers_of_training_leave_evaluation_alone():
    model = randomise(small_encoder("dinov3")).train()
    batch = images(1)
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))
