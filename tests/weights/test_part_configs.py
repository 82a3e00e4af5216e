"""Configs beside a larger file: a section that belongs to the loaded part is used, and nothing else."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitrail
from peer_models import SMALL_HF, huggingface_model, images_for, scramble
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
    assert any("config.json" in note for note in loaded.origin.notes)


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
