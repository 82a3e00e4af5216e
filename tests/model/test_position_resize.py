"""Every way to resize a position table is the peer's own function, in float64."""

from __future__ import annotations

from typing import get_args

import pytest
import scipy.ndimage
import torch
from torch.nn import functional as F

import vitrail
from peers import torchvision
from vitrail.model.architecture import PositionResize
from vitrail.model.positions import LearnedPositions1d, LearnedPositions2d, resize_position_embedding

WAYS = get_args(PositionResize)
GRIDS = [
    ((7, 7), (14, 14)), ((37, 37), (16, 16)), ((16, 16), (37, 37)), ((7, 5), (9, 3)), ((4, 4), (4, 7)),
    ((6, 6), (1, 4)), ((1, 5), (3, 8)), ((5, 1), (2, 2)), ((1, 1), (3, 2)), ((3, 3), (1, 1)), ((14, 14), (13, 15)),
]  # fmt: skip


def interpolate_as_peers(table: torch.Tensor, old: tuple[int, int], new: tuple[int, int], how: str) -> torch.Tensor:
    """With torch's own function, as the library calls it whose way this is."""
    plane = table.reshape(1, *old, -1).permute(0, 3, 1, 2)
    arguments = {
        "bicubic-antialias": {"size": new, "mode": "bicubic", "antialias": True},
        "bicubic": {"size": new, "mode": "bicubic", "align_corners": False},
        "bicubic-offset": {
            "scale_factor": tuple((n + 0.1) / o for n, o in zip(new, old, strict=True)),
            "mode": "bicubic",
        },
        "bicubic-corners": {"size": new, "mode": "bicubic", "align_corners": True},
        "bilinear-corners": {"size": new, "mode": "bilinear", "align_corners": True},
        "bilinear": {"size": new, "mode": "bilinear", "align_corners": False},
        "bilinear-antialias": {"size": new, "mode": "bilinear", "antialias": True},
    }[how]
    return F.interpolate(plane, **arguments).permute(0, 2, 3, 1).reshape(-1, table.shape[1])


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_every_way_is_torchs_own(old, new, how):
    table = torch.randn(2 + old[0] * old[1], 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    resized = resize_position_embedding(table, old, new, prefix=2, how=how)
    assert torch.equal(resized[:2], table[:2])
    torch.testing.assert_close(resized[2:], interpolate_as_peers(table[2:], old, new, how), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_bilinear_corners_is_the_zoom_of_googles_code(old, new):
    table = torch.randn(old[0] * old[1], 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plane = table.reshape(*old, 5).numpy()
    expected = scipy.ndimage.zoom(plane, (new[0] / old[0], new[1] / old[1], 1), order=1)
    resized = resize_position_embedding(table, old, new, how="bilinear-corners")
    torch.testing.assert_close(resized, torch.from_numpy(expected).reshape(-1, 5), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [64, 24])
def test_bicubic_corners_is_torchvisions_function(size):
    table = torch.randn(1, 17, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    resize = torchvision.models.vision_transformer.interpolate_embeddings
    theirs = resize(size, 8, {"encoder.pos_embedding": table.clone()})["encoder.pos_embedding"][0]
    ours = resize_position_embedding(table[0], (4, 4), (size // 8,) * 2, prefix=1, how="bicubic-corners")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_the_ways_differ_and_the_own_grid_is_untouched():
    table = torch.randn(36, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = [resize_position_embedding(table, (6, 6), (4, 4), how=how) for how in WAYS]
    assert all((a - b).abs().max() > 1e-2 for i, a in enumerate(results) for b in results[:i])
    assert all(resize_position_embedding(table, (6, 6), (6, 6), how=how) is table for how in WAYS)
    assert torch.equal(results[0], resize_position_embedding(table, (6, 6), (4, 4)))  # the default is timm's


def small(how: str, **options) -> vitrail.VisionTransformer:
    sizes = {"image_size": 48, "patch_size": 8, "width": 16, "depth": 1, "num_heads": 2, "mlp_dim": 16}
    return vitrail.create_model("Ti/16", **sizes, num_classes=3, seed=0, position_resize=how, **options).double()


@pytest.mark.parametrize("position", ["learned-1d", "learned-2d"])
@pytest.mark.parametrize("how", WAYS)
@torch.no_grad()
def test_a_model_resizes_its_own_way_passing_and_for_good(how, position):
    model = small(how, position=position).eval()
    model.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    embedding = model.position_embedding[0]
    assert isinstance(embedding, LearnedPositions1d | LearnedPositions2d)
    batch = torch.randn(1, 3, 32, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = interpolate_as_peers(embedding((6, 6))[1:], (6, 6), (4, 8), how)
    torch.testing.assert_close(embedding((4, 8))[1:], expected, rtol=0, atol=1e-12)
    before = model(batch)
    model.resize((32, 64))
    assert model.architecture.position_resize == how
    torch.testing.assert_close(model(batch), before, rtol=0, atol=1e-12)


def test_a_wrong_way_names_the_ways():
    with pytest.raises(vitrail.ConfigError, match="bicubic-offset"):
        small("bicubic_offset")


@pytest.mark.parametrize("how", WAYS)
def test_one_traced_graph_serves_every_grid_and_its_gradients_are_right(how):
    """Sizes stay symbols: nothing about the traced size is fixed in the graph."""
    positions = LearnedPositions1d((6, 6), 4, 1, how).double()
    torch.nn.init.normal_(positions.table, generator=torch.Generator().manual_seed(1))

    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = positions

        def forward(self, plane: torch.Tensor) -> torch.Tensor:
            return self.positions((plane.shape[0], plane.shape[1])) * 1.0

    sizes = ({0: torch.export.Dim("rows", min=2), 1: torch.export.Dim("columns", min=2)},)
    graph = torch.export.export(Table(), (torch.zeros(5, 7),), dynamic_shapes=sizes).module()
    for grid in ((5, 7), (2, 9), (12, 12), (6, 6), (3, 2)):
        torch.testing.assert_close(graph(torch.zeros(grid)), positions(grid), rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(
        lambda table: resize_position_embedding(table, (3, 2), (2, 5), 1, how),
        torch.randn(7, 2, dtype=torch.float64, requires_grad=True),
    )
