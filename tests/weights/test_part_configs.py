"""Configs beside a larger file: a section that belongs to the loaded part is used, and nothing else."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers_models import SMALL, TEXT, Case, build

import vitrail
from peer_models import SMALL_HF, huggingface_model, images_for, scramble
from peers import transformers as t
from vitrail.weights.load import FORMATS
from vitrail.weights.save import write_model


@pytest.fixture
def model():
    """A ViT with 4 heads of 16 channels; vitrail would guess one head of 64."""
    return huggingface_model("ViT without head")


def write_larger_model(model, folder, config) -> None:
    """Write a model as the part `encoder` of a file, and a config for all of it."""
    model.save_pretrained(folder)
    tensors = {f"encoder.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({**tensors, "decoder.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("key", ["encoder", "encoder_config"])
@torch.no_grad()
def test_a_section_describes_its_part(model, key, tmp_path):
    section = {**model.config.to_dict(), "hidden_act": "gelu_pytorch_tanh"}
    write_larger_model(model, tmp_path, {"model_type": "captioner", "hidden_size": 999, key: section})
    loaded = vitrail.load(tmp_path, part="encoder")
    assert (loaded.architecture.num_heads, loaded.architecture.gelu) == (SMALL_HF["num_attention_heads"], "tanh")


@torch.no_grad()
def test_the_config_of_the_whole_says_nothing_about_a_part(model, tmp_path):
    whole = {"model_type": "captioner", "hidden_size": 999, "num_attention_heads": 2, "hidden_act": "quick_gelu"}
    write_larger_model(model, tmp_path, whole)
    loaded = vitrail.load(tmp_path, part="encoder", known={"num_heads": 4})
    batch = images_for((48, 48))
    torch.testing.assert_close(loaded.forward_features(batch), model(batch).last_hidden_state, rtol=0, atol=1e-5)
    assert any("config.json" in note and "no section for the part encoder" in note for note in loaded.origin.notes)


@pytest.mark.parametrize("part", ["clip", "clip.vision_model"])
@torch.no_grad()
def test_the_part_that_the_error_names_has_the_config_of_images(part, tmp_path):
    """As in CLIPSeg, whose file holds a whole CLIP: quick GELU and one head would be guessed without the config."""
    vision = {**SMALL, "hidden_act": "gelu", "num_attention_heads": 8}
    clip = build(Case(lambda: t.CLIPModel(t.CLIPConfig(vision_config=vision, text_config=TEXT, projection_dim=24))))
    tensors = {f"clip.{name}": tensor.contiguous() for name, tensor in clip.state_dict().items()}
    save_file({**tensors, "decoder_x.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    config = {"model_type": "clipseg", "vision_config": clip.config.vision_config.to_dict(), "text_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(vitrail.WeightsError, match="part='clip'"):
        vitrail.load(tmp_path)
    loaded = vitrail.load(tmp_path, part=part)
    assert (loaded.architecture.gelu, loaded.architecture.num_heads) == ("exact", 8)
    assert not any("was not used" in note for note in loaded.origin.notes)
    images = images_for((48, 48)).double()
    expected = clip.vision_model(images).pooler_output
    torch.testing.assert_close(loaded(images), expected, rtol=0, atol=1e-10)


def test_a_part_of_a_native_folder_is_no_model(tmp_path):
    vitrail.save(scramble(vitrail.create_model("Ti/16", image_size=32, depth=1)), tmp_path / "model")
    with pytest.raises(vitrail.WeightsError, match="blocks") as refused:
        vitrail.load(tmp_path / "model", part="encoder")
    assert "image_size" not in str(refused.value)


def test_heads_that_the_tensors_show_cannot_be_others(tmp_path):
    write_model(scramble(vitrail.create_model("Ti/16", image_size=32, depth=1)), FORMATS["google"], tmp_path)
    assert vitrail.load(tmp_path, known={"num_heads": 3}).architecture.num_heads == 3
    with pytest.raises(vitrail.WeightsError, match=r"3 attention heads.*cannot be 6"):
        vitrail.load(tmp_path, known={"num_heads": 6})
