"""The largest models at full size: names and shapes of transformers' own networks, on the meta device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from peers import transformers as t
from vitrail.model.create import build_empty_model
from vitrail.weights.files import TensorInfo
from vitrail.weights.formats.base import FolderFiles
from vitrail.weights.formats.huggingface import HuggingFaceFormat
from vitrail.weights.tensor_rules import check_complete, compute_file_shapes, match_tensors

# The network, and the number of its parameters in millions, as published.
LARGE: dict[str, tuple[Any, int]] = {
    "DINOv3 7B": (
        lambda: t.DINOv3ViTModel(
            t.DINOv3ViTConfig(hidden_size=4096, num_hidden_layers=40, num_attention_heads=32, intermediate_size=8192,
                              use_gated_mlp=True, hidden_act="silu", query_bias=False, value_bias=False,
                              num_register_tokens=4)
        ),
        6716,
    ),
    "DINOv3 H+": (
        lambda: t.DINOv3ViTModel(
            t.DINOv3ViTConfig(hidden_size=1280, num_hidden_layers=32, num_attention_heads=20, intermediate_size=5120,
                              use_gated_mlp=True, hidden_act="silu", num_register_tokens=4)
        ),
        840,
    ),
    "DINOv2 giant": (
        lambda: t.Dinov2Model(
            t.Dinov2Config(hidden_size=1536, num_hidden_layers=40, num_attention_heads=24, use_swiglu_ffn=True,
                           image_size=518, patch_size=14)
        ),
        1136,
    ),
    "SigLIP 2 so400m at 384": (
        lambda: t.SiglipVisionModel(
            t.SiglipVisionConfig(hidden_size=1152, intermediate_size=4304, num_hidden_layers=27,
                                 num_attention_heads=16, image_size=384, patch_size=14)
        ),
        428,
    ),
    "SigLIP 2 giant-opt at 384": (
        lambda: t.SiglipVisionModel(
            t.SiglipVisionConfig(hidden_size=1536, intermediate_size=6144, num_hidden_layers=40,
                                 num_attention_heads=16, image_size=384, patch_size=16)
        ),
        1163,
    ),
    "BEiT large": (
        lambda: t.BeitForImageClassification(
            t.BeitConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
                         image_size=512, use_relative_position_bias=True, num_labels=1000)
        ),
        305,
    ),
    "AIMv2 3B": (
        lambda: t.Aimv2VisionModel(
            t.Aimv2VisionConfig(hidden_size=3072, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=24,
                                image_size=448, use_head=False)
        ),
        2720,
    ),
    "I-JEPA g/16": (
        lambda: t.IJepaModel(
            t.IJepaConfig(hidden_size=1408, intermediate_size=6144, num_hidden_layers=40, num_attention_heads=16)
        ),
        1011,
    ),
}  # fmt: skip

RENAMED = {
    # What a file calls the layers that transformers 5 calls otherwise in memory.
    "layers.": "encoder.layer.",
    "model.layer.": "layer.",
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "relative_position_bias.": "attention.attention.relative_position_bias.",
}


def name_in_file(kind: str, name: str) -> str:
    """Return the name that `save_pretrained` writes (the small models of the other tests are really written)."""
    if kind.startswith("DINOv3"):
        return name.replace("model.layer.", "layer.")
    if kind.startswith(("SigLIP", "AIMv2")):
        return name
    for ours, theirs in RENAMED.items():
        if theirs not in name and not (kind.startswith("DINOv2") and ours == "layers."):
            name = name.replace(ours, theirs)
    return name


def gate_in_file(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """DINOv2 giant: one tensor for gate and value."""
    packed = {}
    for name, shape in shapes.items():
        if "mlp.up_proj" in name:
            continue
        if "mlp.gate_proj" in name:
            packed[name.replace("gate_proj", "weights_in")] = (2 * shape[0], *shape[1:])
        else:
            packed[name.replace("down_proj", "weights_out")] = shape
    return packed


@pytest.mark.parametrize("kind", LARGE)
def test_names_and_shapes_fit(kind):
    make, millions = LARGE[kind]
    with torch.device("meta"):
        network: nn.Module = make()
    shapes = {name_in_file(kind, name): tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    if kind.startswith("DINOv2"):
        shapes = gate_in_file(shapes)
    tensors = {name: TensorInfo(shape, torch.float32) for name, shape in shapes.items()}
    weight_format, files = HuggingFaceFormat(), FolderFiles(contents={"config.json": network.config.to_dict()})
    assert weight_format.recognises(tensors)
    checkpoint = weight_format.describe_checkpoint(tensors, files)
    empty = build_empty_model(checkpoint.architecture)
    rules = weight_format.list_tensor_rules(checkpoint.architecture, checkpoint.dialect)
    matches = match_tensors(empty.state_dict(), rules)
    others = [*checkpoint.unused_tensors, *checkpoint.ignored_tensors]
    check_complete(kind, tensors, compute_file_shapes(matches, empty.state_dict()), others)
    unused = sum(math.prod(tensors[name].shape) for name in checkpoint.unused_tensors)
    parameters = sum(p.numel() for p in empty.parameters())
    assert parameters == sum(p.numel() for p in network.parameters()) - unused
    assert parameters == pytest.approx(millions * 1e6, rel=0.005)
    assert weight_format.explain_refusal(checkpoint.architecture) is None
