"""Masked patch prediction: corruption counted and compared bit by bit; targets and losses against loops over pixels."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import vitrail
from samples import randomise, small_vit
from vitrail.data.loader import Batch
from vitrail.data.transforms.mixing import Mixing
from vitrail.model.patches import PatchEmbed
from vitrail.objectives.build import build_objective
from vitrail.objectives.masked_patches import (
    MaskedPatches,
    choose_corruption,
    compare_colours,
    compare_pixels,
    compute_colours_4x4,
    compute_mean_colour,
    corrupt,
    extract_patch_pixels,
    gather_patches,
)
from vitrail.objectives.metrics import add_sums, compute_means

TARGETS = ["mean-colour", "colours-4x4", "pixels"]
OPTIONS = {
    "kind": "masked-patches",
    "loss": "softmax",
    "label_smoothing": 0.0,
    "target": "mean-colour",
    "corrupted": 0.5,
    "masked": 0.8,
    "swapped": 0.1,
    "hidden": 0.75,
    "normalised": True,
    "decoder_width": 32,
    "decoder_depth": 1,
    "decoder_heads": 2,
    "mixing": Mixing(),
    "seed": 0,
}


def vit(**options):
    sizes = {"image_size": (16, 24), "num_classes": 0, "depth": 2, "width": 32, "num_heads": 2, "mlp_dim": 64}
    return randomise(vitrail.create_model("Ti/4", **{**sizes, **options}))


def batch(count: int = 4, size: tuple[int, int] = (16, 24), channels: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, channels, *size), generator=generator, dtype=torch.uint8)
    return Batch(images, {}, torch.arange(count) + 11, torch.ones(count, dtype=torch.bool))


def part_of(whole: Batch, start: int, stop: int) -> Batch:
    return whole.change_tensors(lambda values: values[start:stop])


def photographs() -> torch.Tensor:
    """Two of 427 × 640 pixels, cut to whole patches of 16: a temple and a flower."""
    from sklearn.datasets import load_sample_images

    return torch.from_numpy(np.stack(load_sample_images().images)).permute(0, 3, 1, 2)[:, :, :416, :]


def digits() -> torch.Tensor:
    from sklearn.datasets import load_digits

    return torch.from_numpy((load_digits().images[:200] * 255 / 16).round().astype(np.uint8))[:, None]


# ---- Targets ---------------------------------------------------------------------------------------------------------


def colour_of(pixels: np.ndarray) -> int:
    """(C, rows, columns) uint8, by Python's whole numbers."""
    number = 0
    for channel in pixels:
        total = sum(int(value) for value in channel.ravel())
        number = number * 8 + 8 * total // (256 * channel.size)
    return number


def places_of(image: np.ndarray, stride: int) -> list[np.ndarray]:
    _, height, width = image.shape
    return [
        image[:, top : top + stride, left : left + stride]
        for top in range(0, height, stride)
        for left in range(0, width, stride)
    ]


@pytest.mark.parametrize(("pictures", "stride", "classes"), [(photographs, 16, 512), (digits, 4, 8), (digits, 2, 8)])
def test_mean_colours_of_real_images(pictures, stride, classes):
    images = pictures()
    found = compute_mean_colour(images, stride)
    expected = [[colour_of(place) for place in places_of(image, stride)] for image in images.numpy()]
    assert found.dtype == torch.int64
    assert found.tolist() == expected
    histogram = Counter(colour for row in expected for colour in row)
    assert torch.bincount(found.view(-1), minlength=classes).tolist() == [histogram[c] for c in range(classes)]
    assert len(histogram) >= (60 if classes == 512 else 5)  # many, so this compares something


@pytest.mark.parametrize(("pictures", "stride"), [(lambda: photographs()[:1, :, 160:288, 96:288], 16), (digits, 4)])
def test_colours_of_4x4_cells_of_real_images(pictures, stride):
    images = pictures()
    found = compute_colours_4x4(images, stride)
    expected = [
        [[colour_of(cell) for cell in places_of(place, stride // 4)] for place in places_of(image, stride)]
        for image in images.numpy()
    ]
    assert found.tolist() == expected


def test_three_bits_by_hand():
    """floor(8 · mean / 256), red first; on the borders of levels by a single pixel."""
    image = torch.zeros(1, 3, 4, 8, dtype=torch.uint8)
    image[0, :, :, :4] = torch.tensor([255, 31, 32])[:, None, None]  # levels 7, 0, 1
    image[0, 0, :, 4:] = 64
    image[0, 0, 0, 4] = 63  # a mean just below 64
    image[0, 1, :, 4:] = 64
    image[0, 2, :, 4:] = 200
    assert compute_mean_colour(image, 4).tolist() == [[7 * 64 + 0 * 8 + 1, 1 * 64 + 2 * 8 + 6]]
    assert compute_mean_colour(image[:, :1], 4).tolist() == [[7, 1]]
    assert compute_colours_4x4(image, 4)[0, 1].tolist() == [64 + 16 + 6] + [128 + 16 + 6] * 15


@given(rows=st.integers(1, 4), columns=st.integers(1, 4), stride=st.sampled_from([4, 8]), channels=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_patches_are_in_the_order_of_the_models(rows, columns, stride, channels):
    images = batch(2, (rows * stride, columns * stride), channels).images
    pixels = extract_patch_pixels(images, stride)
    assert torch.equal(pixels, PatchEmbed(channels, stride, 8).split_patches(images))
    if channels <= 3:
        squares = pixels.view(-1, channels, stride, stride).numpy()
        assert compute_mean_colour(images, stride).view(-1).tolist() == [colour_of(square) for square in squares]


def test_strides_of_memory_do_not_matter():
    """Batches come channels last."""
    images = batch().images
    turned = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert torch.equal(compute_colours_4x4(images, 4), compute_colours_4x4(turned, 4))


# ---- What is corrupted -----------------------------------------------------------------------------------------------

IMAGES, PATCHES = 600, 196


@pytest.mark.parametrize("corrupted", [0.5, 0.15])
def test_proportions(corrupted):
    choices = choose_corruption(torch.arange(IMAGES), PATCHES, key=1, corrupted=corrupted)
    count = {0.5: 98, 0.15: 29}[corrupted]
    assert choices.places.shape == (IMAGES, count)
    assert all(len(set(row)) == count for row in choices.places.tolist())
    assert (choices.places.min(), choices.places.max()) == (0, PATCHES - 1)
    draws = choices.places.numel()
    assert draws > 10_000
    for chosen, share in ((choices.masked, 0.8), (choices.swapped, 0.1)):
        assert abs(chosen.double().mean().item() - share) < 4 * math.sqrt(share * (1 - share) / draws)
    assert not (choices.masked & choices.swapped).any()
    # Each for itself: the number masked in an image varies as that of coins does.
    spread = choices.masked.double().sum(dim=1).var().item() / (count * 0.8 * 0.2)
    assert abs(spread - 1) < 4 * math.sqrt(2 / IMAGES)


def test_every_place_is_corrupted_equally_often_and_swapped_with_every_other():
    choices = choose_corruption(torch.arange(20_000), 6, key=2, masked=0.0, swapped=1.0)
    # Three of six in each image: counts vary less than those of coins would, so this is strict.
    counts = torch.bincount(choices.places.flatten(), minlength=6).double()
    assert ((counts - 10_000).abs() < 4 * math.sqrt(20_000 / 4)).all()
    sets = Counter(tuple(sorted(row)) for row in choices.places.tolist())
    assert len(sets) == 20
    assert stats.chisquare(list(sets.values())).pvalue > 1e-4
    assert choices.swapped.all()
    steps = torch.bincount((choices.others - choices.places).view(-1) % 6, minlength=6)
    assert steps[0] == 0  # never itself
    assert stats.chisquare(steps[1:].numpy()).pvalue > 1e-4


def test_what_becomes_of_a_patch_has_nothing_to_do_with_which_it_is():
    choices = choose_corruption(torch.arange(20_000), 6, key=3, masked=0.4, swapped=0.2)
    cells = (torch.arange(3) * 6 + choices.places).flatten()  # the order of choosing, and the place
    for chosen, share in ((choices.masked, 0.4), (choices.swapped, 0.2)):
        for cell in range(18):
            found = chosen.flatten()[cells == cell].double()
            assert abs(found.mean().item() - share) < 4.5 * math.sqrt(share * (1 - share) / len(found))
    steps = (choices.others - choices.places) % 6
    for some in (choices.swapped.flatten(), *(cells == cell for cell in range(18))):
        assert stats.chisquare(torch.bincount(steps.flatten()[some], minlength=6)[1:].numpy()).pvalue > 1e-5


@given(patches=st.integers(1, 40), corrupted=st.floats(0.001, 1), key=st.integers(0, 2**64 - 1))
@settings(max_examples=100, deadline=None)
def test_any_number_of_patches(patches, corrupted, key):
    choices = choose_corruption(torch.arange(5), patches, key, corrupted)
    assert choices.places.shape == (5, max(1, round(corrupted * patches)))
    assert 0 <= choices.others.min() <= choices.others.max() < patches
    assert patches == 1 or (choices.others != choices.places).all()


def test_choices_belong_to_samples_and_keys():
    """Not to the batch they are in: eight together are four and four."""
    samples = torch.tensor([5, 900, 3, 2**40, 7, 8, 6, 0])
    whole = choose_corruption(samples, 24, key=3)
    halves = choose_corruption(samples[:4], 24, key=3), choose_corruption(samples[4:], 24, key=3)
    for name, first, second in zip(whole._fields, *halves, strict=True):
        assert torch.equal(getattr(whole, name), torch.cat([first, second])), name
    for first, second in pairwise(whole.places.sort(dim=1).values.tolist()):
        assert first != second
    assert not torch.equal(whole.places, choose_corruption(samples, 24, key=4).places)


# ---- Corruption ------------------------------------------------------------------------------------------------------


def test_corruption_place_by_place():
    """Every token is the mask embedding, another patch's or its own, to the bit, and as often as chosen."""
    generator = torch.Generator().manual_seed(0)
    tokens, mask_token = torch.randn(100, 196, 8, generator=generator), torch.randn(1, 8, generator=generator)
    choices = choose_corruption(torch.arange(100), 196, key=5)
    found = corrupt(tokens, mask_token, choices)
    expected, seen = tokens.tolist(), Counter()
    before = tokens.tolist()
    for image, (places, masked, swapped, others) in enumerate(zip(*(part.tolist() for part in choices), strict=True)):
        for place, is_masked, is_swapped, other in zip(places, masked, swapped, others, strict=True):
            seen["masked" if is_masked else "swapped" if is_swapped else "kept"] += 1
            if is_masked:
                expected[image][place] = mask_token[0].tolist()
            elif is_swapped:
                assert other != place
                expected[image][place] = before[image][other]
    assert found.tolist() == expected
    assert sum(seen.values()) == 100 * 98
    hidden = (found == mask_token).all(dim=2)
    assert hidden.sum() == seen["masked"]
    assert ((found != tokens).any(dim=2).sum()) == seen["masked"] + seen["swapped"]
    assert min(seen.values()) > 800


def test_gradients_go_where_values_came_from():
    tokens, mask_token = torch.randn(2, 6, 4, requires_grad=True), torch.randn(1, 4, requires_grad=True)
    choices = choose_corruption(torch.arange(2), 6, key=1, masked=0.5, swapped=0.4)
    corrupt(tokens, mask_token, choices).sum().backward()
    uses = torch.ones(2, 6)
    for image in range(2):
        for column, place in enumerate(choices.places[image].tolist()):
            if choices.masked[image, column]:
                uses[image, place] -= 1
            elif choices.swapped[image, column]:
                uses[image, place] -= 1
                uses[image, choices.others[image, column]] += 1
    assert torch.equal(tokens.grad, uses[:, :, None].expand(2, 6, 4))
    assert torch.equal(mask_token.grad, choices.masked.sum().float().expand(1, 4))


# ---- Losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cells", [1, 16])
def test_colours_are_compared_by_cross_entropy(cells):
    generator = torch.Generator().manual_seed(0)
    predictions = torch.randn(3, 5, cells * 8, generator=generator)
    targets = torch.randint(0, 8, (3, 5, cells), generator=generator)
    measured = compare_colours(predictions, targets)
    for image in range(3):
        for patch in range(5):
            losses, right = [], []
            for cell in range(cells):
                logits = predictions[image, patch].double().tolist()[8 * cell : 8 * cell + 8]
                label = int(targets[image, patch, cell])
                losses.append(math.log(sum(math.exp(logit) for logit in logits)) - logits[label])
                right.append(logits.index(max(logits)) == label)
            assert measured["loss"][image, patch].item() == pytest.approx(np.mean(losses), rel=1e-6)
            assert measured["accuracy"][image, patch].item() == pytest.approx(np.mean(right), rel=1e-6)


def test_pixels_are_compared_by_squares():
    measured = compare_pixels(torch.tensor([[[1.0, 2.0], [0.0, 0.0]]]), torch.tensor([[[1.0, 5.0], [3.0, 1.0]]]))
    assert measured["loss"].tolist() == [[4.5, 5.0]]
    assert set(measured) == {"loss"}


@pytest.mark.parametrize("target", TARGETS)
def test_only_corrupted_patches_count(target):
    """Other targets at the other places change nothing; at a corrupted one they do."""
    trained, given_batch = MaskedPatches(vit(), target=target).train(), batch()
    choices = choose_corruption(given_batch.indices, 24, key=7)
    loss = trained(given_batch, 7).loss
    targets = trained.targets(given_batch.images, trained.images(given_batch))
    corrupted = torch.zeros(4, 24, dtype=torch.bool).scatter(1, choices.places, True)

    def changed(places: torch.Tensor) -> torch.Tensor:
        other = torch.where(places[:, :, None], 7 - targets.clamp(max=7), targets)
        trained.targets = lambda images, normalised: other
        return trained(given_batch, 7).loss

    assert torch.equal(changed(~corrupted), loss)
    one = torch.zeros_like(corrupted)
    one[2, choices.places[2, 3]] = True
    assert not torch.equal(changed(one), loss)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_gpu_corrupts_the_same_patches_and_is_never_waited_for(target):
    here, there = batch(), batch().to("cuda")
    for first, second in zip(
        choose_corruption(here.indices, 24, 5), choose_corruption(there.indices, 24, 5), strict=True
    ):
        assert torch.equal(first, second.cpu())
    assert torch.equal(compute_colours_4x4(here.images, 4), compute_colours_4x4(there.images, 4).cpu())
    trained = MaskedPatches(vit(), target=target).train()
    expected = trained(here, 5).loss.item()
    trained.cuda()(there, 5).loss.backward()  # what CUDA sets up on first use may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome = trained(there, 5)
        outcome.loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert outcome.loss.item() == pytest.approx(expected, rel=1e-3)


# ---- The objective ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("options", [{}, {"registers": 2}, {"block": "axial", "pool": "average"}])
def test_forward_is_the_papers_steps(target, options):
    trained, given_batch = MaskedPatches(vit(**options), target=target).train(), batch()
    outcome = trained(given_batch, 9)
    images = given_batch.images.float() / 127.5 - 1
    choices = choose_corruption(given_batch.indices, 24, key=9)
    encoded = trained.model.encode(corrupt(trained.model.tokens(images), trained.mask_token, choices))
    predictions = (encoded @ trained.prediction.weight.T + trained.prediction.bias)[:, -24:].double()
    losses, right = [], []
    for image in range(4):
        places = places_of(given_batch.images[image].numpy(), 4)
        for place in choices.places[image].tolist():
            predicted = predictions[image, place]
            if target == "pixels":
                pixels = torch.from_numpy(places[place].astype(np.float64)).flatten() / 127.5 - 1
                losses.append((predicted - pixels).square().mean().item())
                continue
            cells = places_of(places[place], 1 if target == "colours-4x4" else 4)
            labels = torch.tensor([colour_of(cell) for cell in cells])
            logits = predicted.view(len(cells), 512)
            losses.append(-logits.log_softmax(dim=1)[range(len(cells)), labels].mean().item())
            right.append((logits.argmax(dim=1) == labels).double().mean().item())
    assert len(losses) == 4 * 12
    assert outcome.loss.item() == pytest.approx(np.mean(losses), rel=1e-5)
    assert outcome.sums["loss"].tolist() == pytest.approx([sum(losses), 48], rel=1e-5)
    assert outcome.loss.dtype == torch.float32
    if target == "pixels":
        assert set(outcome.sums) == {"loss"}
    else:
        assert outcome.sums["accuracy"].tolist() == pytest.approx([sum(right), 48])


VARIETIES = [
    ({}, set()),
    ({"pool": "attention"}, {"pool"}),
    ({"pool": "average", "norm_after_pool": True, "class_token": True}, {"pool_norm"}),
    ({"num_classes": 5, "representation_size": 16}, {"head"}),
    ({"registers": 2, "position_prefix": "all"}, set()),
    ({"block": "axial", "pool": "attention", "position": "learned-2d"}, {"pool"}),
    ({"position": "relative", "input_norm": True, "layer_scale": 0.1}, set()),
    ({"position_at": "every-layer"}, set()),
    ({"conv_stem": [(8,), (16,)], "in_channels": 1}, set()),
]


@pytest.mark.parametrize(("options", "unused"), VARIETIES, ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_every_parameter_that_learns_gets_a_gradient(target, options, unused):
    trained = MaskedPatches(vit(**options), target=target).train()
    trained(batch(channels=options.get("in_channels", 3)), 0).loss.backward()
    learning = {name for name, parameter in trained.named_parameters() if parameter.requires_grad}
    assert learning == {name for name, parameter in trained.named_parameters() if parameter.grad is not None}
    assert {"mask_token", "prediction.weight", "prediction.bias"} <= learning
    assert trained.mask_token.grad.abs().max() > 0
    assert trained.prediction.weight.grad.abs().max() > 0
    frozen = {name for name, _ in trained.named_parameters()} - learning
    assert {name.split(".")[1] for name in frozen} == unused


@pytest.mark.slow
def test_a_hybrid():
    """Places are those of the image, not of the feature map."""
    model = randomise(
        vitrail.create_model("R26+S/32", image_size=(32, 64), width=32, depth=1, num_heads=2, mlp_dim=48, num_classes=0)
    )
    trained = MaskedPatches(model, target="colours-4x4").train()
    outcome = trained(batch(2, (32, 64)), 0)
    assert outcome.sums["loss"][1] == 2
    outcome.loss.backward()
    assert trained.mask_token.grad is not None
    assert trained.parts_to_compile() == [model.backbone, model.encoder]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("corrupted", [0.5, 0.15, 1.0, 0.001])
def test_eight_are_four_and_four(target, corrupted):
    """Loss and gradient, so that neither ranks nor accumulation change what is learned."""
    trained, whole = MaskedPatches(vit(), target=target, corrupted=corrupted).train(), batch(8)
    outcome = trained(whole, 6)
    outcome.loss.backward()
    expected = {name: p.grad.clone() for name, p in trained.named_parameters() if p.grad is not None}
    trained.zero_grad()
    total = {}
    for start in (0, 4):
        half = trained(part_of(whole, start, start + 4), 6)
        (half.loss / 2).backward()
        add_sums(total, half.sums)
    assert compute_means(total) == pytest.approx(compute_means(outcome.sums), rel=1e-6)
    assert total["loss"][1] == 8 * max(1, round(24 * corrupted))
    for name, parameter in trained.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_evaluation_counts_what_the_mask_says(target):
    evaluated = MaskedPatches(vit(dropout=0.5), target=target).eval()
    whole = batch(4)
    filled = replace(whole, mask=torch.tensor([True, True, False, False]))
    filled.images[2:] = 0
    filled.indices[2:] = -1
    outcome, alone = evaluated(filled, 1), evaluated(part_of(whole, 0, 2), 1)
    assert outcome.loss.item() == pytest.approx(alone.loss.item(), rel=1e-6)
    assert outcome.sums["loss"][1] == 2 * 12
    assert compute_means(outcome.sums) == pytest.approx(compute_means(alone.sums), rel=1e-6)
    assert outcome.loss.item() == pytest.approx(compute_means(alone.sums)["loss"], rel=1e-6)
    nothing = evaluated(replace(filled, mask=torch.zeros(4, dtype=torch.bool)), 1)
    assert nothing.loss.item() == 0
    assert nothing.sums["loss"].tolist() == [0, 0]


def test_images_of_another_size_than_the_models():
    trained = MaskedPatches(vit()).train()
    outcome = trained(batch(2, (32, 12)), 0)
    assert outcome.sums["loss"][1] == 2 * 12


def test_a_seed_decides_initial_values_and_disturbs_nobody():
    model = vit(width=256)
    torch.manual_seed(0)
    undisturbed = torch.rand(3)
    torch.manual_seed(0)
    first, again, other = (MaskedPatches(model, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), undisturbed)
    assert torch.equal(first.mask_token, again.mask_token)
    assert torch.equal(first.prediction.weight, again.prediction.weight)
    assert not torch.equal(first.mask_token, other.mask_token)
    assert first.mask_token.shape == (1, 256)
    assert abs(first.mask_token.std().item() / 0.02 - 1) < 4 / math.sqrt(2 * 256)
    weight = first.prediction.weight
    assert abs(weight.std().item() * 16 - 1) < 4 / math.sqrt(2 * weight.numel())  # LeCun: 1 / √256
    assert first.prediction.bias.eq(0).all()


@pytest.mark.parametrize(
    ("target", "channels", "outputs"),
    [("mean-colour", 3, 512), ("mean-colour", 1, 8), ("colours-4x4", 3, 8192), ("pixels", 3, 48), ("pixels", 4, 64)],
)
def test_predictions(target, channels, outputs):
    assert MaskedPatches(vit(in_channels=channels), target=target).prediction.out_features == outputs


def test_what_is_compiled_is_called():
    trained, calls = MaskedPatches(vit()).train(), []
    parts = trained.parts_to_compile()
    assert parts == [trained.model.encoder]
    parts[0].register_forward_hook(lambda *call: calls.append(call))
    trained(batch(), 0)
    assert len(calls) == 1


def test_at():
    values = torch.arange(24).view(2, 4, 3)
    assert gather_patches(values, torch.tensor([[3, 0], [1, 1]])).tolist() == [
        [[9, 10, 11], [0, 1, 2]],
        [[15, 16, 17]] * 2,
    ]


def test_built_from_plain_values():
    values = {"target": "colours-4x4", "corrupted": 0.25, "masked": 0.5, "swapped": 0.3, "seed": 4}
    built = build_objective(vit(), **{**OPTIONS, **values}).train()
    same = MaskedPatches(vit(), **values).train()
    assert torch.equal(built(batch(), 1).loss, same(batch(), 1).loss)
    with pytest.raises(vitrail.ConfigError, match="mixup"):
        build_objective(vit(), **{**OPTIONS, "mixing": Mixing(mixup=0.2)})


REFUSALS = [
    (lambda: vitrail.create_model("BiT-R50x1", device="meta"), {}, "BitResNet"),
    (lambda: vit(in_channels=4), {}, "sees 4"),
    (lambda: small_vit("S/6", image_size=18), {"target": "colours-4x4"}, "not 6"),
    (vit, {"target": "edges"}, "edges"),
    (vit, {"corrupted": 0.0}, "corrupted = 0"),
    (vit, {"masked": 0.8, "swapped": 0.3}, "swapped = 0"),
]


@pytest.mark.parametrize(("model", "options", "message"), REFUSALS)
def test_refusals_say_what_to_do(model, options, message):
    with pytest.raises(vitrail.ConfigError, match=message):
        MaskedPatches(model(), **options)
