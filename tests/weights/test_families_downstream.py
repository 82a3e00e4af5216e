"""Encoders out of transformers' folders and timm's are looked into, computed fast, and exported at any size."""

from __future__ import annotations

import pytest
import torch
from transformers_models import ENCODERS, build

import vitrail
from peers import timm
from samples import images, randomise
from vitrail.exporting.export import export
from vitrail.exporting.onnx import open_onnx
from vitrail.fast.cpu.embedders import create_cpu_embedder
from vitrail.inspection.findings import Absent
from vitrail.inspection.images import InspectionImages
from vitrail.inspection.inspect_model import inspect_model
from vitrail.model.vit import VisionTransformer

SIZES = [(48, 48), (32, 32), (64, 64), (40, 64), (56, 24)]
QUICK = ("DINOv2 with registers", "DINOv3", "SigLIP", "BEiT")
EXPORTED = ("DINOv2", "DINOv2 with registers", "DINOv3", "DINOv3 7B", "SigLIP", "SigLIP 2 NaFlex", "BEiT", "AIMv2")
TIMM = (
    "vit_small_patch14_reg4_dinov2",
    "vit_small_patch16_dinov3",
    "eva02_tiny_patch14_224",
    "beit_base_patch16_224",
    "vit_pe_core_tiny_patch16_384",
    "vit_base_patch16_siglip_224",
    "vit_small_patch16_rope_mixed_224",
)


def load(kind: str, folder) -> VisionTransformer:
    build(ENCODERS[kind]).float().save_pretrained(folder)
    model = vitrail.load(folder)
    assert isinstance(model, VisionTransformer)
    return model


def check_all_is_found(model: VisionTransformer) -> None:
    size = model.preprocessing.image_size
    pixels = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for _ in range(4)]
    picked = InspectionImages([(str(number), each) for number, each in enumerate(pixels)], pixels, "four", "four", ())
    found = inspect_model(model, "it", picked)
    for part in (found.attention, found.components, found.tokens, found.layers, found.distance, found.filters):
        assert not isinstance(part, Absent), part
    assert found.components.values.shape == (4, *model.grid, 3)
    batch = images(2, size)
    with torch.no_grad():
        exact = model.embed(batch)
        assert (create_cpu_embedder(model, "fp32")(batch) - exact).norm() < 1e-4 * exact.norm()
        assert torch.nn.functional.cosine_similarity(create_cpu_embedder(model, "int8")(batch), exact).min() > 0.98


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in ENCODERS]
)
def test_encoders_of_transformers_are_looked_into_and_computed_fast(kind, tmp_path):
    check_all_is_found(load(kind, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_encoders_of_timm_are_looked_into_and_computed_fast(name, tmp_path):
    peer = randomise(timm.create_model(name, num_classes=0), scale=0.02)
    timm.models.save_for_hf(peer, tmp_path)
    model = vitrail.load(tmp_path, image_size=64 if peer.patch_embed.patch_size[0] == 16 else 56)
    assert isinstance(model, VisionTransformer)
    check_all_is_found(model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPORTED)
def test_one_onnx_file_for_five_sizes(kind, tmp_path):
    model = load(kind, tmp_path / "peer")
    export(model, tmp_path / "model.onnx", dynamic_size=True, on_event=lambda *_: None)
    run = open_onnx(tmp_path / "model.onnx")
    for size in SIZES:
        batch = images(2, size)
        with torch.no_grad():
            exact = model(batch)
        assert (run(batch) - exact).abs().max() <= 1e-4 * max(1.0, float(exact.abs().max()) / 10), size
