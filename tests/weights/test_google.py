"""The authors' npz files: written here, read by timm's own loader and by ours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import vitrail
from peer_models import images_for, mark_slow, scramble
from peers import timm
from vitrail.weights.load import FORMATS
from vitrail.weights.save import write_model

CASES = {
    "Ti/16": ("vit_tiny_patch16_224", {"num_classes": 10}, 0.05),
    "B/32 at 64 pixels": ("vit_base_patch32_224", {"num_classes": 10, "image_size": 64, "depth": 3}, 0.05),
    "R26+S/32": ("vit_small_r26_s32_224", {"num_classes": 10}, 1.0),
    "R50+B/16": ("vit_base_r50_s16_224", {"num_classes": 10, "depth": 3}, 1.0),
    "BiT-R50x1": ("resnetv2_50x1_bit", {"num_classes": 10}, 1.0),
}


def google_file(case: str, folder) -> tuple:
    name = case.split()[0]
    _, options, convolutions = CASES[case]
    model = vitrail.create_model(name, **options)
    scramble(model, 0.02 if convolutions == 1.0 else 0.05)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                # Only their direction counts, but eps is added to their size: at this size it does not matter that
                # timm adds another one.
                module.weight.mul_(convolutions / 0.02)
    write_model(model, FORMATS["google"], folder)
    return model, folder / "model.npz"


@pytest.mark.parametrize("case", mark_slow(CASES, [case for case in CASES if case != "Ti/16"]))
@torch.no_grad()
def test_timms_own_loader_and_ours_agree(case, tmp_path):
    model, path = google_file(case, tmp_path)
    name, options, _ = CASES[case]
    known = {"img_size": options["image_size"]} if "image_size" in options else {}
    known |= {"depth": options["depth"]} if "depth" in options else {}
    if "BiT" not in case:
        known["act_layer"] = "gelu_tanh"
    peer = timm.create_model(name, num_classes=10, **known).eval()
    peer.load_pretrained(str(path))
    loaded = vitrail.load(path)
    batch = images_for((224, 224) if "BiT" in case else loaded.image_size)
    theirs, ours = peer(batch), loaded(batch)
    assert theirs.std() >= 0.1
    # A hybrid's float32 rounding on one thread is 2.04e-5 of the deviation.
    assert (theirs - ours).abs().max() <= 5e-5 * theirs.std()
    assert torch.equal(ours, model.eval()(batch))


def test_what_an_npz_tells(tmp_path):
    model, path = google_file("R50+B/16", tmp_path)
    loaded = vitrail.load(path)
    assert loaded.architecture == model.architecture.model_copy(update={"position_resize": "bilinear-corners"})
    assert loaded.architecture.gelu == "tanh"
    assert loaded.preprocessing == vitrail.Preprocessing(image_size=224)
    assert loaded.origin.notes == ()


def rewritten(path, change) -> None:
    arrays = dict(np.load(path))
    np.savez(path, **dict(change(name, array) for name, array in arrays.items()))


@pytest.mark.parametrize("prefix", ["opt/target/", "params/"])
def test_prefixes_of_training_states(prefix, tmp_path):
    model, path = google_file("Ti/16", tmp_path)
    rewritten(path, lambda name, array: (prefix + name, array))
    loaded = vitrail.load(path)
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    )


@pytest.mark.slow
def test_group_norms_of_earlier_flax(tmp_path):
    model, path = google_file("R26+S/32", tmp_path)
    rewritten(path, lambda name, array: (name, array[None, None, None] if "/gn" in f"/{name}" else array))
    loaded = vitrail.load(path)
    assert loaded.origin.dialect == "|4d"
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    )


def test_big_vision_with_attention_pooling_and_bfloat16(tmp_path):
    options = {"depth": 2, "num_classes": 10, "pool": "attention", "position_prefix": "none"}
    model = scramble(vitrail.create_model("Ti/16", **options))
    write_model(model, FORMATS["google"], tmp_path)
    path = tmp_path / "model.npz"
    assert "MAPHead_0/probe" in np.load(path)
    assert "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel" in np.load(path)
    assert torch.equal(vitrail.load(path)(images_for((224, 224))), model(images_for((224, 224))))

    def halved(name, array):
        return name, torch.from_numpy(array).bfloat16().view(torch.int16).numpy().view("V2")

    rewritten(path, halved)
    loaded = vitrail.load(path)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.pool.q.weight, model.pool.q.weight.bfloat16())


def test_exact_gelu_has_no_place_there():
    model = vitrail.create_model("Ti/16", gelu="exact", device="meta")
    with pytest.raises(vitrail.WeightsError, match=r"tanh.*exact"):
        write_model(model, FORMATS["google"], None)
