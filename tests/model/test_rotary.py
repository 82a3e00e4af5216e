"""Rotary positions: angles, layouts, exactness in every dtype, and the arithmetic of timm and transformers."""

from __future__ import annotations

import math

import pytest
import torch

import vitrail
from peers import timm
from samples import SMALL, images, small_vit
from vitrail.model.architecture import Rotary
from vitrail.model.rotary import RotaryPositions, turn_by_quarter

DINOV3 = Rotary()
LIKE = torch.zeros((), dtype=torch.float64)


def rotations(rotary: Rotary, grid: tuple[int, int], prefix: int = 0, width: int = 16, like: torch.Tensor = LIKE):
    return RotaryPositions(rotary, width, prefix, depth=1).eval()(grid, like)[0]


@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_products_depend_on_the_offset_alone(layout):
    """The reason for rotary positions: q and k moved together have the same product."""
    rotary = Rotary(coordinates="index", base=100.0, layout=layout)
    rotation = rotations(rotary, (5, 6))
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned_q, turned_k = (rotation(x.expand(30, 16)).view(5, 6, 16) for x in (q, k))
    products = torch.einsum("abi,cdi->abcd", turned_q, turned_k)
    for row, column in ((0, 0), (1, 2), (3, 1)):
        torch.testing.assert_close(products[row, column, row + 1, column + 2], products[0, 0, 1, 2])
    assert (products[0, 0, 1, 2] - products[0, 0, 2, 1]).abs() > 1e-3


def test_a_rotation_keeps_lengths_and_leaves_the_prefix_bit_by_bit():
    x = torch.randn(2, 4, 3 + 8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = rotations(DINOV3, (2, 4), prefix=3)(x)
    assert torch.equal(turned[:, :, :3], x[:, :, :3])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=0, atol=1e-12)
    assert (turned[:, :, 3:] - x[:, :, 3:]).abs().min() > 0


def test_a_quarter_turn_of_each_layout():
    x = torch.arange(8.0)
    assert turn_by_quarter(x, "halves").tolist() == [-4, -5, -6, -7, 0, 1, 2, 3]
    assert turn_by_quarter(x, "pairs").tolist() == [-1, 0, -3, 2, -5, 4, -7, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_angles_are_float32_at_least_and_moves_are_exact(dtype):
    model, batch = small_vit(rotary={}), images()
    expected = model.rotary(model.grid, batch)[0]
    there_and_back = model.to(dtype).rotary(model.grid, batch.to(dtype))[0]
    assert there_and_back.cos.dtype == torch.float32
    assert torch.equal(there_and_back.cos, expected.cos)
    double = model.double().rotary(model.grid, batch.double())[0]
    assert double.sin.dtype == torch.float64
    torch.testing.assert_close(double.sin.float(), expected.sin, rtol=0, atol=1e-6)
    assert not [name for name in model.state_dict() if "rotary" in name]
    assert not list(model.rotary.buffers())


def test_random_changes_happen_in_training_only():
    model = vitrail.create_model("S/8", **{**SMALL, "rotary": {"rescale": 2.0, "shift": 0.1, "jitter": 1.5}}, seed=0)
    first, second = (model.train().rotary(model.grid, LIKE)[0].cos for _ in range(2))
    assert (first - second).abs().max() > 1e-3
    first, second = (model.eval().rotary(model.grid, LIKE)[0].cos for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, rotations(DINOV3, (2, 3), prefix=1, width=8).cos)


def test_random_changes_stay_in_their_ranges():
    torch.manual_seed(0)
    changed = RotaryPositions(Rotary(shift=0.25, rescale=2.0), 16, 0, 1)
    steps, centres = [], []
    for _ in range(300):
        rows, columns = changed.change_randomly(changed.compute_axes((4, 4), LIKE))
        scale = float((rows[1] - rows[0]) / 0.5)
        torch.testing.assert_close(columns[1] - columns[0], rows[1] - rows[0])  # one factor for both axes
        steps.append(scale)
        centres.append(float(rows.mean()) / scale)
    assert 0.5 <= min(steps) < 0.52
    assert 1.95 < max(steps) <= 2.0
    assert -0.25 <= min(centres) < -0.24
    assert 0.24 < max(centres) <= 0.25
    assert abs(sum(math.log(step) for step in steps) / 300) < 0.1  # as often smaller as larger


@pytest.mark.parametrize(
    "change", [{"shift": 0.3}, {"jitter": 1.7}, {"rescale": 2.0}, {"shift": 0.3, "jitter": 1.7, "rescale": 2.0}]
)
def test_random_changes_are_timms(change):
    """The same random numbers in the same order; timm computes its coordinates in float32."""
    ours = RotaryPositions(Rotary(**change), 16, 0, 1).train()
    names = {f"{name}_coords": value for name, value in change.items()}
    peer = timm.layers.pos_embed_sincos.RotaryEmbeddingDinoV3(16, **names).train()
    torch.manual_seed(3)
    rotation = ours((3, 5), torch.zeros(()))[0]
    torch.manual_seed(3)
    sin, cos = peer.get_embed((3, 5)).chunk(2, dim=-1)
    torch.testing.assert_close(rotation.cos, cos, rtol=0, atol=2e-5)
    torch.testing.assert_close(rotation.sin, sin, rtol=0, atol=2e-5)


@pytest.mark.parametrize("grid", [(4, 4), (3, 7), (9, 2)])
@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_dinov3_is_timms(grid, layout):
    """timm computes coordinates and periods in float32, so it is compared in float32."""
    peer = timm.layers.pos_embed_sincos.RotaryEmbeddingDinoV3(16, rotate_half=layout == "halves").eval()
    sin, cos = peer.get_embed(grid).chunk(2, dim=-1)
    ours = rotations(Rotary(layout=layout), grid, like=torch.zeros(()))
    torch.testing.assert_close(ours.cos, cos, rtol=0, atol=3e-6)
    torch.testing.assert_close(ours.sin, sin, rtol=0, atol=3e-6)


def test_dinov3_is_transformers(monkeypatch):
    """In float64: transformers' frequencies and coordinates, which it rounds to float32, are replaced by exact ones."""
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.dinov3_vit.modeling_dinov3_vit")
    config = transformers.DINOv3ViTConfig(hidden_size=64, num_attention_heads=4, image_size=64, patch_size=16)
    peer = module.DINOv3ViTRopePositionEmbedding(config).double().eval()
    peer.inv_freq = 1 / 100.0 ** torch.arange(0, 1, 0.25, dtype=torch.float64)
    locate = module.get_patches_center_coordinates
    monkeypatch.setattr(module, "get_patches_center_coordinates", lambda h, w, **_: locate(h, w, torch.float64, "cpu"))
    cos, sin = peer(torch.zeros(1, 3, 48, 112, dtype=torch.float64))
    ours = rotations(DINOV3, (3, 7))
    torch.testing.assert_close(ours.cos, cos, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.sin, sin, rtol=0, atol=1e-12)


@pytest.mark.parametrize("indexing", ["ij", "xy"])
@pytest.mark.parametrize("reference", [None, (4, 4), (3, 6)])
@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_index_coordinates_are_timms(indexing, reference, layout):
    """EVA-02's and Perception Encoder's; timm computes angles in float32."""
    build = timm.layers.pos_embed_sincos.build_rotary_pos_embed
    bands = 10_000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    sin, cos = build(
        [5, 8], bands=bands, dim=16, in_pixels=False, ref_feat_shape=reference, grid_offset=1.0,
        grid_indexing=indexing, rotate_half=layout == "halves", dtype=torch.float64,
    )  # fmt: skip
    first = "row" if indexing == "ij" else "column"
    rotary = Rotary(
        coordinates="index", base=10_000.0, layout=layout, offset=1.0, first=first, reference_grid=reference
    )
    ours = rotations(rotary, (5, 8))
    tolerance = 1e-12 if reference is None else 2e-6  # a third of a float32 is rounded
    torch.testing.assert_close(ours.cos, cos, rtol=0, atol=tolerance)
    torch.testing.assert_close(ours.sin, sin, rtol=0, atol=tolerance)


def test_learned_frequencies_are_timms():
    peer = timm.layers.pos_embed_sincos.RotaryEmbeddingMixed(32, depth=2, num_heads=4, temperature=10.0)
    options = {"coordinates": "index", "base": 10.0, "layout": "pairs", "first": "column", "learned": True}
    model = small_vit(rotary=options)
    with torch.no_grad():
        model.rotary.frequencies.copy_(peer.freqs)
    for grid in ((2, 3), (5, 4)):
        theirs = peer.get_embed(grid)  # L, H, N, sines and cosines
        for layer, rotation in enumerate(model.rotary(grid, torch.zeros(()))):
            sin, cos = theirs[layer].chunk(2, dim=-1)
            torch.testing.assert_close(rotation.cos[:, 1:], cos, rtol=0, atol=1e-6)
            torch.testing.assert_close(rotation.sin[:, 1:], sin, rtol=0, atol=1e-6)


def test_training_compiled_with_random_changes():
    model = vitrail.create_model("S/8", **{**SMALL, "rotary": {"rescale": 2.0}}, seed=0).train()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.nn.init.normal_(model.head.weight)
    assert (compiled(images()) - compiled(images())).abs().max() > 1e-5
