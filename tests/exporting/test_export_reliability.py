"""What was fitted travels into exported files, and they answer as the model does."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import torch

import vitrail
from calibrated import calibrate_once, calibrated_model, draw_noise
from vitrail.errors import ExportError, WeightsError
from vitrail.exporting.check_embedding import check_embedding
from vitrail.exporting.export import export
from vitrail.exporting.graphs import build_graph
from vitrail.exporting.images import pick_images
from vitrail.inference.predictor import Predictor
from vitrail.reliability.unknown import UnknownScore

NEW = [image for image, _ in draw_noise(20, seed=9)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export(calibrated_model(), tmp_path_factory.mktemp("exported") / "model.onnx").path


def test_an_exported_file_gives_sets_and_tells_unknown_images(exported):
    ours, theirs = Predictor(calibrated_model(), device="cpu"), Predictor(exported)
    assert theirs.engine.reliability == calibrate_once().reliability
    assert theirs.engine.embedding_size == 32
    np.testing.assert_allclose(theirs.embed(NEW), ours.embed(NEW), atol=1e-4)
    for one, other in zip(theirs.unknown(NEW), ours.unknown(NEW), strict=True):
        assert one.score == pytest.approx(other.score, rel=1e-4)
        assert one.share == pytest.approx(other.share, abs=0.005)
    labels = [[[name for name, _ in ranked] for ranked in each.sets(NEW, coverage=0.9)] for each in (ours, theirs)]
    assert labels[0] == labels[1]


def test_the_names_of_the_outputs_are_told(exported):
    model = onnx.load(exported)
    assert [output.name for output in model.graph.output] == ["logits", "embedding"]


def test_a_score_of_logits_needs_no_second_output(tmp_path):
    model = calibrated_model()
    unknown = UnknownScore.fit("energy", np.random.default_rng(0).normal(size=(200, 3)), None)
    model.reliability = model.reliability.model_copy(update={"unknown": unknown})
    path = export(model, tmp_path / "model.onnx").path
    assert [output.name for output in onnx.load(path).graph.output] == ["logits"]
    predictor = Predictor(path)
    logits = predictor.engine.compute(torch.stack([torch.from_numpy(image).permute(2, 0, 1) for image in NEW])).logits
    for found, row in zip(predictor.unknown(NEW), logits.double(), strict=True):
        assert found.score == pytest.approx(-float(row.logsumexp(dim=0)), rel=1e-4)


@pytest.mark.parametrize(
    ("content", "reason"), [("{", "cannot be read"), ('{"images": 5}', "neither sets nor a score")]
)
def test_metadata_of_strangers_is_checked(exported, tmp_path, content, reason):
    model = onnx.load(exported)
    (entry,) = [each for each in model.metadata_props if each.key == "reliability"]
    assert json.loads(entry.value)["images"] == 1000
    entry.value = content
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(WeightsError, match=reason):
        Predictor(tmp_path / "model.onnx")


def test_a_file_without_the_output_that_its_score_needs_is_refused(exported, tmp_path):
    model = onnx.load(exported)
    del model.graph.output[1]
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(WeightsError, match="tells unknown images by representations, and gives none"):
        Predictor(tmp_path / "model.onnx")


def test_an_embedding_that_differs_is_found(exported, tmp_path):
    graph = build_graph(calibrated_model(), gives_embedding=True)
    picked = pick_images(graph, None, 4)
    check_embedding(graph, exported, picked, is_rounded=False)
    torch.nn.init.constant_(graph.model.encoder.norm.bias, 0.5)
    with pytest.raises(ExportError, match="another embedding"):
        check_embedding(graph, exported, picked, is_rounded=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx-int8", "openvino"])
def test_other_kinds_that_are_read_back(tmp_path, kind):
    if kind == "openvino":
        pytest.importorskip("openvino", reason="OpenVINO is not installed: pip install 'vitrail[openvino]'")
    path = tmp_path / f"model.{'xml' if kind == 'openvino' else 'onnx'}"
    ours, theirs = Predictor(calibrated_model(), device="cpu"), Predictor(export(calibrated_model(), path, kind).path)
    for one, other in zip(theirs.unknown(NEW), ours.unknown(NEW), strict=True):
        assert one.score == pytest.approx(other.score, rel=0.2 if kind == "onnx-int8" else 1e-4)
    assert vitrail.predict(NEW, path, coverage=0.9, unknown=True, on_event=lambda *event: None)[0].familiarity
