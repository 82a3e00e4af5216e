"""BEiT's relative bias: the index, and the table at another grid, against timm and plain loops."""

from __future__ import annotations

import pytest
import torch

import vitrail
from peers import timm
from samples import images, small_vit
from vitrail.model.relative_bias import RelativeBias, compute_offset_weights, resize_relative_bias

SIZES = [(3, 4), (3, 6), (4, 5), (6, 3), (7, 7), (14, 24), (2, 9), (3, 40)]


def make_table(grid: tuple[int, int], heads: int = 3, extra: int = 3) -> torch.Tensor:
    rows = (2 * grid[0] - 1) * (2 * grid[1] - 1) + extra
    return torch.randn(rows, heads, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(("old", "new"), SIZES)
def test_offsets_are_interpolated_as_in_beits_code(old, new):
    """Written as loops: bisection for the growth of the steps, then linear interpolation between uneven places."""
    low, high = 1.01, 1.5
    growth = low
    while high - low > 1e-6:
        growth = (low + high) / 2
        if sum(growth**i for i in range(old - 1)) > new - 1:
            high = growth
        else:
            low = growth
    places = [0.0]
    for step in range(old - 1):
        places.append(places[-1] + growth**step)
    known = [-place for place in reversed(places[1:])] + places
    weights = compute_offset_weights(old, new, torch.zeros((), dtype=torch.float64))
    for index, wanted in enumerate(range(1 - new, new)):
        row = [0.0] * len(known)
        inside = min(max(wanted, known[0]), known[-1])
        right = next(i for i, place in enumerate(known) if place >= inside - 1e-12)
        left = max(right - 1, 0)
        share = 0.0 if right == left else (inside - known[left]) / (known[right] - known[left])
        row[left] += 1 - share
        row[right] += share if right != left else 0.0
        torch.testing.assert_close(weights[index], torch.tensor(row, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence", "ignore:torch.searchsorted")
@pytest.mark.parametrize("new", [(6, 6), (5, 9), (3, 2), (2, 2), (4, 6), (10, 4), (30, 4)])
def test_a_table_is_resized_as_timm_does_it(new):
    """timm interpolates in float32, between places that it rounds to float32."""
    table = make_table((4, 4))
    rows = (2 * new[0] - 1) * (2 * new[1] - 1) + 3
    expected = timm.layers.resize_rel_pos_bias_table(table.float(), new_window_size=new, new_bias_shape=(rows, 3))
    ours = resize_relative_bias(table, (4, 4), new, extra=3)
    assert ours.shape == (rows, 3)
    torch.testing.assert_close(ours.float(), expected, rtol=0, atol=2e-5)
    assert torch.equal(ours[-3:], table[-3:])


def test_the_bias_is_timms():
    module = RelativeBias((3, 5), num_heads=4, class_token=True).double()
    table = make_table((3, 5), heads=4)
    with torch.no_grad():
        module.table.copy_(table)
    index = timm.models.beit.gen_relative_position_index((3, 5))
    assert torch.equal(module((3, 5))[0], table[index].permute(2, 0, 1))


def test_without_a_class_token_there_are_no_extra_rows():
    module = RelativeBias((2, 3), num_heads=2, class_token=False)
    assert module.table.shape == (15, 2)
    torch.nn.init.normal_(module.table)
    bias = module((2, 3))[0]
    assert bias.shape == (2, 6, 6)
    assert torch.equal(bias[:, 0, 0], bias[:, 5, 5])
    assert torch.equal(bias[:, 0, 4], bias[:, 1, 5])  # one down, one to the right
    assert not torch.equal(bias[:, 0, 4], bias[:, 4, 0])


@pytest.mark.parametrize("position_at", ["every-layer", "shared"])
def test_resizing_for_good_computes_what_a_call_at_that_size_does(position_at):
    model = small_vit(position="relative-bias", position_at=position_at, dtype=torch.float64)
    batch = images(size=(40, 16), dtype=torch.float64)
    expected = model(batch)
    names = list(model.state_dict())
    model.resize((40, 16))
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(batch), expected, rtol=0, atol=1e-12)
    assert model.resize((40, 16)).grid == (5, 2)
    copied = vitrail.create_model("S/8", width=32, depth=2, mlp_dim=48, num_heads=4, num_classes=7, image_size=(40, 16),
                                  position="relative-bias", position_at=position_at, dtype=torch.float64)  # fmt: skip
    copied.load_state_dict(model.state_dict())
    assert torch.equal(copied.eval()(batch), model(batch))


def test_the_same_grid_keeps_every_bit():
    table = make_table((3, 5))
    assert resize_relative_bias(table, (3, 5), (3, 5), extra=3) is table


def test_a_grid_of_one_row():
    model = small_vit(position="relative-bias", position_at="shared", image_size=(8, 24), dtype=torch.float64)
    assert model(images(size=(24, 24), dtype=torch.float64)).isfinite().all()
    assert model(images(size=(8, 8), dtype=torch.float64)).isfinite().all()
