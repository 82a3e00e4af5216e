"""Engines: a model, its export and its faster versions give the same answers for the same pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vitrail
from samples import randomise
from vitrail.errors import ConfigError, NotApplicableError, WeightsError
from vitrail.exporting.export import export
from vitrail.inference.engine import get_model, open_engine


@pytest.fixture(scope="module")
def model():
    built = randomise(vitrail.create_model("Ti/16", image_size=32, num_classes=4, depth=2))
    built.labels = ("ant", "bee", "cat", "dog")
    return built.eval()


@pytest.fixture(scope="module")
def pixels():
    return torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("kind", "suffix"), [("onnx", ".onnx"), ("openvino", ".xml")])
def test_an_export_answers_as_its_model(model, pixels, kind, suffix, tmp_path):
    if kind == "openvino":
        pytest.importorskip("openvino", reason="OpenVINO is an extra that not every machine has")
    path = tmp_path / f"model{suffix}"
    export(model, path, kind)
    engine = open_engine(path)
    assert engine.labels == model.labels
    assert engine.preprocessing == model.preprocessing
    np.testing.assert_allclose(engine.classify(pixels), open_engine(model).classify(pixels), atol=1e-5)
    assert engine.embedding_size is None
    with pytest.raises(ConfigError, match="representations"):
        engine.embed(pixels)
    with pytest.raises(NotApplicableError, match="exported"):
        get_model(engine)


def test_logits_and_embeddings_of_one_pass_are_those_of_two(model, pixels):
    engine = open_engine(model)
    both = engine.compute(pixels, logits=True, embeddings=True)
    torch.testing.assert_close(both.logits, engine.compute(pixels).logits)
    np.testing.assert_allclose(both.embeddings, engine.embed(pixels), atol=1e-6)
    assert engine.embedding_size == both.embeddings.shape[1] == 192


def test_int8_is_near_and_says_so(model, pixels):
    engine = open_engine(model, precision="int8")
    assert engine.precision == "int8"
    difference = np.abs(engine.classify(pixels) - open_engine(model).classify(pixels)).max()
    assert 0 < difference < 0.05
    assert engine.compute_digest() != open_engine(model).compute_digest()


def test_double_precision_is_kept(pixels):
    model = vitrail.create_model("Ti/16", image_size=32, num_classes=4, depth=1, dtype=torch.float64, seed=0)
    assert open_engine(model).compute(pixels).logits.dtype == torch.float64


def test_half_precision_weights_compute_in_single(pixels):
    model = vitrail.create_model("Ti/16", image_size=32, num_classes=4, depth=1, dtype=torch.float16, seed=0)
    assert open_engine(model).compute(pixels).logits.dtype == torch.float32


def test_one_grammar_of_precisions(model, tmp_path):
    with pytest.raises(ConfigError, match="int8"):
        open_engine(model, precision="int7")
    with pytest.raises(ConfigError, match="fp16"):
        open_engine(model, precision=torch.float16)
    export(model, tmp_path / "model.onnx", "onnx")
    with pytest.raises(ConfigError, match="exported"):
        open_engine(tmp_path / "model.onnx", precision="int8")


@pytest.mark.slow
def test_files_that_cannot_be_run_say_why(model, tmp_path):
    (tmp_path / "noise.onnx").write_bytes(b"not a graph")
    with pytest.raises(WeightsError, match="noise"):
        open_engine(tmp_path / "noise.onnx")
    with pytest.raises(WeightsError, match="vitrail export"):
        open_engine(tmp_path / "absent.onnx")
    export(model, tmp_path / "pixels.onnx", "onnx", with_preprocessing=True)
    with pytest.raises(WeightsError, match="preprocessing"):
        open_engine(tmp_path / "pixels.onnx")
