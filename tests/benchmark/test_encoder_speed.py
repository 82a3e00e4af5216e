"""The comparison of encoders, as far as it runs without a GPU: tiny networks of timm's, our kernels interpreted."""

from __future__ import annotations

import copy

import encoder_speed
import pytest
import torch

from peers import timm
from vitrail.fast.timing import relative_distance

TINY = {"embed_dim": 64, "depth": 2, "num_heads": 4}


def test_every_case_is_a_network_of_timms():
    assert all(timm.is_model(case.name) for case in encoder_speed.CASES.values())
    assert set(encoder_speed.DEFAULT) <= set(encoder_speed.CASES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("vit_base_patch16_dinov3", 64, {}),
        ("vit_base_patch14_dinov2", 56, {}),
        ("vit_giant_patch14_dinov2", 56, {"mlp_ratio": 5.25}),
        ("vit_base_patch16_siglip_256", 64, {}),
        ("eva02_base_patch14_448", 56, {}),
        ("vit_pe_core_base_patch16_224", 64, {"num_heads": 2}),
    ],
)
def test_a_network_against_ours(name, size, options, monkeypatch):
    pytest.importorskip("triton", reason="Triton, in whose interpreter the kernels run, is not installed")
    if torch.cuda.is_available():
        pytest.skip("here is a GPU: benchmarks/encoder_speed.py compares them there")
    from vitrail.fast.gpu.fused_embedder import FusedEmbedder

    monkeypatch.setattr(encoder_speed, "SECONDS", 0.01)
    network = encoder_speed.build_network(name, size, **{**TINY, **options})
    model = encoder_speed.load_from_network(network, size)
    images = torch.randn(3, 3, size, size)
    exact = encoder_speed.embed_exactly(network, images)
    with torch.inference_mode():
        assert relative_distance(model.embed(images), exact) < 1e-5
    half = copy.deepcopy(network).to(torch.bfloat16)
    contestants = {"timm": lambda images: half(images.bfloat16()), "vitrail": FusedEmbedder(model)}
    found = encoder_speed.measure_distances(contestants, exact, images)
    assert 0 < found["vitrail"] < 1.2 * found["timm"]
    speeds = encoder_speed.measure_speeds({"timm": contestants["timm"]}, images, 2, print)
    assert len(speeds["timm"]["seconds"]) == 2
