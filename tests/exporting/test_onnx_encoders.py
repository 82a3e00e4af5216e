"""ONNX files of the encoders that people use: at any size, also not square, within 1e-4 of torch; and in int8."""

from __future__ import annotations

import pytest
import torch
from exported import difference

from encoders import ENCODERS, small_encoder, small_hybrid
from samples import images
from vitrail.exporting.export import export
from vitrail.exporting.onnx import open_onnx

SIZES = [(16, 24), (16, 16), (32, 32), (12, 28), (36, 20)]
"""The model's own, a smaller, a larger, two that are not square."""
SHOWN = ("dinov3",)
"""It has the most parts; every one takes seconds."""


def cases():
    return [kind if kind in SHOWN else pytest.param(kind, marks=pytest.mark.slow) for kind in (*ENCODERS, "hybrid")]


@pytest.mark.parametrize("kind", cases())
def test_one_file_for_five_sizes(kind, tmp_path):
    model = small_hybrid(depth=1) if kind == "hybrid" else small_encoder(kind, depth=1)
    export(model, tmp_path / "model.onnx", dynamic_size=True, on_event=lambda *_: None)
    run = open_onnx(tmp_path / "model.onnx")
    for size in SIZES:
        assert max(difference(run, model, images(count, size)) for count in (1, 3)) <= 1e-4, size


@pytest.mark.slow
def test_a_large_relative_bias_is_itself_at_its_own_size(tmp_path):
    model = small_encoder("beit", image_size=(40, 40))
    with torch.no_grad():
        for block in model.encoder.blocks:
            block.attention.relative_bias.table.mul_(20)  # as large as trained ones
    export(model, tmp_path / "model.onnx", dynamic_size=True, on_event=lambda *_: None)
    run = open_onnx(tmp_path / "model.onnx")
    for size in ((40, 40), (40, 32), (48, 40)):  # one side may stay
        assert difference(run, model, images(2, size)) <= 1e-5, size


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*ENCODERS, "hybrid"])
def test_int8_answers_as_the_model_does(kind, tmp_path):
    model = small_hybrid() if kind == "hybrid" else small_encoder(kind)
    export(model, tmp_path / "model.onnx", "onnx-int8", on_event=lambda *_: None)
    batch = images(8)
    with torch.no_grad():
        exact = model(batch)
    found = open_onnx(tmp_path / "model.onnx")(batch)
    assert torch.nn.functional.cosine_similarity(found, exact).min() > 0.98
