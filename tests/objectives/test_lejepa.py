"""LeJEPA: its statistic against a loop and against theory, its distance, and what does not change the outcome."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import vitrail
from samples import randomise
from vitrail.data.loader import Batch
from vitrail.errors import ConfigError
from vitrail.objectives.lejepa import KNOTS, LAST_KNOT, LeJepa, compute_distances, compute_sigreg, draw_directions
from vitrail.objectives.projection import BatchStandardise
from vitrail.objectives.views import Views

SMALL = {"projector_width": 24, "projected": 8, "directions": 16}
NORMAL = math.sqrt(2 * math.pi) * (1 - 1 / math.sqrt(3))
"""The expected statistic of true samples: ∫ (1 − exp(−t²)) exp(−t²/2) dt."""
COLLAPSED = math.sqrt(2 * math.pi) * (1 - math.sqrt(2) + 1 / math.sqrt(3))
"""The statistic of N equal points at 0, divided by N: ∫ (1 − exp(−t²/2))² exp(−t²/2) dt."""


def vit(**options):
    sizes = {"image_size": (16, 24), "num_classes": 0, "depth": 2, "width": 32, "num_heads": 2, "mlp_dim": 64}
    return randomise(vitrail.create_model("Ti/4", **{**sizes, **options}))


def batch(count: int = 6, channels: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, channels, 16, 24), generator=generator, dtype=torch.uint8)
    return Batch(images, {}, torch.arange(count) + 11, torch.ones(count, dtype=torch.bool))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_statistic_equals_a_loop():
    points, directions = draw(3, 7, 5), draw_directions(5, 4, 1, torch.device("cpu")).double()
    total = 0.0
    for view in points:
        for direction in directions.t():
            values, integral = [], 0.0
            for knot in range(-KNOTS + 1, KNOTS):
                t = knot * LAST_KNOT / (KNOTS - 1)
                gap = sum(complex(math.cos(t * (p @ direction)), math.sin(t * (p @ direction))) for p in view) / 7
                values.append(abs(gap - math.exp(-(t**2) / 2)) ** 2 * math.exp(-(t**2) / 2))
            for left, right in itertools.pairwise(values):
                integral += (left + right) / 2 * LAST_KNOT / (KNOTS - 1)
            total += 7 * integral / (3 * 4)
    assert compute_sigreg(points, directions).item() == pytest.approx(total, rel=1e-12)


def test_true_samples_have_the_expected_statistic():
    points, directions = draw(60, 400, 6), draw_directions(6, 32, 1, torch.device("cpu")).double()
    assert compute_sigreg(points, directions).item() == pytest.approx(NORMAL, abs=0.05)


def test_other_points_have_a_large_one():
    directions = draw_directions(6, 32, 1, torch.device("cpu")).double()
    collapsed = compute_sigreg(torch.zeros(2, 400, 6, dtype=torch.float64), directions).item()
    assert collapsed == pytest.approx(400 * COLLAPSED, rel=1e-3)
    for points in (draw(2, 400, 6) * 2, draw(2, 400, 6) + 1, draw(2, 400, 6).sign()):
        assert compute_sigreg(points, directions).item() > 3 * NORMAL


def test_gradients_are_exact():
    directions = draw_directions(3, 5, 1, torch.device("cpu")).double()
    points = draw(3, 4, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: compute_sigreg(p, directions), (points,))
    assert torch.autograd.gradcheck(compute_distances, (points,))


def test_distances_equal_a_loop():
    points = draw(4, 5, 3)
    for image, found in enumerate(compute_distances(points).tolist()):
        centre = (points[0, image] + points[1, image]) / 2
        expected = sum(((point - centre) ** 2).mean().item() for point in points[:, image]) / 4
        assert found == pytest.approx(expected, rel=1e-12)
    assert (compute_distances(points[:1].expand(4, -1, -1)) == 0).all()


def test_directions_are_random_unit_vectors():
    directions = draw_directions(16, 4000, 1, torch.device("cpu"))
    assert torch.allclose(directions.norm(dim=0), torch.ones(4000))
    assert directions.mean(dim=1).abs().max() < 0.02
    assert torch.allclose(directions @ directions.t() / 4000, torch.eye(16) / 16, atol=0.01)
    assert torch.equal(draw_directions(16, 4000, 1, torch.device("cpu")), directions)
    assert not torch.equal(draw_directions(16, 4000, 2, torch.device("cpu")), directions)


def test_batch_norm_equals_torchs():
    ours, theirs, x = BatchStandardise(5), torch.nn.BatchNorm1d(5), draw(9, 5).float() * 3 + 1
    ours.reset_parameters()
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_the_loss_is_made_of_its_parts(norm):
    outcome = LeJepa(vit(), normality=0.1, projector_norm=norm, **SMALL).train()(batch(), 5)
    means = {name: (pair[0] / pair[1]).item() for name, pair in outcome.sums.items()}
    assert means["loss"] == pytest.approx(0.9 * means["distance"] + 0.1 * means["normality"], rel=1e-5)
    assert outcome.loss.item() == pytest.approx(means["loss"], rel=1e-5)
    assert all(pair[1] == 6 for pair in outcome.sums.values())


def test_equal_views_have_no_distance():
    same = Views(global_area=(1, 1), local_count=0, flip=0, jitter=0, grey=0, blur=0, solarize=0)
    square = replace(batch(), images=batch().images[:, :, :, :16])
    outcome = LeJepa(vit(image_size=16), views=same, **SMALL).train()(square, 5)
    assert outcome.sums["distance"][0] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("options", [{"pool": "class"}, {"pool": "average", "position": "sin-cos"}, {"in_channels": 1}])
def test_all_weights_learn(options):
    trained = LeJepa(vit(**options), **SMALL).train()
    trained(batch(channels=options.get("in_channels", 3)), 5).loss.backward()
    missing = [name for name, p in trained.named_parameters() if p.requires_grad and not p.grad.any()]
    # A class token that starts at 0 and biases before a softmax over keys may have none; here all values are random.
    assert not [name for name in missing if "k_bias" not in name]


def test_an_evaluation_ignores_padding():
    evaluated = LeJepa(vit(), **SMALL).eval()
    whole = batch()
    mask = torch.tensor([True, True, True, True, False, False])
    padded = replace(whole, mask=mask, images=whole.images * mask[:, None, None, None])
    short = whole.change_tensors(lambda values: values[:4])
    for name, pair in evaluated(padded, 1).sums.items():
        assert pair.tolist() == pytest.approx(evaluated(short, 1).sums[name].tolist(), rel=1e-5)
    assert evaluated(replace(whole, mask=torch.zeros(6, dtype=torch.bool)), 1).sums["loss"].tolist() == [0, 0]


def test_the_same_key_gives_the_same_outcome():
    trained = LeJepa(vit(), **SMALL).train()
    assert torch.equal(trained(batch(), 5).loss, trained(batch(), 5).loss)
    assert not torch.equal(trained(batch(), 5).loss, trained(batch(), 6).loss)


def test_statistics_are_computed_in_float32_under_autocast():
    trained = LeJepa(vit(), projector_norm="layer", **SMALL).train()
    with torch.autocast("cpu", torch.bfloat16):
        outcome = trained(batch(), 5)
    assert outcome.loss.dtype == torch.float32
    assert outcome.loss.item() == pytest.approx(trained(batch(), 5).loss.item(), rel=0.05)


def test_refusals_say_what_to_do():
    with pytest.raises(ConfigError, match="between 0 and 1"):
        LeJepa(vit(), normality=0.0)
    with pytest.raises(ConfigError, match="local_count=0"):
        LeJepa(vit(position="relative"))
