"""open_clip_config.json: what it says is done, and what vitrail cannot do is refused with the name of the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_authors_files import clip

import vitrail
from peer_models import images_for
from vitrail.weights.load import FORMATS
from vitrail.weights.save import write_model


def write_tower(folder: Path, vision: dict[str, Any] | None = None, **preprocessing: Any) -> Path:
    """Write a tower with one head of 64 channels and a config with these keys."""
    _, state = clip("gelu")
    torch.save(state, folder / "open_clip_pytorch_model.bin")
    sizes = {"image_size": 48, "layers": 3, "width": 64, "patch_size": 8, "head_width": 64}
    config = {"model_cfg": {"vision_cfg": {**sizes, **(vision or {})}}, "preprocess_cfg": preprocessing}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("resize_mode", "interpolation", "expected"),
    [
        ("squash", "bilinear", ("squash", "bilinear")),
        ("shortest", "bicubic", ("cover", "bicubic")),
        ("squash", "random", ("squash", "bicubic")),
        ("longest", "bicubic", ("cover", "bicubic")),
    ],
)
def test_the_resize_is_the_configs(resize_mode, interpolation, expected, tmp_path):
    model = vitrail.load(write_tower(tmp_path, resize_mode=resize_mode, interpolation=interpolation, mean=0.5))
    assert (model.preprocessing.resize, model.preprocessing.interpolation) == expected
    assert model.preprocessing.mean == (0.5, 0.5, 0.5)
    assert any("shorter side" in note for note in model.origin.notes) == (resize_mode == "longest")


@pytest.mark.parametrize("after", [False, True])
@torch.no_grad()
def test_average_pooling(after, tmp_path):
    """OpenCLIP averages the patches, without the class token, before or after `ln_post`."""
    model = vitrail.load(write_tower(tmp_path, {"pool_type": "avg", "final_ln_after_pool": after}))
    plain = vitrail.load(write_tower(tmp_path))
    images = images_for((48, 48)).double()
    tokens = plain.forward_features(images)[:, 1:]  # no norm has seen them
    norm = plain.pool_norm
    expected = norm(tokens.mean(dim=1)) if after else norm(tokens).mean(dim=1)
    torch.testing.assert_close(model.embed(images), expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_one_token_is_normed_before_or_after_pooling(tmp_path):
    images = images_for((48, 48)).double()
    before = vitrail.load(write_tower(tmp_path)).embed(images)
    assert torch.equal(vitrail.load(write_tower(tmp_path, {"final_ln_after_pool": True})).embed(images), before)


OPTIONS = {
    "average": {"pool_type": "avg"},
    "average, then norm": {"pool_type": "avg", "final_ln_after_pool": True},
    "tanh": {"act_kwargs": {"approximate": "tanh"}},
    "eps": {"norm_kwargs": {"eps": 1e-6}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_read_and_written_back(name, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    model = vitrail.load(write_tower(folder, OPTIONS[name], resize_mode="squash"))
    a = model.architecture
    assert (a.gelu, a.norm_eps) == ("tanh" if name == "tanh" else "exact", 1e-6 if name == "eps" else 1e-5)
    write_model(model, FORMATS["openclip"], tmp_path / "back")
    written = json.loads((tmp_path / "back" / "open_clip_config.json").read_text())
    assert OPTIONS[name].items() <= written["model_cfg"]["vision_cfg"].items()
    assert written["preprocess_cfg"]["resize_mode"] == "squash"
    (tmp_path / "back" / "vitrail.json").unlink()  # OpenCLIP's own file says all of it
    again = vitrail.load(tmp_path / "back")
    assert (again.architecture, again.preprocessing) == (a, model.preprocessing)


@pytest.mark.parametrize(
    ("vision", "named"),
    [
        ({"global_average_pool": True}, "global_average_pool"),
        ({"attentional_pool": True}, "attentional_pool"),
        ({"pool_type": "none"}, "pool_type"),
        ({"no_ln_pre": True}, "no_ln_pre"),
        ({"pos_embed_type": "sin_cos_2d"}, "pos_embed_type"),
        ({"qk_norm": True}, "qk_norm"),
        ({"act_kwargs": {"inplace": True}}, "act_kwargs"),
        ({"norm_kwargs": {"elementwise_affine": False}}, "norm_kwargs"),
        ({"norm_kwargs": {"eps": 0}}, "norm_kwargs"),
        ({"width": 128}, "width"),
        ({"layers": 4}, "layers"),
        ({"head_width": 0}, "head_width"),
    ],
)
def test_a_refusal_names_the_key(vision, named, tmp_path):
    with pytest.raises(vitrail.WeightsError, match=named):
        vitrail.load(write_tower(tmp_path, vision))


@pytest.mark.parametrize("wrong", [{"resize_mode": "stretch"}, {"interpolation": "nearest"}])
def test_unknown_ways_to_resize(wrong, tmp_path):
    with pytest.raises(vitrail.WeightsError, match=next(iter(wrong))):
        vitrail.load(write_tower(tmp_path, **wrong))


def test_values_that_are_the_defaults_change_nothing(tmp_path):
    plain = vitrail.load(write_tower(tmp_path)).architecture
    defaults = {"global_average_pool": False, "pool_type": "tok", "act_kwargs": None, "norm_kwargs": {}}
    assert vitrail.load(write_tower(tmp_path, {**defaults, "timm_model_name": None})).architecture == plain
