"""Files with tensors and configs that no library writes: an error in a sentence, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers_models import CLASSIFIERS, ENCODERS, Case, build

import vitrail
from vitrail.weights.formats.timm_names import find_facts

BEIT_TABLE = "relative_position_bias.relative_position_bias_table"


def write(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """Write a model of transformers and return its tensors."""
    build(case).float().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (ENCODERS["DINOv3"], "embeddings.register_tokens"),
        (ENCODERS["BEiT"], f"encoder.layer.0.attention.attention.{BEIT_TABLE}"),
        (ENCODERS["BEiT with a shared table"], f"encoder.{BEIT_TABLE}"),
        (CLASSIFIERS["ViT"], "classifier.weight"),
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,)])
def test_tensors_without_the_axes_they_need(case, name, shape, tmp_path):
    state = write(case, tmp_path)
    (found,) = [key for key in state if key.endswith(name)]
    save_file({**state, found: torch.zeros(shape)}, tmp_path / "model.safetensors")
    with pytest.raises(vitrail.WeightsError, match=name):
        vitrail.load(tmp_path)


@pytest.mark.parametrize("channels", [0, -5, 10**30, 7])
def test_channels_that_cannot_be(channels, tmp_path):
    write(ENCODERS["SigLIP 2 NaFlex"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_channels": channels}))
    with pytest.raises(vitrail.WeightsError, match="channels"):
        vitrail.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["vit_pe_core_patch0_0", "vit_pe_core_patch0_224", f"vit_pe_core_patch16_{'9' * 5000}"]
)
def test_names_with_sizes_that_cannot_be(name):
    assert "ref_feat_shape" not in find_facts(name)
