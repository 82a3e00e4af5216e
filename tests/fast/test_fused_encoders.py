"""Today's encoders by fused kernels, in Triton's interpreter and in float32, against the plain model in float64."""

from __future__ import annotations

import copy

import pytest
import torch

import vitrail

pytest.importorskip("triton", reason="Triton, in whose interpreter the kernels run, is not installed")
if torch.cuda.is_available():
    pytest.skip("here is a GPU: benchmarks/kernel_check.py checks the kernels there", allow_module_level=True)

from timm_families import FAMILIES, build_family, write_folder

from encoders import ENCODERS, small_encoder
from samples import images as random_images
from vitrail.errors import NotApplicableError
from vitrail.fast.gpu import fused_block, fused_embedder, fused_layers, merged_block
from vitrail.fast.gpu.fused_embedder import FusedEmbedder
from vitrail.fast.gpu.kernels.product import Tiling, name_tilings
from vitrail.fast.known_parts import find_unfused_part
from vitrail.fast.timing import relative_distance

REFUSED = {"beit": "a relative bias", "beit, shared bias": "a relative bias", "norms behind": "norms behind the layers"}
QUICK = ("dinov3", "siglip")
FUSED = [
    kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in ENCODERS if kind not in REFUSED
]
SIZE = (8, 12)
MIXTURES = {
    "mixed rope, queries and keys normed": ("mixed rope", {"qk_norm": True}),
    "dinov3, queries and keys normed": ("dinov3", {"qk_norm": True, "norm": "rms"}),
    "dinov3, distilled": ("dinov3", {"pool": "distilled"}),
    "eva-02, heads of 12": ("eva-02", {"width": 24}),
    "eva-02 clip": ("eva-02", {"pool": "class", "norm_after_pool": False}),
    "perception encoder, no last norm": ("perception encoder", {"final_norm": False}),
}
"""Further mixtures of parts."""
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")


@pytest.fixture
def float32(monkeypatch):
    """Let everything be computed in float32, so that no error hides behind the rounding of bf16."""
    for module in (fused_block, fused_embedder, fused_layers):
        monkeypatch.setattr(module, "HALF", torch.float32)
    monkeypatch.setattr(fused_embedder, "STREAM", torch.float32)
    return monkeypatch


def build(kind, **options):
    """A small model on a grid of 2 × 3, whose attention depends much on queries and keys."""
    model = small_encoder(kind, image_size=SIZE, **options)
    with torch.no_grad():
        for block in model.encoder.blocks:
            block.attention.qkv.weight.mul_(4)  # with small weights attention is almost an average
    return model


def images(count=2):
    return random_images(count, SIZE)


def check(model, most=1e-5, **options):
    with torch.no_grad():
        exact = copy.deepcopy(model).double().embed(images().double())
    assert relative_distance(FusedEmbedder(model, **options)(images()), exact) < most


@pytest.mark.parametrize("kind", FUSED)
def test_an_encoder(kind, float32):
    check(build(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture(kind, float32):
    kind, options = MIXTURES[kind]
    check(build(kind, **options))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("dinov3", marks=pytest.mark.slow),
        pytest.param("mixed rope", marks=pytest.mark.slow),
        "query and key norms",
    ],
)
def test_the_last_block_for_many_tokens_has_queries_of_its_own(kind, float32):
    float32.setattr(fused_block, "FEW", 0)
    model = build(kind)
    assert FusedEmbedder(model).last is not None
    check(model)


@pytest.mark.slow
def test_the_rotation_is_not_random():
    model, batch = build("dinov3").train(), images()
    assert torch.equal(FusedEmbedder(model)(batch), FusedEmbedder(copy.deepcopy(model).eval())(batch))


@pytest.mark.parametrize(
    ("kind", "wanted", "count"),
    [
        ("dinov3", "turned", 2),
        pytest.param("mixed rope", "turned", 2, marks=pytest.mark.slow),
        pytest.param("eva-02", "turned", 2, marks=pytest.mark.slow),
        pytest.param("dinov3", "(16, 32, 16", 5, marks=pytest.mark.slow),
        pytest.param("dinov3 7b", "(16, 32, 16", 8, marks=pytest.mark.slow),
        ("eva-02", "(16, 32, 16", 8),
    ],
)
def test_our_products_turn_and_gate(kind, wanted, count, float32):
    """Angles are fp16 where a product turns by itself."""
    taken = []

    def choose(key, ways, *inputs, cold_cache=False):
        found = next((name for name in ways if name.startswith(wanted)), None)
        taken.extend([found] if found else [])
        return ways[found or next(iter(ways))]

    float32.setattr(fused_layers, "choose_fastest", choose)
    float32.setattr(fused_layers, "NARROW", name_tilings(Tiling(16, 32, 16, 4, 2), Tiling(16, 64, 16, 4, 2, parts=2)))
    check(build(kind), 1e-3 if wanted == "turned" else 1e-5)
    assert len(taken) >= count


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dinov3", "dinov3 7b", "eva-02"])
@pytest.mark.parametrize("calibrated", [False, True])
def test_fp8(kind, calibrated):
    model, batch = small_encoder(kind, image_size=SIZE), images()
    embedder = FusedEmbedder(model, fp8=True)
    if calibrated:
        embedder.calibrate(batch)
    with torch.no_grad():
        assert relative_distance(embedder(batch), model.embed(batch)) < 0.06


@pytest.mark.parametrize("kind", REFUSED)
def test_what_there_are_no_kernels_for_is_named(kind):
    with pytest.raises(NotApplicableError, match=REFUSED[kind]):
        FusedEmbedder(build(kind))


@pytest.mark.parametrize(
    "kind", ["dinov3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("perception encoder", "mixed rope"))]
)
def test_sums_and_norms_inside_the_products(kind, float32):
    def choose(key, ways, *inputs, cold_cache=False):
        return ways.get("joined") or ways[next(iter(ways))]

    residual, normed = (Tiling(16, 16, 16, 4, 2),), (Tiling(16, 32, 16, 4, 2),)
    float32.setattr(merged_block, "STREAM", torch.float32)
    float32.setattr(
        fused_embedder, "TILING_CANDIDATES", {"fc2": residual, "fc1": normed, "qkv": normed, "out": residual}
    )
    for module in (fused_embedder, fused_layers):
        float32.setattr(module, "choose_fastest", choose)
    model = build(kind, depth=3)
    embedder = FusedEmbedder(model, tries_merging=True)
    with torch.no_grad():
        exact = copy.deepcopy(model).double().embed(images().double())
    assert relative_distance(embedder(images()), exact) < 1e-5
    assert embedder.merged_blocks is not None


@pytest.mark.parametrize("kind", ["dinov2 giant, registers", "eva-02"])
def test_nothing_is_merged_with_such_parts(kind):
    assert not FusedEmbedder(build(kind), tries_merging=True).can_merge


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_timms(family, float32, tmp_path):
    model = vitrail.load(write_folder(family, build_family(family), tmp_path)).double()
    if reason := find_unfused_part(model.architecture):
        with pytest.raises(NotApplicableError, match=reason):
            FusedEmbedder(model)
        return
    batch = random_images(2, model.image_size)
    with torch.no_grad():
        exact = model.embed(batch.double())
    assert relative_distance(FusedEmbedder(model.float())(batch), exact) < 2e-5
