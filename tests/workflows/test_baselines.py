"""The paper's baselines and other libraries' models go through the same commands as a ViT."""

from __future__ import annotations

import pytest
import torch
from striped import stripes

import vitrail
from peers import timm
from vitrail.evaluation.compare import compare_models
from vitrail.evaluation.fewshot import fewshot
from vitrail.inference.batches import InferenceOptions
from vitrail.model.architecture import TimmArchitecture
from vitrail.model.cost import compute_cost
from vitrail.model.create import build_empty_model
from vitrail.workflows.linear_head import fit_linear_head

CPU = InferenceOptions(batch_size=4, device="cpu")


def network_of_timm() -> vitrail.TimmModel:
    torch.manual_seed(0)
    theirs = timm.create_model("test_efficientnet", num_classes=3)
    model = build_empty_model(TimmArchitecture(name="test_efficientnet", image_size=32, num_classes=3))
    state = theirs.state_dict()
    model.load_state_dict({name: state[name.partition(".")[2]] for name in model.state_dict()}, assign=True)
    return model.eval()


BUILT = {
    "bit": lambda: vitrail.create_model("BiT-R50x1", image_size=32, num_classes=3, seed=0),
    "hybrid": lambda: vitrail.create_model("R26+Ti/32", image_size=32, num_classes=3, seed=0),
    "timm": network_of_timm,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["timm", "bit", "hybrid"])
def test_a_baseline_goes_through_the_same_commands(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    stripes(tmp_path / "photos", classes=3, images=6)
    model = BUILT[name]()
    model.labels = ["colour-0", "colour-1", "colour-2"]
    vitrail.save(model, tmp_path / name)
    (row,) = compare_models([name], "photos", device="cpu").rows
    assert (row.parameters, row.flops) == compute_cost(model.architecture)
    assert row.images == 18
    assert row.images_per_second > 0
    found = fewshot(name, "photos", shots=[1], seeds=[0], methods=["least-squares", "knn"], device="cpu")
    assert {each.method for each in found.rows} == {"least-squares", "knn, k=20", "knn, k=1"}
    assert fit_linear_head("photos", name, options=CPU).weights.is_dir()
    (row,) = compare_models([f"runs/photos-quick-from-{name}"], "photos", device="cpu").rows
    assert row.top1.value > 0.9
