"""Loaded checkpoints compute what their libraries compute at other image sizes too: positions are resized alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import scipy.ndimage
import torch
from torch.nn import functional as F

import vitrail
from peer_models import huggingface_model, images_for, save_tensors, scramble
from peers import timm, torchvision

TOLERANCE = 1e-10
SIZES = [(48, 48), (64, 64), (32, 32), (40, 72)]
"""The table's own, a larger, a smaller and one that is not square; patches are 8 pixels wide."""


@contextlib.contextmanager
def exact_interpolation() -> Iterator[None]:
    """transformers' two DINOv2 and timm round the table to float32 before they interpolate it.

    The tables here are float32 numbers, so that is no rounding; with this, the interpolation itself is in float64. It
    is for a forward pass alone: a library that is imported meanwhile would keep the changed function.
    """
    plain = F.interpolate
    with mock.patch.object(F, "interpolate", lambda table, *a, **k: plain(table.double(), *a, **k)):
        yield


def batch_for(size: tuple[int, int]) -> torch.Tensor:
    return images_for(size).double()


def assert_equal(theirs: torch.Tensor, ours: torch.Tensor, least: float = 0.05) -> None:
    assert theirs.dtype == ours.dtype == torch.float64
    assert theirs.std() > least
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


HUGGINGFACE = {
    "ViT": "bicubic",
    "DeiT": "bicubic",
    "Dinov2": "bicubic",
    "Dinov2 with registers": "bicubic-antialias",  # as its code says, unlike the one without
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", HUGGINGFACE)
@torch.no_grad()
def test_transformers(kind, size, tmp_path):
    model = huggingface_model(kind).double()
    model.save_pretrained(tmp_path)
    loaded = vitrail.load(tmp_path)
    assert loaded.architecture.position_resize == HUGGINGFACE[kind]
    more = {} if "Dinov2" in kind else {"interpolate_pos_encoding": True}
    with exact_interpolation():
        theirs = model(batch_for(size), **more).logits
    assert_equal(theirs, loaded(batch_for(size)))


@torch.no_grad()
def test_another_way_is_another_model_at_another_size(tmp_path):
    """So the comparison above can fail, and the caller may choose the way."""
    model = huggingface_model("Dinov2").double()
    model.save_pretrained(tmp_path)
    other = vitrail.load(tmp_path, known={"position_resize": "bicubic-antialias"})
    assert any("position_resize" in note for note in other.origin.notes)
    small, own = batch_for((24, 24)), batch_for((48, 48))
    assert (model(small).logits - other(small)).abs().max() > 1e-4
    assert_equal(model(own).logits, other(own))


def small_timm(name: str = "vit_tiny_patch16_224", **options):
    options = {"img_size": 48, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, **options}
    return scramble(timm.create_model(name, **options, num_classes=10)).double()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{}, {"reg_tokens": 4, "no_embed_class": True}])
@torch.no_grad()
def test_timm(size, options, tmp_path):
    model = small_timm(dynamic_img_size=True, **options)
    loaded = vitrail.load(save_tensors(model, tmp_path / "vit.safetensors"), num_heads=4)
    assert loaded.architecture.position_resize == "bicubic-antialias"
    with exact_interpolation():
        theirs = model(batch_for(size))
    assert_equal(theirs, loaded(batch_for(size)))


@pytest.mark.parametrize("size", [48, 64, 32])
@torch.no_grad()
def test_torchvision(size, tmp_path):
    """torchvision interpolates when weights are loaded, to square sizes alone."""
    arguments = {"patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 96, "num_classes": 10}
    kind = torchvision.models.VisionTransformer
    model = scramble(kind(image_size=48, **arguments)).double()
    loaded = vitrail.load(save_tensors(model, tmp_path / "vit.pth"), num_heads=4)
    assert loaded.architecture.position_resize == "bicubic-corners"
    resized = kind(image_size=size, **arguments).double().eval()
    resize = torchvision.models.vision_transformer.interpolate_embeddings
    resized.load_state_dict(resize(size, 8, {name: tensor.clone() for name, tensor in model.state_dict().items()}))
    assert_equal(resized(batch_for((size, size))), loaded(batch_for((size, size))))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("registers", [0, 4])
@torch.no_grad()
def test_metas_own_files_of_dinov2(registers, size, tmp_path):
    """With the table that Meta's code would make: a scale factor and no antialias, or with registers the opposite."""
    model = small_timm(init_values=1.0)
    theirs = {**model.state_dict(), "mask_token": torch.zeros(1, 64, dtype=torch.float64)}
    if registers:
        theirs["register_tokens"] = torch.randn(1, registers, 64, dtype=torch.float64) * 0.1
    theirs = {name: tensor for name, tensor in theirs.items() if not name.startswith("head")}
    torch.save(theirs, tmp_path / "dinov2.pth")
    loaded = vitrail.load(tmp_path / "dinov2.pth", num_heads=4)
    way = "bicubic-antialias" if registers else "bicubic-offset"
    assert loaded.architecture.position_resize == way

    grid = (size[0] // 8, size[1] // 8)
    table = theirs["pos_embed"]
    if grid != (6, 6):
        plane = table[:, 1:].reshape(1, 6, 6, 64).permute(0, 3, 1, 2)
        how = {"size": grid, "antialias": True} if registers else {"scale_factor": tuple((n + 0.1) / 6 for n in grid)}
        plane = F.interpolate(plane, mode="bicubic", **how).permute(0, 2, 3, 1).reshape(1, -1, 64)
        table = torch.cat([table[:, :1], plane], dim=1)
    if registers:
        assert_equal(table[0], loaded.position_embedding[0](grid), least=0.01)
        return
    peer = small_timm(init_values=1.0, img_size=size)
    peer.load_state_dict({**model.state_dict(), "pos_embed": table})
    assert_equal(peer.forward_features(batch_for(size)), loaded.forward_features(batch_for(size)))


@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_googles_files(size, tmp_path):
    sizes = {"image_size": 48, "patch_size": 8, "width": 64, "depth": 1, "num_heads": 4, "mlp_dim": 96}
    model = scramble(vitrail.create_model("Ti/16", **sizes, num_classes=10, seed=0)).double()
    vitrail.convert(model, tmp_path / "google", "google")
    (tmp_path / "google" / "vitrail.json").unlink()
    path = tmp_path / "google" / "model.npz"
    loaded = vitrail.load(path)
    assert loaded.architecture.position_resize == "bilinear-corners"
    assert (loaded.preprocessing.interpolation, loaded.preprocessing.resize) == ("bilinear", "squash")
    table = np.load(path)["Transformer/posembed_input/pos_embedding"][0]
    grid = (size[0] // 8, size[1] // 8)
    zoomed = scipy.ndimage.zoom(table[1:].reshape(6, 6, -1), (grid[0] / 6, grid[1] / 6, 1), order=1)
    expected = torch.from_numpy(np.concatenate([table[:1], zoomed.reshape(-1, 64)]))
    assert_equal(expected, loaded.position_embedding[0](grid), least=0.01)
    loaded.resize(size)
    assert_equal(expected, loaded.position_embedding[0].table.detach(), least=0.01)


def test_the_way_is_stored_and_an_old_folder_keeps_the_old_way(tmp_path):
    model = huggingface_model("ViT")
    model.save_pretrained(tmp_path / "hf")
    loaded = vitrail.load(tmp_path / "hf")
    vitrail.save(loaded, tmp_path / "native")
    assert vitrail.load(tmp_path / "native").architecture == loaded.architecture
    config = vitrail.weights.formats.native.describe_config(loaded.architecture, loaded.preprocessing, None, None)
    del config["architecture"]["position_resize"]
    old = vitrail.weights.load.build_from_config(config)
    assert old.architecture.position_resize == "bicubic-antialias"


@pytest.mark.parametrize(("to", "way"), [("timm", "bicubic-antialias"), ("native", None)])
def test_a_conversion_notes_another_way(to, way, tmp_path):
    model = huggingface_model("ViT")
    model.save_pretrained(tmp_path / "hf")
    result = vitrail.convert(tmp_path / "hf", tmp_path / to, to)
    notes = [note for note in result.notes if "bicubic" in note]
    assert len(notes) == (way is not None)
    assert all(way in note and note in (tmp_path / to / "README.md").read_text() for note in notes)
    assert vitrail.load(tmp_path / to).architecture.position_resize == (way or "bicubic")
