"""How alike position embeddings are, against loops and planted tables; and the test on neighbours."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from torch import nn

import vitrail
from peers import timm
from samples import small_vit
from vitrail.errors import ConfigError, NotApplicableError
from vitrail.inspection.findings import Neighbours, Positions
from vitrail.inspection.measure import anatomy, positions
from vitrail.inspection.measure.positions import (
    measure_learned_positions,
    measure_positions,
    neighbour_test,
    position_similarity,
)
from vitrail.inspection.page.report import _describe_neighbours
from vitrail.model.architecture import TimmArchitecture
from vitrail.model.create import build_empty_model

GRID = (3, 5)


def vit(grid=GRID, **options):
    """Patches of 8 on the grid; all parameters random."""
    return small_vit(image_size=(grid[0] * 8, grid[1] * 8), **options)


def by_loop(table, grid):
    """(N, D) → (rows, columns, rows, columns), one pair at a time."""
    rows, columns = grid
    table = table.detach().double().tolist()
    found = np.empty((rows, columns, rows, columns))
    for a in np.ndindex(grid):
        for b in np.ndindex(grid):
            x, y = table[a[0] * columns + a[1]], table[b[0] * columns + b[1]]
            lengths = math.sqrt(math.fsum(v * v for v in x)) * math.sqrt(math.fsum(v * v for v in y))
            found[a + b] = math.fsum(v * w for v, w in zip(x, y, strict=True)) / lengths
    return found


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


# Similarity


@pytest.mark.parametrize("position", ["learned-1d", "learned-2d", "sin-cos"])
@pytest.mark.parametrize("grid", [(3, 5), (4, 2), (1, 4)])
def test_against_a_loop(position, grid):
    model = vit(grid, position=position)
    module = model.position_embedding[0]
    if position == "learned-2d":
        table = torch.stack(
            [torch.cat([module.column_table[c], module.row_table[r]]) for r in range(grid[0]) for c in range(grid[1])]
        )
    else:
        table = module.table[-grid[0] * grid[1] :]
    found = position_similarity(model)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, by_loop(table, grid), rtol=0, atol=1e-12)
    assert measure_positions(model).kind == position
    np.testing.assert_array_equal(measure_positions(model).similarity, found)


def test_sines_and_cosines_have_the_similarity_of_their_definition():
    """sin a sin b + cos a cos b = cos(a − b), the mean over frequencies and over both axes."""
    found = position_similarity(vit((2, 4), position="sin-cos", width=16, dtype=torch.float64))
    frequencies = [10_000 ** (-k / 3) for k in range(4)]
    for a in np.ndindex(2, 4):
        for b in np.ndindex(2, 4):
            angles = [(b[axis] - a[axis]) * f for axis in (0, 1) for f in frequencies]
            assert found[a + b] == pytest.approx(sum(map(math.cos, angles)) / 8, abs=1e-12)


@pytest.mark.parametrize("prefix", ["class", "all", "none"])
@pytest.mark.parametrize("options", [{"registers": 2}, {"registers": 2, "pool": "average"}, {}])
@pytest.mark.parametrize("position", ["learned-1d", "learned-2d"])
def test_tokens_that_are_no_patch_are_left_out(position, options, prefix):
    model = vit(position=position, position_prefix=prefix, **options)
    module = model.position_embedding[0]
    before = position_similarity(model)
    with torch.no_grad():
        if position == "learned-2d":
            if module.prefix:
                module.prefix_table += 100
        else:
            module.table[: module.prefix] += 100
    np.testing.assert_array_equal(position_similarity(model), before)
    with torch.no_grad():
        (module.row_table if position == "learned-2d" else module.table[module.prefix :])[0] += 1
    assert np.abs(position_similarity(model)[0, 0] - before[0, 0]).max() > 0.01


@torch.no_grad()
def test_places_on_a_circle_have_the_cosine_of_the_angle_between_them():
    model = vit((3, 4), dtype=torch.float64)
    angles = torch.arange(12, dtype=torch.float64) * math.tau / 12
    table = model.position_embedding[0].table
    table.zero_()
    table[1:, 5], table[1:, 9] = 3 * angles.cos(), 3 * angles.sin()
    difference = np.arange(12)[:, None] - np.arange(12)
    expected = np.cos(difference * math.tau / 12).reshape(3, 4, 3, 4)
    np.testing.assert_allclose(position_similarity(model), expected, rtol=0, atol=1e-14)


@torch.no_grad()
def test_one_hot_rows_are_alike_with_themselves_only():
    model = vit()
    model.position_embedding[0].table[1:] = 7 * torch.eye(15, 32)
    np.testing.assert_array_equal(position_similarity(model).reshape(15, 15), np.eye(15))


@torch.no_grad()
def test_rows_of_zeros():
    model = vit()
    model.position_embedding[0].table[1 + 7] = 0
    found = position_similarity(model).reshape(15, 15)
    np.testing.assert_array_equal(found[7], np.eye(15)[7])
    np.testing.assert_array_equal(found[:, 7], np.eye(15)[7])
    assert np.abs(found[0, 1]) > 0
    model.position_embedding[0].table.zero_()
    np.testing.assert_array_equal(position_similarity(model).reshape(15, 15), np.eye(15))
    assert measure_positions(model).neighbours.p_value == 1.0, "nothing is told apart"


@torch.no_grad()
def test_tables_in_every_layer():
    model = vit(position_at="every-layer", depth=3)
    tables = [module.table[1:] for module in model.position_embedding]
    for layer in (0, 1, 2, -1):
        np.testing.assert_allclose(position_similarity(model, layer), by_loop(tables[layer], GRID), rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match=r"layer 3 .*0 to 2"):
        position_similarity(model, 3)
    with pytest.raises(ConfigError, match=r"layer 1 .*1 table .* 0$"):
        position_similarity(vit(position_at="shared"), 1)


def test_on_the_grid_that_the_model_has_now():
    model = vit().resize((32, 40))
    assert position_similarity(model).shape == (4, 5, 4, 5)
    table = model.position_embedding[0].table[1:]
    np.testing.assert_allclose(position_similarity(model), by_loop(table, (4, 5)), rtol=0, atol=1e-12)


def test_in_half_precision_and_compiled():
    model = vit(dtype=torch.bfloat16)
    expected = by_loop(model.position_embedding[0].table[1:], GRID)
    found = position_similarity(torch.compile(model, backend="eager"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_models_without_such_a_table_say_what_they_have():
    with pytest.raises(NotApplicableError, match="offsets"):
        position_similarity(vit(position="relative"))
    with pytest.raises(NotApplicableError, match='"none"'):
        measure_positions(vit(position="none"))
    with pytest.raises(NotApplicableError, match="ResNet"):
        measure_positions(vitrail.create_model("BiT-R50x1", device="meta"))
    with pytest.raises(ConfigError, match="Linear"):
        position_similarity(nn.Linear(2, 2))


@torch.no_grad()
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("measure", [position_similarity, measure_positions])
def test_tables_that_are_not_numbers_say_so(value, measure):
    model = vit()
    model.position_embedding[0].table[0] = value
    measure(model)  # the row of the class token, which is no patch
    model.position_embedding[0].table[7, 3] = value
    with pytest.raises(NotApplicableError, match=r"position embeddings .*NaN.*[^.]$"):
        measure(model)


@pytest.mark.parametrize("measure", [position_similarity, measure_positions])
def test_grids_that_are_too_large_say_so_before_anything_is_compared(measure, monkeypatch):
    options = {"width": 4, "depth": 1, "num_heads": 1, "mlp_dim": 4, "num_classes": 0, "device": "meta"}
    model = vitrail.create_model("Ti/4", image_size=(256, 260), **options)
    with pytest.raises(NotApplicableError, match=r"4,160 patches .*4,096"):
        measure(model)
    monkeypatch.setattr(anatomy, "MOST_PATCHES", 14)
    with pytest.raises(NotApplicableError, match="3×5 = 15 patches"):
        measure(vit())
    with pytest.raises(NotApplicableError, match="5×10 = 50 patches"):
        measure(build_empty_model(TimmArchitecture(name="test_vit4", image_size=(80, 160), num_classes=5)))
    monkeypatch.setattr(anatomy, "MOST_PATCHES", 15)
    measure(vit())


# timm's


@pytest.mark.parametrize(
    ("name", "image_size", "grid", "owned", "kind"),
    [
        ("test_vit4", (80, 160), (5, 10), 1, "learned-1d"),
        ("deit3_small_patch16_224", (32, 48), (2, 3), 0, "learned-1d"),
        ("vit_small_patch14_reg4_dinov2", (42, 28), (3, 2), 0, "learned-1d"),
        ("deit_tiny_distilled_patch16_224", (32, 48), (2, 3), 2, "learned-1d"),
        ("eva02_tiny_patch14_224", (28, 42), (2, 3), 1, "learned-1d and rotary"),
    ],
)
def test_of_timm_whoever_owns_a_row(name, image_size, grid, owned, kind):
    model = build_empty_model(TimmArchitecture(name=name, image_size=image_size, num_classes=5))
    table = noise(1, owned + grid[0] * grid[1], model.peer.pos_embed.shape[2])
    assert model.peer.pos_embed.shape == table.shape
    model.peer.pos_embed = nn.Parameter(table)
    found = measure_positions(model)
    assert found.kind == kind
    np.testing.assert_allclose(found.similarity, by_loop(table[0, owned:], grid), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (
            "vit_medium_patch16_rope_reg1_gap_256",
            "rotary position embeddings: they turn queries and keys inside attention",
        ),
        ("swin_tiny_patch4_window7_224", "relative position embeddings: they belong to offsets"),
        ("beit_base_patch16_224", "relative position embeddings: they belong to offsets"),
        ("test_convnext", "no table of position embeddings with a row for each patch"),
        ("xcit_nano_12_p16_224", "no table of position embeddings with a row for each patch"),
    ],
)
def test_of_timm_without(name, what):
    size = timm.models.get_pretrained_cfg(name).input_size[1:]
    with pytest.raises(NotApplicableError, match=f"^timm's {name} has {what}"):
        measure_positions(build_empty_model(TimmArchitecture(name=name, image_size=size, num_classes=5)))


# Neighbours


def smooth(grid, reach=2.0):
    """Similarity that falls with the distance."""
    places = np.array(list(np.ndindex(grid)), dtype=float)
    distance = np.linalg.norm(places[:, None] - places, axis=2)
    return np.exp(-((distance / reach) ** 2)).reshape(*grid, *grid)


def slow_test(similarity, permutations, seed):
    """By definition, patch by patch, with the same drawings by lot."""
    rows, columns = similarity.shape[:2]
    count = rows * columns
    flat = similarity.reshape(count, count)

    def statistic(order):
        near, far = [], []
        for a in range(count):
            for b in range(a):
                steps = abs(a // columns - b // columns) + abs(a % columns - b % columns)
                (near if steps == 1 else far).append(flat[order[a], order[b]])
        return math.fsum(near) / len(near), math.fsum(far) / len(far)

    near, far = statistic(range(count))
    orders = np.random.default_rng(seed).permuted(np.tile(np.arange(count), (permutations, 1)), axis=1)
    drawn = [np.subtract(*statistic(order)) for order in orders.tolist()]
    return near, far, (1 + sum(value >= near - far - 1e-12 for value in drawn)) / (1 + permutations)


@pytest.mark.parametrize("grid", [(3, 3), (3, 5), (1, 10), (5, 2)])
def test_against_a_slow_test(grid):
    generator = np.random.default_rng(1)
    table = (generator.standard_normal((*grid, 6)) + 0.5 * np.arange(grid[1])[:, None]).reshape(-1, 6)
    similarity = np.corrcoef(table).reshape(*grid, *grid)
    found = neighbour_test(similarity, permutations=200, seed=4)
    near, far, p = slow_test(similarity, 200, 4)
    assert (found.near, found.far) == pytest.approx((near, far), abs=1e-12)
    assert (found.p_value, found.permutations) == (p, 200)


def test_by_hand():
    """Three rows of three: 12 pairs touch and 24 do not. Patches in one row are alike (1), all others are not (0)."""
    row = np.arange(9) // 3
    similarity = (row[:, None] == row).astype(float).reshape(3, 3, 3, 3)
    found = neighbour_test(similarity, permutations=99)
    assert found.near == pytest.approx(6 / 12)  # two pairs in each of three rows, beside six that touch across rows
    assert found.far == pytest.approx(3 / 24)  # the two ends of each row


def test_in_parts_as_at_once(monkeypatch):
    similarity = smooth((4, 4)) + np.random.default_rng(0).standard_normal((4, 4, 4, 4)) * 2
    similarity = similarity + similarity.transpose(2, 3, 0, 1)
    whole = neighbour_test(similarity, permutations=501)
    assert 0.01 < whole.p_value < 0.9
    monkeypatch.setattr(positions, "AT_ONCE", 24 * 7)
    assert neighbour_test(similarity, permutations=501) == whole


@given(st.integers(0, 2**32 - 1), st.sampled_from([(3, 3), (2, 6), (4, 5)]))
@settings(max_examples=30, deadline=None)
def test_whatever_the_similarity_p_is_a_share_and_the_means_make_up_all_pairs(seed, grid):
    count = grid[0] * grid[1]
    table = np.random.default_rng(seed).standard_normal((count, 4))
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    similarity = (unit @ unit.T).reshape(*grid, *grid)
    found = neighbour_test(similarity, permutations=19, seed=seed)
    assert round(found.p_value * 20) / 20 == found.p_value
    assert 0 < found.p_value <= 1
    touching = grid[0] * (grid[1] - 1) + grid[1] * (grid[0] - 1)
    every = count * (count - 1) / 2
    total = (similarity.sum() - count) / 2
    assert found.near * touching + found.far * (every - touching) == pytest.approx(total, abs=1e-9)


def test_smooth_tables_are_found_and_their_reverse_is_not():
    assert neighbour_test(smooth((4, 4))).p_value < 0.01
    assert neighbour_test(smooth((6, 3))).p_value < 0.01
    assert neighbour_test(-smooth((6, 3))).p_value > 0.99
    assert measure_positions(vit((4, 4), position="sin-cos")).neighbours.p_value < 0.01


def test_where_all_are_alike_nothing_is_found():
    assert neighbour_test(np.ones((4, 4, 4, 4)), permutations=99).p_value == 1.0
    assert neighbour_test(np.full((3, 4, 3, 4), 0.1), permutations=99).p_value == 1.0


def test_equal_sums_are_equal_in_whatever_order_they_are_added():
    """One patch is unlike all others, so a corner is the best place for it, and all corners are as good."""
    similarity = np.full((16, 16), 0.7)
    similarity[0], similarity[:, 0] = 0.1, 0.1
    orders = np.random.default_rng(0).permuted(np.tile(np.arange(16), (999, 1)), axis=1)
    corners = sum(int(np.flatnonzero(order == 0)[0]) in (0, 3, 12, 15) for order in orders)
    found = neighbour_test(similarity.reshape(4, 4, 4, 4), permutations=999)
    assert found.p_value == (1 + corners) / 1000


def test_fresh_tables_are_found_no_more_often_than_by_chance():
    """Of 200 models just made; the bounds are such that chance exceeds one in a thousand cases."""
    found = []
    for seed in range(200):
        model = vitrail.create_model(
            "Ti/4", image_size=16, width=16, depth=1, num_heads=1, mlp_dim=8, num_classes=0, seed=seed
        )
        found.append(neighbour_test(position_similarity(model), permutations=199, seed=seed).p_value)
    p = np.array(found)
    for level in (0.01, 0.05, 0.25, 0.5):
        assert (p <= level).sum() <= binom.ppf(0.999, 200, level), level
    assert (p <= 0.5).sum() >= binom.ppf(0.001, 200, 0.5), "a test that finds nothing would be none"


@torch.no_grad()
def test_a_table_that_has_learned_its_places_is_found():
    """Fresh noise with a little of the place mixed in, as training does."""
    model = vit((6, 6))
    table = model.position_embedding[0].table
    rows, columns = torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")
    fresh = measure_positions(model).neighbours
    table[1:, 0] += (rows.flatten() - 2.5) / 2
    table[1:, 1] += (columns.flatten() - 2.5) / 2
    learned = measure_positions(model).neighbours
    assert fresh.p_value > 0.01 > learned.p_value
    assert learned.near - learned.far > 0.1


def test_too_small_to_tell():
    assert neighbour_test(smooth((2, 4))) is None
    assert neighbour_test(smooth((1, 1))) is None
    assert neighbour_test(smooth((1, 9))) is not None
    assert measure_positions(vit((2, 3))).neighbours is None
    with pytest.raises(ConfigError, match="permutations = 0"):
        neighbour_test(smooth((3, 3)), permutations=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_tested(value):
    similarity = smooth((4, 4))
    similarity[1, 2, 3, 3] = value
    assert neighbour_test(similarity) is None


@pytest.mark.parametrize(
    ("kind", "learned"),
    [
        ("learned-1d", True),
        ("learned-1d and rotary", True),
        ("learned-2d", False),
        ("sin-cos", False),
        ("fixed", False),
        ("fixed and rotary", False),
    ],
)
def test_what_is_so_by_construction_is_not_told_as_knowledge(kind, learned):
    found = Positions(kind, smooth((4, 4)), Neighbours(0.75, -0.125, 0.0001, 9999))
    assert found.learned is learned
    words = _describe_neighbours(found)
    assert "a mean similarity of 0.75, all others of −0.12" in words
    assert ("p = 0.0001: they tell neighbours from others" in words) is learned
    assert ("in this kind neighbours are alike by construction" in words) is not learned
    assert ("p =" in words) is learned


@pytest.mark.parametrize("kind", ["learned-2d", "sin-cos"])
def test_fresh_tables_that_are_alike_by_construction_get_no_verdict(kind):
    options = {"width": 32, "depth": 1, "num_heads": 1, "mlp_dim": 8, "num_classes": 0, "seed": 0}
    found = measure_positions(vitrail.create_model("Ti/4", image_size=32, position=kind, **options))
    assert found.neighbours.near > found.neighbours.far
    assert found.neighbours.p_value < 0.01, "though nothing was learned"
    assert "in this kind neighbours are alike by construction" in _describe_neighbours(found)


def test_a_large_grid_takes_little_time():
    similarity = smooth((24, 24))
    started = time.process_time()
    assert neighbour_test(similarity).p_value == 1e-4
    assert time.process_time() - started < 2


def test_fixed_positions_are_one_sentence():
    options = {"width": 32, "depth": 1, "num_heads": 1, "mlp_dim": 8, "num_classes": 0, "seed": 0}
    with pytest.raises(NotApplicableError, match="fixed sines and cosines"):
        measure_learned_positions(vitrail.create_model("Ti/4", image_size=32, position="sin-cos", **options))
    learned = measure_learned_positions(vitrail.create_model("Ti/4", image_size=32, **options))
    assert learned.kind == "learned-1d"
