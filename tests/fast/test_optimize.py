from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vitrail
from vitrail.errors import ConfigError, NotApplicableError, WeightsError
from vitrail.fast.cpu import precision_search
from vitrail.fast.cpu.packed import pack_layers
from vitrail.fast.gpu.autotune import choices, choose_fastest
from vitrail.fast.optimize import MOST_GRAPHS, CudaGraphCache, _pad_batch, explain_missing_kernels, optimize
from vitrail.fast.timing import relative_distance
from vitrail.inference.engine import open_engine
from vitrail.inference.predictor import Predictor
from vitrail.serving.served_model import ServedModel

SMALL = {"image_size": 16, "width": 64, "depth": 2, "num_heads": 2, "mlp_dim": 128, "num_classes": 5, "seed": 0}


def small(**options):
    model = vitrail.create_model("Ti/4", **{**SMALL, **options})
    for kernel in [parameter for parameter in model.head.parameters() if parameter.ndim == 2]:
        torch.nn.init.normal_(kernel, std=0.2, generator=torch.Generator().manual_seed(1))
    return model.eval()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@settings(max_examples=5, deadline=None)
@given(st.sampled_from(["class", "average", "class+average"]), st.sampled_from([None, 24]), st.integers(1, 3))
def test_fp32_is_the_same_function(pool, representation_size, batch):
    model = small(pool=pool, representation_size=representation_size if pool == "class" else None)
    fast, images = optimize(model, precision="fp32"), torch.randn(batch, 3, 16, 16)
    with torch.no_grad():
        assert relative_distance(fast(images), model(images)) < 1e-5
        assert relative_distance(fast.embed(images), model.embed(images)) < 1e-5
    assert fast.distance < 1e-5


def test_int8_tells_how_far_it_is():
    model, images = small(), torch.randn(4, 3, 16, 16)
    fast = optimize(model, precision="int8", images=images)
    y, logits = fast.embed_and_classify(images)
    with torch.no_grad():
        assert relative_distance(y, model.embed(images)) == pytest.approx(fast.distance, rel=1e-6)
    assert 0 < fast.distance < 5e-2
    assert torch.equal(logits, fast(images))
    assert "int8" in repr(fast)


def test_auto_chooses_and_tells_what_it_tried(monkeypatch):
    monkeypatch.setattr(precision_search, "ROUNDS", 1)
    monkeypatch.setattr(precision_search, "SECONDS", 0.01)
    told: list[str] = []
    fast = optimize(small(), precision="auto", batch=2, on_message=told.append)
    assert fast.precision in ("fp32", "bf16", "int8")
    assert any(line.startswith("fp32: ") and "ms" in line for line in told)


def test_the_model_is_left_as_it_was():
    model = small().train()
    before = copy.deepcopy(model.state_dict())
    optimize(model, precision="int8")
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"precision": "bf17"}, "did you mean 'bf16'"),
        ({"target": "speed"}, "throughput or latency"),
        ({"precision": "fp8"}, "fp8 is for GPUs: on a CPU give int8"),
    ],
)
def test_what_cannot_be_is_refused(options, told):
    with pytest.raises((ConfigError, NotApplicableError), match=told):
        optimize(small(), **options)


def test_nothing_gives_nothing():
    for precision in ("fp32", "int8"):
        y, logits = optimize(small(), precision=precision).embed_and_classify(torch.zeros(0, 3, 16, 16))
        assert (y.shape, logits.shape) == ((0, 64), (0, 5))


def test_it_never_trains():
    fast = optimize(small(dropout=0.5), precision="fp32").train()
    images = torch.randn(2, 3, 16, 16)
    assert not fast.training
    assert torch.equal(fast(images), fast(images))


def test_damaged_weights_are_told():
    model = small()
    with torch.no_grad():
        model.encoder.norm.weight[0] = torch.nan
    with pytest.raises(WeightsError, match="damaged"):
        optimize(model, precision="int8")


def test_networks_of_timm_are_left_as_they_are(monkeypatch):
    model = small()
    monkeypatch.setattr("vitrail.fast.optimize.TimmModel", type(model))
    monkeypatch.setattr("vitrail.fast.cpu.packed.TimmModel", type(model))
    with pytest.raises(NotApplicableError, match="timm"):
        optimize(model)
    assert pack_layers(model) == 0


@given(st.integers(1, 200))
def test_batches_are_filled_up_to_few_sizes(count):
    filled = _pad_batch(torch.ones(count, 1))
    assert count <= len(filled) < max(2 * count, count + 32)
    assert len(filled) in (1, 2, 4, 8, 16) or len(filled) % 32 == 0
    assert filled.sum() == count


class Overwriting:
    """In place of a recorded graph: what it gives is overwritten by its next call, and it takes one shape alone."""

    def __init__(self, function):
        self.function, self.kept = function, None

    def __call__(self, images):
        found = self.function(images)
        if self.kept is None:
            self.kept = found
        for place, new in zip(self.kept, found, strict=True):
            place.copy_(new)
        return self.kept


def test_recorded_batches_of_any_size_are_the_callers_to_keep(monkeypatch):
    monkeypatch.setattr("vitrail.fast.optimize.CudaGraph", Overwriting)
    function = CudaGraphCache(lambda images: (images * 2.0, images.sum(1, keepdim=True)))
    batches = [torch.randn(count, 6) for count in (1, 3, 1, 5, 33, *range(64, 64 + 32 * MOST_GRAPHS, 32), 1, 0)]
    results = [function(images) for images in batches]
    for images, (y, logits) in zip(batches, results, strict=True):
        assert torch.equal(y, images * 2.0)
        assert torch.equal(logits, images.sum(1, keepdim=True))
    assert len(function._graphs) == MOST_GRAPHS


def test_half_a_model_is_refused():
    with pytest.raises(ConfigError, match="float32"):
        optimize(small().bfloat16())


def test_without_a_gpu_there_are_no_kernels():
    assert "NVIDIA" in explain_missing_kernels(torch.device("cpu"))


def test_choices_without_a_gpu_are_the_first():
    x = torch.ones(1)
    assert choose_fastest("this test", {"first": lambda x: x + 1, "second": lambda x: x + 2}, x)(x) == 2
    assert choices["this test", x.device] == "first"


def test_a_predictor_in_another_precision_agrees():
    model = small()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    plain, fast = Predictor(model, device="cpu"), Predictor(model, device="cpu", precision="int8")
    assert np.abs(plain.probabilities(list(pixels)) - fast.probabilities(list(pixels))).max() < 0.03
    assert relative_distance(torch.tensor(fast.embed(list(pixels))), torch.tensor(plain.embed(list(pixels)))) < 0.05
    ((outcome, *_),) = [list(fast.stream(list(pixels), embeddings=True))]
    assert outcome.probabilities is not None
    assert outcome.embedding is not None


def test_a_server_in_another_precision_agrees_and_shows_attention():
    model = small()
    pixels = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    plain = ServedModel("plain", open_engine(copy.deepcopy(model), device="cpu", owns_model=True))
    fast = ServedModel("fast", open_engine(model, device="cpu", precision="int8", batch=2))
    assert np.abs(plain.engine.classify(pixels) - fast.engine.classify(pixels)).max() < 0.03
    assert fast.rollout.layers == plain.rollout.layers
