"""Views of images: crops against torch's own, colours against loops, and random numbers that ignore the batch."""

from __future__ import annotations

import colorsys
import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from vitrail.data.transforms.batch_operations import gaussian_blur, shift_hue, solarize
from vitrail.errors import ConfigError
from vitrail.objectives.views import (
    GLOBAL_VIEWS,
    ViewParameters,
    Views,
    apply_views,
    draw_views,
    make_views,
)

SIZE = (16, 24)


def pictures(count: int, channels: int = 3, size: tuple[int, int] = (40, 32)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (count, channels, *size), generator=generator, dtype=torch.uint8)


def unchanged(boxes: torch.Tensor) -> ViewParameters:
    """Parameters that crop and do nothing else."""
    count = len(boxes)
    off, zero = torch.zeros(count, dtype=torch.bool), torch.zeros(count)
    return ViewParameters(boxes, off, torch.ones(count, 3), torch.arange(3).expand(count, 3), zero, off, zero, off)


def test_crops_equal_torchs_own():
    images = pictures(3)
    boxes = torch.tensor([[0, 0, 40, 32], [3, 5, 20, 9], [30, 1, 7, 31], [8, 8, 16, 24], [0, 0, 1, 1], [39, 31, 1, 1]])
    views = apply_views(images, unchanged(boxes), SIZE)
    for number, (view, box) in enumerate(zip(views, boxes.tolist(), strict=True)):
        top, left, height, width = box
        crop = images[number % 3, :, top : top + height, left : left + width][None]
        expected = F.interpolate(crop, SIZE, mode="bilinear", antialias=True, align_corners=False)[0]
        assert torch.equal(view, expected), box


def test_a_mirrored_view_is_the_mirror_image():
    images, boxes = pictures(2), torch.tensor([[3, 5, 20, 9], [8, 8, 16, 24]])
    plain, drawn = apply_views(images, unchanged(boxes), SIZE), unchanged(boxes)
    mirrored = apply_views(images, drawn._replace(mirrored=torch.tensor([True, False])), SIZE)
    assert torch.equal(mirrored[0], plain[0].flip(2))
    assert torch.equal(mirrored[1], plain[1])


@pytest.mark.parametrize("turn", [-0.5, -0.1, 0.0, 0.04, 0.3])
def test_the_hue_moves_as_in_a_loop(turn):
    colours = list(itertools.product((0, 1, 77, 128, 200, 255), repeat=3))
    images = torch.tensor(colours, dtype=torch.uint8).t().reshape(1, 3, 6, 36)
    shifted = shift_hue(images, torch.tensor([turn])).reshape(3, -1).t().tolist()
    for colour, found in zip(colours, shifted, strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(part / 255 for part in colour))
        expected = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
        assert all(abs(a - 255 * b) <= 0.501 for a, b in zip(found, expected, strict=True)), (colour, found)


def test_blur_equals_a_loop():
    images, radii = pictures(3, 1, (6, 7)), torch.tensor([0.0, 0.7, 3.0])
    blurred = gaussian_blur(images, radii)
    assert torch.equal(blurred[0], images[0])
    for image, radius, found in zip(images[1:], radii[1:].tolist(), blurred[1:], strict=True):
        for y, x in itertools.product(range(6), range(7)):
            total = weights = 0.0
            for row, column in itertools.product(range(6), range(7)):
                weight = math.exp(-((row - y) ** 2 + (column - x) ** 2) / (2 * radius**2))
                total, weights = total + weight * image[0, row, column].item(), weights + weight
            assert abs(found[0, y, x].item() - total / weights) <= 0.51


def test_solarizing_inverts_bright_values():
    values = torch.tensor([0, 127, 128, 255], dtype=torch.uint8)
    assert solarize(values).tolist() == [0, 127, 127, 0]


def test_a_view_depends_on_key_sample_and_number_alone():
    images, samples = pictures(6), torch.tensor([5, 900, 3, 77, 12, 1])
    options = {"views": Views(local_count=3), "size": SIZE, "is_global": False}
    whole = make_views(images, samples, 9, **options).unflatten(0, (3, 6))
    part = torch.tensor([4, 1])
    assert torch.equal(make_views(images[part], samples[part], 9, **options).unflatten(0, (3, 2)), whole[:, part])
    more = make_views(images, samples, 9, views=Views(local_count=5), size=SIZE, is_global=False)
    assert torch.equal(more.unflatten(0, (5, 6))[:3], whole)
    assert not torch.equal(make_views(images, samples, 10, **options).unflatten(0, (3, 6)), whole)
    same = images[:1].expand(6, -1, -1, -1)
    views = make_views(same, samples, 9, **options)
    assert len({view.numpy().tobytes() for view in views}) == 18


def test_parameters_stay_in_their_ranges():
    views, samples = Views(global_area=(0.4, 0.9), hue=0.2, solarize=0.5), torch.arange(4000)
    drawn = draw_views(samples, 1, views, (64, 64), is_global=True)
    top, left, height, width = drawn.boxes.unbind(dim=1)
    area = (height * width) / 64**2
    assert 0.37 < area.min() < 0.42
    assert 0.88 < area.max() < 0.93
    assert min(top.min(), left.min()) == 0
    assert max((top + height).max(), (left + width).max()) == 64
    assert (width / height).log().abs().max() < math.log(4 / 3) + 0.05
    factors = drawn.factors
    assert torch.allclose(factors.amin(dim=0), torch.tensor([0.6, 0.6, 0.8]), atol=0.01)
    assert torch.allclose(factors.amax(dim=0), torch.tensor([1.4, 1.4, 1.2]), atol=0.01)
    unjittered = (factors == 1).all(dim=1)
    assert unjittered.float().mean().item() == pytest.approx(0.2, abs=0.02)
    assert (drawn.hue[unjittered] == 0).all()
    assert drawn.hue.abs().max().item() == pytest.approx(0.2, abs=0.01)
    assert drawn.is_grey.float().mean().item() == pytest.approx(0.2, abs=0.02)
    assert (drawn.radii > 0).float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert drawn.radii.max().item() == pytest.approx(2, abs=0.02)
    first, second = drawn.is_solarized.view(GLOBAL_VIEWS, -1).float().mean(dim=1).tolist()
    assert (first, second) == (0, pytest.approx(0.5, abs=0.03))
    assert (drawn.order.sort(dim=1).values == torch.arange(3)).all()
    assert not draw_views(samples, 1, views, (64, 64), is_global=False).is_solarized.any()


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_any_number_of_channels(channels):
    images = pictures(4, channels)
    views = make_views(images, torch.arange(4), 1, Views(), SIZE, is_global=True)
    assert views.shape == (GLOBAL_VIEWS * 4, channels, *SIZE)
    assert views.dtype == torch.uint8


def test_views_are_the_same_bytes_under_autocast():
    images, samples = pictures(4), torch.arange(4)
    plain = make_views(images, samples, 1, Views(), SIZE, is_global=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(make_views(images, samples, 1, Views(), SIZE, is_global=True), plain)


def test_ranges_must_rise():
    with pytest.raises(ConfigError, match="give the smaller value first"):
        Views(local_area=(0.3, 0.1))
    with pytest.raises(ConfigError, match="local_scale"):
        Views(local_scale=0)
