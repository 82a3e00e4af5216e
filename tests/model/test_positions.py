"""Position embeddings and their resize."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import vitrail
from samples import images, small_vit
from vitrail.model.positions import (
    LearnedPositions2d,
    RelativePositions,
    compute_sin_cos_table,
    resize_position_embedding,
)

grids = st.tuples(st.integers(1, 9), st.integers(1, 9))


def table(grid: tuple[int, int], width: int = 6, prefix: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(prefix + grid[0] * grid[1], width, generator=generator, dtype=torch.float64).to(dtype)


@given(grid=grids, prefix=st.integers(0, 3), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_same_grid_is_the_identity_bit_for_bit(grid, prefix, dtype):
    old = table(grid, prefix=prefix, dtype=dtype)
    assert torch.equal(resize_position_embedding(old, grid, grid, prefix), old)


def test_14_to_24_is_a_direct_two_dimensional_interpolation():
    old = table((14, 14), width=768, prefix=1)
    plane = old[1:].reshape(1, 14, 14, 768).permute(0, 3, 1, 2)
    plane = F.interpolate(plane, size=(24, 24), mode="bicubic", antialias=True)
    expected = torch.cat([old[:1], plane.permute(0, 2, 3, 1).reshape(576, 768)])
    new = resize_position_embedding(old, (14, 14), (24, 24), prefix=1)
    torch.testing.assert_close(new, expected, rtol=0, atol=1e-12)
    assert torch.equal(new[:1], old[:1])
    single = resize_position_embedding(old.float(), (14, 14), (24, 24), prefix=1)
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=1e-5)


@given(old=grids, new=grids)
def test_any_resize_is_torchs_own_interpolation(old, new):
    before = table(old)
    plane = before.reshape(1, *old, 6).permute(0, 3, 1, 2)
    expected = F.interpolate(plane, size=new, mode="bicubic", antialias=True).permute(0, 2, 3, 1).reshape(-1, 6)
    torch.testing.assert_close(resize_position_embedding(before, old, new), expected, rtol=0, atol=1e-12)


def cubic(x: float, a: float = -0.5) -> float:
    """Keys' kernel, written from its definition."""
    x = abs(x)
    if x < 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def interpolate_loops(plane: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """(rows, columns) → size: one output at a time, weights by distance of pixel centres, in float64."""

    def weights(old: int, new: int) -> list[list[float]]:
        scale = old / new
        support = max(scale, 1.0)  # shrinking widens the kernel, which is what antialias means
        found = []
        for i in range(new):
            centre = (i + 0.5) * scale
            row = [cubic((j + 0.5 - centre) / support) for j in range(old)]
            found.append([w / sum(row) for w in row])
        return found

    rows, columns = weights(plane.shape[0], size[0]), weights(plane.shape[1], size[1])
    out = torch.zeros(size, dtype=torch.float64)
    for i in range(size[0]):
        for j in range(size[1]):
            for r, row_weight in enumerate(rows[i]):
                for c, column_weight in enumerate(columns[j]):
                    out[i, j] += row_weight * column_weight * plane[r, c]
    return out


@pytest.mark.parametrize(("old", "new"), [((3, 5), (6, 7)), ((5, 3), (5, 8)), ((6, 7), (3, 4)), ((4, 4), (9, 2))])
def test_resize_against_loops(old, new):
    before = table(old, width=2, prefix=1)
    after = resize_position_embedding(before, old, new, prefix=1)
    for channel in range(2):
        expected = interpolate_loops(before[1:, channel].reshape(old), new)
        torch.testing.assert_close(after[1:, channel].reshape(new), expected, rtol=0, atol=1e-12)


@given(old=grids, new=grids)
def test_rows_and_columns_stay_apart(old, new):
    """A horizontal gradient stays horizontal, a vertical one vertical, on any pair of grids."""
    x = torch.linspace(-1, 1, old[1], dtype=torch.float64).expand(old)
    y = torch.linspace(-1, 1, old[0], dtype=torch.float64)[:, None].expand(old)
    after = resize_position_embedding(torch.stack([x, y], dim=-1).reshape(-1, 2), old, new).reshape(*new, 2)
    torch.testing.assert_close(after[..., 0], after[:1, :, 0].expand(new), rtol=0, atol=1e-12)
    torch.testing.assert_close(after[..., 1], after[:, :1, 1].expand(new), rtol=0, atol=1e-12)
    if old[1] > 1 and new[1] > 1:
        assert (after[0, 1:, 0] > after[0, :-1, 0]).all()


def test_a_constant_stays_constant():
    after = resize_position_embedding(torch.full((35, 2), 0.7), (5, 7), (9, 4))
    torch.testing.assert_close(after, torch.full((36, 2), 0.7))


def test_gradient_reaches_the_learned_table_through_a_resize():
    model = small_vit()
    model(images(size=(24, 24))).sum().backward()
    assert model.position_embedding[0].table.grad.abs().sum() > 0


@pytest.mark.parametrize("position", ["none", "learned-1d", "learned-2d", "sin-cos"])
@pytest.mark.parametrize(
    "options", [{}, {"registers": 3}, {"registers": 3, "position_prefix": "all"}, {"pool": "average"}]
)
def test_resize_for_good_equals_resize_on_the_fly(position, options):
    model = small_vit(position=position, position_at="input" if position == "none" else "every-layer", **options)
    larger = images(size=(40, 32))
    on_the_fly = model(larger)
    prefix = [p.detach().clone() for p in (model.class_token, model.registers) if p is not None]
    model.resize((40, 32))
    torch.testing.assert_close(model(larger), on_the_fly, rtol=0, atol=1e-6)
    assert model.image_size == model.preprocessing.image_size == model.architecture.image_size == (40, 32)
    assert model.grid == (5, 4)
    assert all(
        torch.equal(a, b) for a, b in zip(prefix, (model.class_token, model.registers), strict=False) if b is not None
    )


def test_resize_is_kept_by_the_state_dict():
    model = small_vit().resize((40, 32))
    again = small_vit(image_size=(40, 32))
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(images(size=(40, 32))), model(images(size=(40, 32))))


def test_relative_positions_refuse_another_grid():
    model = small_vit(position="relative")
    before = model(images())
    with pytest.raises(vitrail.InputError, match="cannot be resized"):
        model.resize((24, 16))
    with pytest.raises(vitrail.InputError, match="cannot be resized"):
        model(images(size=(32, 32)))
    assert model.image_size == (16, 24)
    assert torch.equal(model(images()), before)
    assert model.resize((16, 24)) is model


def test_relative_bias_against_loops():
    positions = RelativePositions((2, 3), head_width=4, prefix=2)
    with torch.no_grad():
        positions.table.normal_()
    queries = torch.randn(2, 5, 8, 4)
    bias = positions(queries)
    for q in range(8):
        for k in range(8):
            if q < 2 or k < 2:
                assert (bias[:, :, q, k] == 0).all()
            else:
                expected = queries[:, :, q] @ positions.table[(q - k) + 5] / math.sqrt(4)
                torch.testing.assert_close(bias[:, :, q, k], expected)


def test_learned_2d_is_x_beside_y():
    positions = LearnedPositions2d((2, 3), width=4, prefix=1)
    with torch.no_grad():
        positions.prefix_table.fill_(9)
        positions.column_table.copy_(torch.tensor([[0.0, 0], [1, 1], [2, 2]]))
        positions.row_table.copy_(torch.tensor([[10.0, 10], [20, 20]]))
    expected = [[9, 9, 9, 9], *([c, c, r, r] for r in (10, 20) for c in (0, 1, 2))]
    assert positions((2, 3)).tolist() == expected


def test_sin_cos_is_that_of_a_loop():
    table = compute_sin_cos_table((2, 3), 12, temperature=50.0)
    for row in range(2):
        for column in range(3):
            for k in range(3):
                frequency = 50.0 ** -(k / 2)
                waves = [wave(place * frequency) for place in (column, row) for wave in (math.sin, math.cos)]
                assert table[3 * row + column, k::3].tolist() == pytest.approx(waves, abs=1e-12)


def test_sin_cos_is_exact_at_any_grid_and_in_any_dtype():
    model = small_vit(position="sin-cos", pool="average")
    assert torch.equal(model.position_embedding[0]((3, 5)), compute_sin_cos_table((3, 5), 32).float())
    assert torch.equal(model.double().position_embedding[0].table, compute_sin_cos_table((2, 3), 32))
    assert not list(model.position_embedding.parameters())
