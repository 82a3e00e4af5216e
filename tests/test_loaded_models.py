"""A loaded model that a verb is given stays as it is: its weights, their type, the mode of each part, its gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from striped import stripes

import vitrail
from samples import randomise
from vitrail.model.create import share_model

VERBS = {
    "predict": lambda model, photos: vitrail.predict(photos, model),
    "predict in int8": lambda model, photos: vitrail.predict(photos, model, precision="int8"),
    "Predictor": lambda model, photos: vitrail.Predictor(model).embed([torch.zeros(3, 20, 20, dtype=torch.uint8)]),
    "evaluate": vitrail.evaluate,
    "compare_models": lambda model, photos: vitrail.compare_models([model], photos),
    "fewshot": partial(vitrail.fewshot, methods=["knn"]),
    "find_similar": lambda model, photos: vitrail.find_similar(model, photos, torch.zeros(3, 9, 9, dtype=torch.uint8)),
    "inspect": lambda model, photos: vitrail.inspect(model, images=photos, most=2),
    "optimize": lambda model, photos: vitrail.optimize(model, precision="int8"),
    "export": lambda model, photos: vitrail.export(model, photos.with_suffix(".onnx"), images=photos),
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_loaded_model_stays_as_it_is(verb, dtype, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    stripes(tmp_path / "photos", classes=2, images=4)
    sizes = {"image_size": 16, "width": 16, "depth": 1, "num_heads": 2, "mlp_dim": 16}
    model = randomise(vitrail.create_model("Ti/4", num_classes=2, dropout=0.5, **sizes)).to(dtype)
    model.labels = ("colour-0", "colour-1")
    model.train().encoder.eval()  # as with a frozen part
    model.head.requires_grad_(False)
    parameters = list(model.parameters())
    before = [(parameter.clone(), parameter.requires_grad) for parameter in parameters]
    modes = [part.training for part in model.modules()]

    VERBS[verb](model, tmp_path / "photos")

    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    for now, (then, needs_gradient) in zip(model.parameters(), before, strict=True):
        assert now.dtype == dtype
        assert torch.equal(now, then)
        assert now.requires_grad == needs_gradient
    assert [part.training for part in model.modules()] == modes


def test_a_shared_model_has_the_same_memory_and_a_life_of_its_own():
    model = vitrail.create_model("Ti/16", image_size=32, depth=1, num_classes=2, position="relative", seed=0)
    model.unused_tensors = {"extra": torch.zeros(3)}
    shared = share_model(model)
    pairs = list(zip(model.state_dict().values(), shared.state_dict().values(), strict=True))
    assert all(own.data_ptr() == other.data_ptr() for own, other in pairs)
    assert shared.unused_tensors["extra"] is model.unused_tensors["extra"]
    shared.eval().double().replace_head(5)
    assert model.training
    assert model.num_classes == 2
    assert next(model.parameters()).dtype == torch.float32
