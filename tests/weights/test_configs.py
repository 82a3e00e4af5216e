"""Configs beside weights: what people really have there, what contradicts the weights, and what is meant to harm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import vitrail
from peer_models import TIMM, huggingface_model, images_for, save_tensors, scramble, timm_folder, timm_model
from peers import timm
from samples import small_vit
from vitrail.model.variants import HYBRID
from vitrail.weights.formats.native import CHECKSUM_FILE, format_checksums


def edited(folder: Path, file: str = "config.json", **changes) -> Path:
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    for key, value in changes.items():
        inner, _, last = key.rpartition("__")
        (content[inner] if inner else content)[last] = value
    path.write_text(json.dumps(content))
    return folder


# timm's


@pytest.fixture
def timm_case(tmp_path) -> Path:
    return timm_folder("not square", timm_model("not square"), tmp_path / "timm")


def test_timm_labels_and_licence(timm_case):
    names = [f"bird {i}" for i in range(1000)]
    loaded = vitrail.load(edited(timm_case, label_names=names, pretrained_cfg__license="cc-by-nc-4.0"))
    assert loaded.labels == tuple(names)
    assert loaded.origin.licence == "cc-by-nc-4.0"


def test_an_older_timm_config_has_everything_at_the_top(timm_case):
    config = json.loads((timm_case / "config.json").read_text())
    flat = {"architecture": config["architecture"], **config["pretrained_cfg"], "mean": [0.1, 0.2, 0.3]}
    flat["input_size"] = [3, 96, 160]
    (timm_case / "config.json").write_text(json.dumps(flat))
    loaded = vitrail.load(timm_case)
    assert loaded.preprocessing.mean == (0.1, 0.2, 0.3)
    assert loaded.image_size == (96, 160)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_classes": 999}, "num_classes = 999, .* 1000"),
        ({"model_args": {"depth": 4}}, "depth = 4, .* 3"),
        ({"model_args": {"embed_dim": 64}}, "embed_dim = 64, .* 192"),
        ({"global_pool": "avgmax"}, "'avgmax'"),
        ({"model_args": {"pool_include_prefix": True}}, "pooling includes"),
        ({"model_args": {"num_heads": 7}}, "num_heads"),
        ({"model_args": {"num_heads": "many"}}, "num_heads = 'many'"),
        ({"pretrained_cfg": []}, "config.json"),
        ({"model_args": {"use_rot_pos_emb": True, "rope_type": "mrope"}}, "rotary positions 'mrope'"),
        ({"model_args": {"use_rot_pos_emb": True, "rope_rotate_half": True}}, "another order"),
        ({"model_args": {"act_layer": "relu"}}, "'relu'"),
        ({"pretrained_cfg__std": [0.5, 0.0, 0.5]}, "std.1"),
        ({"pretrained_cfg__mean": [float("nan")] * 3}, "mean.0"),
    ],
)
def test_timm_configs_that_cannot_be(changes, sentence, timm_case):
    if "model_args" in changes:
        changes = {"model_args": {"img_size": [96, 160], **changes["model_args"]}}
    if changes.get("pretrained_cfg") == []:
        changes |= {"mean": "grey"}
    with pytest.raises(vitrail.WeightsError, match=sentence) as caught:
        vitrail.load(edited(timm_case, **changes))
    assert "\n" not in str(caught.value)


def test_what_is_replaced_is_said(timm_case, caplog):
    changed = {"pretrained_cfg__crop_mode": "border", "pretrained_cfg__interpolation": "lanczos"}
    loaded = vitrail.load(edited(timm_case, **changed, pretrained_cfg__crop_pct=1.15))
    assert (loaded.preprocessing.crop_fraction, loaded.preprocessing.interpolation) == (1.0, "bicubic")
    for said in ("'border'", "'lanczos'", "1.15"):
        assert any(said in note for note in loaded.origin.notes)
        assert said in caplog.text


def test_a_model_without_positions_needs_a_config_that_says_so(tmp_path):
    """For rotary positions leave no trace in the weights."""
    model = scramble(timm.create_model("vit_tiny_patch16_224", depth=1, pos_embed="none", num_classes=5))
    path = save_tensors(model, tmp_path / "model.safetensors")
    with pytest.raises(vitrail.WeightsError, match="rotary"):
        vitrail.load(path)
    config = {"model_args": {"pos_embed": "none", "img_size": 224}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = vitrail.load(path)
    assert loaded.architecture.position == "none"
    torch.testing.assert_close(loaded(images_for((224, 224))), model(images_for((224, 224))), rtol=0, atol=1e-5)


def test_a_config_among_several_weights_is_not_used(tmp_path):
    folder = timm_folder("Ti/16", timm_model("Ti/16"), tmp_path / "timm")
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    save_tensors(timm_model("DeiT-Ti"), folder / "two.safetensors")
    loaded = vitrail.load(folder / "one.safetensors")
    assert any("config.json" in note for note in loaded.origin.notes)


# Hugging Face's


@pytest.fixture
def huggingface(tmp_path) -> Path:
    huggingface_model("ViT").save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_nulls_numbers_and_lists(huggingface):
    edited(huggingface, image_size=[48, 48], torch_dtype=None, num_labels=None, hidden_act=None, id2label=None)
    edited(huggingface, "preprocessor_config.json", image_mean=0.25, image_std=[0.5] * 3, size=48, resample=None)
    loaded = vitrail.load(huggingface)
    assert loaded.preprocessing.mean == (0.25, 0.25, 0.25)
    assert (loaded.labels, loaded.architecture.gelu) == (None, "exact")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": 32}, "hidden_size = 32, .* 64"),
        ({"num_hidden_layers": 12}, "num_hidden_layers = 12, .* 3"),
        ({"intermediate_size": 1}, "intermediate_size = 1, .* 96"),
        ({"num_attention_heads": 5}, "num_heads"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"layer_norm_eps": -1}, "norm_eps"),
    ],
)
def test_huggingface_configs_that_cannot_be(changes, sentence, huggingface):
    with pytest.raises(vitrail.WeightsError, match=sentence):
        vitrail.load(edited(huggingface, **changes))


def test_a_transformers_model_of_another_kind_is_named(tmp_path):
    save_file({"swin.embeddings.norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    edited(tmp_path, model_type="swin")
    with pytest.raises(vitrail.WeightsError, match=r"'swin'.*dinov2"):
        vitrail.load(tmp_path)


# Our own, with hashes that fit


ONE_PIXEL_PATCHES = {"architecture__patch_size": 1, "architecture__image_size": [32, 32]}
"""Of a feature map; the size fits, so that nothing but the backbone is wrong."""


def hostile(folder: Path, **changes) -> Path:
    edited(folder, **changes)
    (folder / CHECKSUM_FILE).write_text(format_checksums(folder))
    return folder


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "changes",
    [
        {"architecture__depth": 10**9},
        {"architecture__width": 10**12},
        {"architecture__image_size": [10**9, 10**9]},
        {"architecture__image_size": [8 * 10**6, 8], "architecture__position": "sin-cos"},
        {"architecture__registers": 10**12},
        {"architecture__num_classes": 10**15},
        {"architecture__num_heads": 0},
        {"architecture__layer_scale": "x"},
        {"architecture__norm_eps": 1e999},
        {"architecture": {"backbone": {"blocks": [10**8] * 4}, "image_size": 64, "num_classes": 1}, "family": "resnet"},
        {"architecture__backbone": {**HYBRID, "blocks": [10**6] * 3}, **ONE_PIXEL_PATCHES},
        {"architecture__backbone": {**HYBRID, "blocks": [1] * 10**5}, **ONE_PIXEL_PATCHES},
        {
            "architecture__backbone": {**HYBRID, "blocks": [1], "width_factor": 10**6, "stage_channels": 2**20},
            **ONE_PIXEL_PATCHES,
        },
        {"architecture__backbone": {**HYBRID, "blocks": [1], "root": "none"}, **ONE_PIXEL_PATCHES},
        {"family": "unknown"},
        {"version": 10**6},
        {"labels": ["only one"]},
        {"labels": {"a": 1}},
        {"origin": {"source": 3}},
        {"origin": []},
        {"preprocessing": {"image_size": 32, "mean": []}},
    ],
)
def test_a_hostile_config_with_fitting_hashes(changes, tmp_path):
    folder = hostile(vitrail.save(small_vit(), tmp_path / "model"), **changes)
    with pytest.raises(vitrail.WeightsError) as caught:
        vitrail.load(folder)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


# Shapes


@pytest.mark.parametrize("name", sorted(timm.create_model(TIMM["Ti/16"][0], depth=1).state_dict()))
@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (1, 1, 1, 1, 1)])
def test_any_tensor_of_any_other_shape_is_an_error(name, shape, tmp_path):
    tensors = timm.create_model(TIMM["Ti/16"][0], depth=1).state_dict()
    save_file({**tensors, name: torch.zeros(shape)}, tmp_path / "model.safetensors")
    with pytest.raises(vitrail.WeightsError, match=name.replace(".", r"\.")):
        vitrail.load(tmp_path)


def test_names_that_share_memory_do_not_share_it_here(tmp_path):
    state = timm_model("Ti/16").state_dict()
    state["blocks.1.norm1.weight"] = state["blocks.0.norm1.weight"]
    torch.save(state, tmp_path / "model.pth")
    loaded = vitrail.load(tmp_path / "model.pth")
    with torch.no_grad():
        loaded.encoder.blocks[0].norm1.weight.zero_()
    assert loaded.encoder.blocks[1].norm1.weight.abs().min() > 0
