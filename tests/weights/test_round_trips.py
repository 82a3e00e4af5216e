"""A → native → A: the same keys, the same bits."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_google import CASES as GOOGLE
from test_google import google_file, rewritten

import vitrail
from peer_models import (
    TIMM,
    huggingface_model,
    mark_slow,
    save_tensors,
    scramble,
    timm_folder,
    timm_model,
    torchvision_model,
)
from samples import randomise
from vitrail.weights.load import FORMATS
from vitrail.weights.save import convert_tensors, save, write_model


def tensors_of(path) -> dict[str, torch.Tensor]:
    """Read by the libraries themselves, not by us."""
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".npz":
        return {name: torch.from_numpy(array) for name, array in np.load(path).items()}
    return torch.load(path, weights_only=True)


def there_and_back(source, naming: str, folder) -> dict[str, torch.Tensor]:
    save(vitrail.load(source), folder / "native")
    write_model(vitrail.load(folder / "native"), FORMATS[naming], folder / "back")
    return tensors_of(folder / "back" / FORMATS[naming].weights_file)


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype
        assert torch.equal(first[name], second[name]), name


SLOW = ("R50+B/16", "R26+S/32", "DeiT III S", "no class token", "CLIP", "Ti/32", "DeiT-Ti")


@pytest.mark.parametrize(
    "case", mark_slow([case for case in TIMM if case not in ("S/16", "B/16", "S/32", "B/32")], SLOW)
)
def test_timm(case, tmp_path):
    folder = timm_folder(case, timm_model(case), tmp_path / "timm")
    assert_equal(tensors_of(folder / "model.safetensors"), there_and_back(folder, "timm", tmp_path))


@pytest.mark.parametrize("stem", [pytest.param(False, marks=pytest.mark.slow), True])
def test_torchvision(stem, tmp_path):
    path = save_tensors(torchvision_model(stem), tmp_path / "vit.pth")
    assert_equal(tensors_of(path), there_and_back(path, "torchvision", tmp_path))


def test_torchvision_with_its_earlier_names(tmp_path):
    state = torchvision_model(stem=True).state_dict()
    state = {name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): t for name, t in state.items()}
    torch.save(state, tmp_path / "old.pth")
    assert_equal(state, there_and_back(tmp_path / "old.pth", "torchvision", tmp_path))


HUGGINGFACE = [
    "ViT",
    "ViT without head",
    "DeiT",
    "DeiT with teacher",
    "Dinov2",
    "Dinov2 without head",
    "Dinov2 with registers",
]


@pytest.mark.parametrize("kind", HUGGINGFACE)
def test_huggingface(kind, tmp_path):
    huggingface_model(kind).save_pretrained(tmp_path / "hf")
    found = there_and_back(tmp_path / "hf", "huggingface", tmp_path)
    assert_equal(tensors_of(tmp_path / "hf" / "model.safetensors"), found)
    if kind.startswith("Dinov2"):
        assert any(name.endswith("mask_token") for name in found)  # not needed to compute, and yet not lost


@pytest.mark.parametrize("case", mark_slow(GOOGLE, ("B/32 at 64 pixels", "R26+S/32", "R50+B/16", "BiT-R50x1")))
def test_google(case, tmp_path):
    _, path = google_file(case, tmp_path)
    assert_equal(tensors_of(path), there_and_back(path, "google", tmp_path))


@pytest.mark.slow
def test_google_of_earlier_flax_with_a_prefix(tmp_path):
    _, path = google_file("R26+S/32", tmp_path)
    rewritten(path, lambda name, a: ("opt/target/" + name, a[None, None, None] if "/gn" in f"/{name}" else a))
    assert_equal(tensors_of(path), there_and_back(path, "google", tmp_path))


def test_google_with_a_tanh_layer_in_its_head(tmp_path):
    write_model(scramble(vitrail.create_model("Ti/16", depth=1, representation_size=192)), FORMATS["google"], tmp_path)
    assert_equal(tensors_of(tmp_path / "model.npz"), there_and_back(tmp_path / "model.npz", "google", tmp_path))


def test_original_release_of_dinov2(tmp_path):
    state = timm_model("S/14 with layer scale and registers").state_dict()
    state["register_tokens"] = state.pop("reg_token")
    state["pos_embed"] = torch.randn(1, 257, 384)
    state["mask_token"] = torch.randn(1, 384)
    torch.save(state, tmp_path / "dinov2.pth")
    native = vitrail.load(save(vitrail.load(tmp_path / "dinov2.pth"), tmp_path / "native"))
    assert_equal(state, convert_tensors(native, FORMATS["timm"], native.origin.dialect))


def test_google_in_bfloat16(tmp_path):
    write_model(scramble(vitrail.create_model("Ti/16", depth=1)).bfloat16(), FORMATS["google"], tmp_path)
    first, second = np.load(tmp_path / "model.npz"), tmp_path / "again"
    save(vitrail.load(tmp_path / "model.npz"), tmp_path / "native")
    write_model(vitrail.load(tmp_path / "native"), FORMATS["google"], second)
    found = np.load(second / "model.npz")
    assert {array.dtype.str for array in first.values()} == {"|V2"}
    assert first.keys() == found.keys()
    assert all(first[name].tobytes() == found[name].tobytes() for name in first)


def test_huggingface_with_tanh_gelu(tmp_path):
    huggingface_model("ViT with tanh GELU").save_pretrained(tmp_path / "hf")
    found = there_and_back(tmp_path / "hf", "huggingface", tmp_path)
    assert_equal(tensors_of(tmp_path / "hf" / "model.safetensors"), found)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["hidden_act"] == "gelu_pytorch_tanh"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types(dtype, tmp_path):
    path = save_tensors(timm_model("not square").to(dtype), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_args": {"img_size": [96, 160]}}')
    assert_equal(tensors_of(path), there_and_back(path, "timm", tmp_path))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("S/8", {"position": "learned-2d", "position_at": "every-layer", "registers": 2}),
        ("S/8", {"position": "relative", "pool": "attention", "norm": "rms"}),
        ("S/8", {"position": "sin-cos", "pool": "average", "block": "axial"}),
        ("S/8", {"conv_stem": [(8, 3, 4), (32, 3, 2, "group", "gelu")], "norm_after_pool": True}),
    ],
)
def test_native_holds_every_architecture(name, options, tmp_path):
    small = {"width": 32, "depth": 2, "mlp_dim": 48, "num_heads": 4, "image_size": (16, 24), "num_classes": 7}
    model = randomise(vitrail.create_model(name, **small, **options))
    model.labels = [f"label {i} ×" for i in range(7)]
    model.preprocessing = vitrail.Preprocessing(image_size=(16, 24), crop_fraction=0.9, resize="cover")
    again = vitrail.load(save(model, tmp_path / "model"))
    assert_equal(model.state_dict(), again.state_dict())
    assert (again.architecture, again.labels, again.preprocessing) == (
        model.architecture,
        model.labels,
        model.preprocessing,
    )
