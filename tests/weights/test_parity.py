"""Checkpoints of other libraries, loaded here, compute what those libraries compute."""

from __future__ import annotations

import pytest
import torch

import vitrail
from peer_models import (
    TIMM,
    huggingface_model,
    images_for,
    mark_slow,
    save_tensors,
    timm_folder,
    timm_model,
    torchvision_model,
)

TOLERANCE = 2e-5


def assert_same(theirs: torch.Tensor, ours: torch.Tensor, least: float = 0.1) -> None:
    assert theirs.shape == ours.shape
    assert theirs.std() >= least
    assert (theirs - ours).abs().max() <= TOLERANCE * theirs.std()


SLOW = ("S/16", "B/16", "S/32", "B/32", "R50+B/16", "R26+S/32", "DeiT III S", "CLIP", "no class token")


@pytest.mark.parametrize("case", mark_slow(TIMM, SLOW))
@torch.no_grad()
def test_timm(case, tmp_path):
    model = timm_model(case)
    loaded = vitrail.load(timm_folder(case, model, tmp_path))
    batch = images_for((224, 224) if case == "BiT-R50x1" else loaded.image_size, channels=loaded.in_channels)
    assert_same(model(batch), loaded(batch))
    statistics = torch.tensor(model.pretrained_cfg["mean"])
    expected = statistics if loaded.in_channels == 3 else statistics.mean()[None]
    torch.testing.assert_close(torch.tensor(loaded.preprocessing.mean), expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["R50+B/16", "R26+S/32", "BiT-R50x1"])
@torch.no_grad()
def test_convolutional_models_are_the_same_function(case, tmp_path):
    """In float64, where rounding has no say."""
    model = timm_model(case).double()
    loaded = vitrail.load(save_tensors(model, tmp_path / "model.safetensors"))
    batch = images_for((224, 224), batch=1).double()
    torch.testing.assert_close(loaded(batch), model(batch), rtol=0, atol=1e-10)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".bin"])
@torch.no_grad()
def test_files_alone_and_their_names_do_not_matter(suffix, tmp_path):
    model = timm_model("DeiT-Ti")
    path = save_tensors(model, tmp_path / f"some{suffix}").rename(tmp_path / "no suffix at all")
    loaded = vitrail.load(path)
    assert_same(model(images_for((224, 224))), loaded(images_for((224, 224))))
    assert "3 attention heads, as in every Ti" in loaded.origin.notes[0]


@pytest.mark.parametrize("stem", [pytest.param(False, marks=pytest.mark.slow), True])
@torch.no_grad()
def test_torchvision(stem, tmp_path):
    model = torchvision_model(stem)
    loaded = vitrail.load(save_tensors(model, tmp_path / "vit.pth"))
    batch = images_for(loaded.image_size)
    assert_same(model(batch), loaded(batch))
    assert loaded.preprocessing.mean == (0.485, 0.456, 0.406)
    assert loaded.preprocessing.crop_fraction == 0.875


@pytest.mark.parametrize(
    "kind", ["ViT", "ViT with tanh GELU", "DeiT", "DeiT with teacher", "Dinov2", "Dinov2 with registers"]
)
@torch.no_grad()
def test_huggingface_classifiers(kind, tmp_path):
    model = huggingface_model(kind)
    model.save_pretrained(tmp_path)
    loaded = vitrail.load(tmp_path)
    batch = images_for((48, 48))
    assert_same(model(batch).logits, loaded(batch))
    assert loaded.labels == tuple(f"class {i}" for i in range(10))


@torch.no_grad()
def test_huggingface_bare_models(tmp_path):
    batch = images_for((48, 48))
    vit = huggingface_model("ViT without head")
    vit.save_pretrained(tmp_path / "vit")
    loaded = vitrail.load(tmp_path / "vit")
    assert_same(vit(batch).last_hidden_state, loaded.forward_features(batch))
    assert_same(vit(batch).pooler_output, loaded(batch))

    dino = huggingface_model("Dinov2 without head")
    dino.save_pretrained(tmp_path / "dino")
    loaded = vitrail.load(tmp_path / "dino")
    assert_same(dino(batch).last_hidden_state, loaded.forward_features(batch))
    assert_same(dino(batch).pooler_output, loaded(batch))


@torch.no_grad()
def test_huggingface_mae_encoder(tmp_path):
    model = huggingface_model("ViTMAE")
    model.save_pretrained(tmp_path)
    loaded = vitrail.load(tmp_path)
    batch = images_for((48, 48))
    order = torch.arange(36).expand(2, -1).float()  # no patch is masked; this keeps their order
    assert_same(model.vit(batch, noise=order).last_hidden_state, loaded.forward_features(batch))
    assert any("left out" in note for note in loaded.origin.notes)
    assert loaded.preprocessing.mean == (0.485, 0.456, 0.406)


@pytest.mark.slow
@torch.no_grad()
def test_original_releases_of_dinov2_deit3_and_training_programs(tmp_path):
    """The same numbers under the names that their authors used."""
    model = timm_model("DeiT III S")
    theirs = {
        name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): tensor
        for name, tensor in model.state_dict().items()
    }
    torch.save({"model": theirs, "epoch": 3}, tmp_path / "deit3.pth")
    loaded = vitrail.load(tmp_path / "deit3.pth")
    batch = images_for(loaded.image_size)
    assert_same(model(batch), loaded(batch))
    assert loaded.preprocessing.mean == (0.485, 0.456, 0.406)

    model = timm_model("S/14 with layer scale and registers")
    state = model.state_dict()
    # In DINOv2's release the class token has a position of its own; timm has added it to the token.
    position = torch.randn(1, 1, 384) * 0.05
    theirs = {**state, "register_tokens": state["reg_token"], "cls_token": state["cls_token"] - position}
    theirs["pos_embed"] = torch.cat([position, state["pos_embed"]], dim=1)
    theirs["mask_token"] = torch.randn(1, 384)
    del theirs["reg_token"]
    torch.save({f"module.{name}": tensor for name, tensor in theirs.items()}, tmp_path / "dinov2.pth")
    loaded = vitrail.load(tmp_path / "dinov2.pth")
    assert_same(model(images_for((224, 224))), loaded(images_for((224, 224))))
    assert loaded.architecture.position_prefix == "class"
    assert list(loaded.unused_tensors) == ["module.mask_token"]


def test_head_and_size_can_be_changed_on_the_way(tmp_path):
    model = timm_model("Ti/16")
    path = save_tensors(model, tmp_path / "vit.safetensors")
    loaded = vitrail.load(path, num_classes=3, image_size=(160, 96), dtype=torch.float64)
    assert (loaded(images_for((160, 96)).double()) == 0).all()
    assert (loaded.image_size, loaded.preprocessing.image_size, loaded.grid) == ((160, 96), (160, 96), (10, 6))
    assert not loaded.training
    assert all(p.requires_grad for p in loaded.parameters())


def test_a_half_precision_file_stays_half_precision(tmp_path):
    path = save_tensors(timm_model("Ti/16").to(torch.bfloat16), tmp_path / "vit.safetensors")
    assert {p.dtype for p in vitrail.load(path).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in vitrail.load(path, dtype=torch.float32).parameters()} == {torch.float32}
