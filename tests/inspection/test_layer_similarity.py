"""How alike the states of patches and of layers are, against loops in float64 and the definitions."""

from __future__ import annotations

import math
import warnings
import weakref
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from peers import timm
from samples import images, randomise, small_vit
from vitrail.errors import ConfigError, InputError, NotApplicableError
from vitrail.inspection.measure import anatomy, similarity
from vitrail.inspection.measure.components import patch_features
from vitrail.inspection.measure.similarity import (
    cosine_similarity,
    layer_similarity,
    measure_layers,
    measure_layers_between,
    measure_tokens,
    token_similarity,
)
from vitrail.model.architecture import Backbone, ResNetArchitecture, TimmArchitecture, VitArchitecture
from vitrail.model.create import build_empty_model
from vitrail.model.variants import BIT, HYBRID

KINDS = [
    {},
    {"registers": 2, "pool": "class+average"},
    {"pool": "average", "position": "none"},
    {"pool": "attention", "registers": 1},
    {"pool": "average", "block": "axial"},
    {"position": "relative", "position_prefix": "all"},
]


def vit(**options):
    return small_vit(dtype=torch.float64, **{"depth": 3, **options})


def blocks_alone(**options):
    """A model whose last norm follows the pooling, so that its blocks are all the layers that there are."""
    return vit(pool="average", norm_after_pool=True, **options)


def pictures(count=6, size=(16, 24)):
    return images(count, size, dtype=torch.float64)


def bit():
    """Feature maps of 16 × 16, 8 × 8 and 4 × 4 for images of 64."""
    backbone = Backbone(blocks=(1, 2, 1), **BIT)
    model = build_empty_model(ResNetArchitecture(image_size=64, num_classes=3, backbone=backbone))
    return randomise(model.to_empty(device="cpu").double())


def hybrid():
    backbone = Backbone(blocks=(1, 1), **HYBRID)
    fields = {"image_size": 32, "patch_size": 1, "width": 16, "depth": 2, "mlp_dim": 16, "num_heads": 2}
    model = build_empty_model(VitArchitecture(backbone=backbone, num_classes=3, **fields))
    return randomise(model.to_empty(device="cpu").double())


def network(name, image_size=None):
    """Of timm's, with every tensor of its checkpoint random."""
    size = image_size or timm.models.get_pretrained_cfg(name).input_size[1:]
    model = build_empty_model(TimmArchitecture(name=name, image_size=size, num_classes=5))
    generator = torch.Generator().manual_seed(0)
    state = {}
    for key, tensor in model.state_dict().items():
        values = torch.randn(tensor.shape, generator=generator).abs() * 0.1 + (0.9 if tensor.ndim == 1 else -0.08)
        state[key] = values if tensor.is_floating_point() else torch.zeros(tensor.shape, dtype=tensor.dtype)
    model.load_state_dict(state, assign=True)
    return model.double().eval()


@torch.no_grad()
def states_of_bit(model, batch):
    """What each unit gives out, one after the other."""
    x = model.backbone.root(batch)
    x = F.max_pool2d(F.pad(x, model.backbone.pool_pad), kernel_size=3, stride=2)
    return [x := unit(x) for unit in model.backbone.units]


def by_loop(patches):
    """(rows, columns, D) → (rows, columns, rows, columns), one pair at a time."""
    rows, columns = patches.shape[:2]
    found = np.empty((rows, columns, rows, columns))
    for a in np.ndindex(rows, columns):
        for b in np.ndindex(rows, columns):
            x, y = patches[a].tolist(), patches[b].tolist()
            lengths = math.sqrt(math.fsum(v * v for v in x)) * math.sqrt(math.fsum(v * v for v in y))
            found[a + b] = math.fsum(v * w for v, w in zip(x, y, strict=True)) / lengths
    return found


def hsic_of_lists(x, y, total):
    """Song et al. 2012, equation 5, term by term: n lists each → a number, of whatever kind the entries are."""
    n, every = len(x), range(len(x))

    def products(rows):
        dot = [[total(v * w for v, w in zip(a, b, strict=True)) for b in rows] for a in rows]
        return [[dot[i][j] if i != j else 0 for j in every] for i in every]

    k, m = products(x), products(y)
    trace = total(k[i][j] * m[j][i] for i in every for j in every)
    sums = total(k[i][j] for i in every for j in every) * total(m[i][j] for i in every for j in every)
    across = total(k[i][j] * m[j][q] for i in every for j in every for q in every)
    return (trace + sums / ((n - 1) * (n - 2)) - 2 * across / (n - 2)) / (n * (n - 3))


def hsic_by_definition(x, y):
    """(n, F) and (n, F') → a number."""
    return hsic_of_lists(x.tolist(), y.tolist(), math.fsum)


def cka_by_definition(ours, theirs, sizes):
    """Nguyen et al. 2021, equation 3: states of each layer, cut into batches."""
    found = np.empty((len(ours), len(theirs)))
    for row, a in enumerate(ours):
        for column, b in enumerate(theirs):
            batches = list(zip(a.flatten(1).split(sizes), b.flatten(1).split(sizes), strict=True))
            both = sum(hsic_by_definition(x, y) for x, y in batches)
            found[row, column] = both / math.sqrt(
                sum(hsic_by_definition(x, x) for x, _ in batches) * sum(hsic_by_definition(y, y) for _, y in batches)
            )
    return found


def states(model, batch):
    with torch.no_grad():
        return model.intermediate_layers(batch, range(model.architecture.depth))


# Patches


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("layer", [0, 2, -1, -3])
def test_patches_against_a_loop(options, layer):
    model, batch = vit(**options), pictures(2)
    expected = states(model, batch)[layer][:, model.prefix :].unflatten(1, (2, 3))
    found = token_similarity(model, batch, layer)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [by_loop(patches) for patches in expected], rtol=0, atol=1e-12)


def test_patches_at_another_size_and_of_hybrids():
    model, batch = vit(), pictures(1, (32, 16))
    expected = by_loop(states(model, batch)[-1][0, 1:].unflatten(0, (4, 2)))
    np.testing.assert_allclose(token_similarity(model, batch)[0], expected, rtol=0, atol=1e-12)
    model, batch = hybrid(), pictures(1, (16, 32))
    expected = by_loop(states(model, batch)[0][0, 1:].unflatten(0, (2, 4)))
    np.testing.assert_allclose(token_similarity(model, batch, 0)[0], expected, rtol=0, atol=1e-12)


def test_places_of_feature_maps_of_a_resnet():
    model, batch = bit(), pictures(2, (64, 32))
    expected = states_of_bit(model, batch)
    assert expected[-1].shape[2:] == (4, 2)
    for layer in (1, 3):
        maps = expected[layer].permute(0, 2, 3, 1)
        found = token_similarity(model, batch, layer)
        np.testing.assert_allclose(found, [by_loop(patches) for patches in maps], rtol=0, atol=1e-12)


@torch.no_grad()
def test_places_of_feature_maps_of_timm():
    model, batch = network("test_convnext", (64, 96)), pictures(1, (64, 96))
    state = model.peer.stages[:2](model.peer.stem(batch))
    expected = by_loop(state[0].permute(1, 2, 0))
    np.testing.assert_allclose(token_similarity(model, batch, 1)[0], expected, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def swin():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # timm resizes tables of windows in a way that torch frowns upon
        return network("swin_tiny_patch4_window7_224", (64, 64))


@pytest.mark.slow
@torch.no_grad()
def test_places_of_feature_maps_of_timm_with_channels_last(swin):
    batch = pictures(1, (64, 64))
    state = swin.peer.layers[:3](swin.peer.patch_embed(batch))
    assert state.shape == (1, 4, 4, 384)
    np.testing.assert_allclose(token_similarity(swin, batch, 2)[0], by_loop(state[0]), rtol=0, atol=1e-12)


def test_in_parts_as_at_once(monkeypatch):
    model, batch = vit(), pictures(5)
    whole = token_similarity(model, batch)
    monkeypatch.setattr(anatomy, "MOST_IMAGES_AT_ONCE", 2)
    np.testing.assert_allclose(token_similarity(model, batch), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", KINDS)
def test_the_last_norm_is_the_last_layer_of_all(options):
    model, batch = vit(**options), pictures(2)
    expected = token_similarity(model, batch, None)
    features = patch_features(model, batch)
    np.testing.assert_allclose(expected, [by_loop(patches) for patches in features], rtol=0, atol=1e-12)
    found = measure_tokens(model, batch)
    assert found.layers == ("block 1", "block 2", "block 3", "the last norm")
    np.testing.assert_array_equal(found.similarity[3], expected)
    assert not np.allclose(found.similarity[2], expected), "the norm turns them"


def test_a_model_whose_blocks_are_followed_by_no_norm_ends_with_them():
    model, batch = blocks_alone(), pictures(1)
    np.testing.assert_array_equal(token_similarity(model, batch, None), token_similarity(model, batch, -1))


def test_zeros_are_like_themselves_only():
    vectors = torch.tensor([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0], [-4.0, 3.0], [0.0, 0.0], [0.0, 0.0]])
    expected = np.eye(6)
    expected[0, 2] = expected[2, 0] = 1
    np.testing.assert_array_equal(cosine_similarity(vectors), expected)
    vectors = vectors.double()
    vectors[4] = torch.tensor([-3e-100, -4e-100], dtype=torch.float64)
    np.testing.assert_allclose(cosine_similarity(vectors)[4], [-1, 0, -1, 0, 1, 0], rtol=0, atol=1e-15)


# As many layers as fit


@pytest.mark.parametrize(("layers", "chosen"), [(12, range(1, 13)), (5, [1, 4, 6, 9, 12]), (4, [1, 5, 8, 12])])
def test_layers_that_are_kept_are_spread_evenly_with_the_last(layers, chosen):
    model, batch = blocks_alone(depth=12), pictures(2)
    found = measure_tokens(model, batch, most_bytes=2 * 6**2 * layers)
    assert found.layers == tuple(f"block {number}" for number in chosen)
    for name, map_of in zip(found.layers, found.similarity, strict=True):
        layer = int(name.removeprefix("block ")) - 1
        np.testing.assert_allclose(map_of, token_similarity(model, batch, layer), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("most_bytes", "grid", "layers"),
    [
        (2 * 4 * 6**2 - 1, (1, 2), 12),
        (2 * 5 * 2**2, (1, 2), 5),
        (2 * 4 * 2**2, (1, 2), 4),
        (2 * 4 * 2**2 - 1, (1, 1), 12),
        (8, (1, 1), 4),
        (1, (1, 1), 4),  # less than the least that can be told
    ],
)
def test_grids_are_made_coarser_before_there_are_fewer_than_four_layers(most_bytes, grid, layers):
    found = measure_tokens(blocks_alone(depth=12), pictures(2), most_bytes=most_bytes)
    assert len(found.layers) == layers
    assert (found.layers[0], found.layers[-1]) == ("block 1", "block 12")
    assert {map_of.shape for map_of in found.similarity} == {(2, *grid, *grid)}


def test_a_model_of_few_layers_keeps_them_all():
    found = measure_tokens(blocks_alone(depth=2), pictures(2), most_bytes=2 * 2 * 6**2)
    assert found.layers == ("block 1", "block 2")
    assert found.similarity[0].shape == (2, 2, 3, 2, 3)


@pytest.mark.parametrize(
    ("grid", "expected", "layers"),
    [
        ((14, 14), (14, 14), 12),  # 224 pixels in patches of 16
        ((24, 24), (24, 24), 4),  # 384
        ((30, 30), (15, 15), 12),  # 480
        ((37, 37), (19, 19), 11),  # 518 in patches of 14, as DINOv2 has them
        ((32, 48), (16, 24), 10),
        ((1, 1800), (1, 450), 7),  # by 3 it would still be too fine
        ((1, 600), (1, 300), 12),
    ],
)
def test_every_resolution_has_at_least_four_layers(grid, expected, layers):
    model = small_vit(
        "Ti/1",
        width=8,
        depth=12,
        num_heads=1,
        mlp_dim=4,
        image_size=grid,
        num_classes=0,
        position="sin-cos",
        pool="average",
        norm_after_pool=True,
    )
    found = measure_tokens(model, images(8, grid))
    assert len(found.layers) == layers
    assert found.layers[-1] == "block 12"
    assert {map_of.shape for map_of in found.similarity} == {(8, *expected, *expected)}


def averaged(patches, factor):
    """(rows, columns, D): the mean over blocks, which share a row or column where the grid does not divide."""
    sides = [-(-side // factor) for side in patches.shape[:2]]
    cuts = [
        [(place * side // count, -(-(place + 1) * side // count)) for place in range(count)]
        for side, count in zip(patches.shape[:2], sides, strict=True)
    ]
    return torch.stack(
        [torch.stack([patches[a:b, c:d].flatten(0, 1).mean(dim=0) for c, d in cuts[1]]) for a, b in cuts[0]]
    )


@pytest.mark.parametrize(
    ("size", "factor", "grid"), [((32, 48), 2, (2, 3)), ((40, 56), 2, (3, 4)), ((88, 24), 3, (4, 1))]
)
def test_patches_of_fine_grids_are_averaged_before_they_are_compared(size, factor, grid, monkeypatch):
    monkeypatch.setattr(similarity, "MOST_PLACES", 12 if factor == 2 else 10)
    model, batch = blocks_alone(), pictures(2, size)
    found = measure_tokens(model, batch)
    assert found.layers == ("block 1", "block 2", "block 3")
    for state, map_of in zip(states(model, batch), found.similarity, strict=True):
        patches = state[:, model.prefix :].unflatten(1, (size[0] // 8, size[1] // 8))
        expected = [by_loop(averaged(image, factor)) for image in patches]
        assert map_of.shape == (2, *grid, *grid)
        np.testing.assert_allclose(map_of, expected, rtol=0, atol=1e-12)
    exact = token_similarity(model, batch)
    assert exact.shape[1:3] == (size[0] // 8, size[1] // 8), "the function itself compares every patch"


def test_grids_that_differ_are_averaged_each_for_itself():
    model = bit()  # a fourth, an eighth, an eighth, a sixteenth of the side
    found = measure_tokens(model, pictures(1, (160, 128)))
    assert found.layers == ("stage 1, unit 1", "stage 2, unit 1", "stage 2, unit 2", "stage 3, unit 1")
    grids = [(20, 16), (20, 16), (20, 16), (10, 8)]
    assert [map_of.shape for map_of in found.similarity] == [(1, *grid, *grid) for grid in grids]


def test_networks_without_maps_say_so():
    model = network("xcit_nano_12_p16_224", (32, 32))
    with pytest.raises(NotApplicableError, match="xcit_nano_12_p16_224"):
        measure_tokens(model, pictures(1, (32, 32)))


def test_layers_are_counted_as_they_are():
    with pytest.raises(ConfigError, match=r"layer 3 .*0 to 2"):
        token_similarity(vit(), pictures(1), 3)
    with pytest.raises(InputError, match="single image"):
        token_similarity(vit(), pictures(1)[0])


# Layers


@pytest.mark.parametrize("options", KINDS)
def test_layers_against_the_definition(options):
    model, batch = vit(**options), pictures(5)
    found = measure_layers(model, batch)
    assert found.names == found.others == ("block 1", "block 2", "block 3")
    assert (found.cka.dtype, found.images) == (np.float64, 5)
    expected = cka_by_definition(states(model, batch), states(model, batch), [5])
    np.testing.assert_allclose(found.cka, expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(np.diag(found.cka), 1, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(layer_similarity(model, batch), found.cka)


def test_in_batches_against_the_definition(monkeypatch):
    monkeypatch.setattr(similarity, "MOST_IMAGES", 5)
    model, batch = vit(depth=2), pictures(13)
    expected = cka_by_definition(states(model, batch), states(model, batch), [5, 4, 4])
    whole = cka_by_definition(states(model, batch), states(model, batch), [13])
    assert abs(expected - whole).max() > 1e-4
    np.testing.assert_allclose(layer_similarity(model, batch), expected, rtol=0, atol=1e-9)


def test_two_models_with_images_of_their_own(monkeypatch):
    monkeypatch.setattr(similarity, "MOST_IMAGES", 5)
    a, b = vit(depth=2), bit()
    images_a, images_b = pictures(9), pictures(9, (32, 32))
    found = measure_layers_between(a, images_a, b, images_b)
    assert (found.names, found.others) == (tuple(anatomy.list_layers(a)), tuple(anatomy.list_layers(b)))
    expected = cka_by_definition(states(a, images_a), states_of_bit(b, images_b)[2:], [5, 4])
    np.testing.assert_allclose(found.cka[:, 2:], expected, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(layer_similarity(a, images_a, b, images_b), found.cka)
    np.testing.assert_allclose(layer_similarity(b, images_b, a, images_a), found.cka.T, rtol=0, atol=1e-9)


def test_the_same_images_serve_both_where_no_others_are_given():
    a, b, batch = vit(), vit(pool="average"), pictures(4)
    np.testing.assert_array_equal(layer_similarity(a, batch, b), layer_similarity(a, batch, b, batch))


def test_neither_turns_nor_scales_nor_shifts_change_anything():
    model, batch = vit(), pictures(6)
    before = layer_similarity(model, batch)
    features = 7 * 32  # of all tokens together
    turn = torch.linalg.qr(torch.randn(features, features, generator=torch.Generator().manual_seed(0)).double())[0]
    shift = torch.randn(7, 32, generator=torch.Generator().manual_seed(1)).double() * 50

    def changed(module, arguments, output):
        return 3 * (output.flatten(1) @ turn).unflatten(1, (7, 32)) + shift

    other = vit()
    other.encoder.blocks[-1].register_forward_hook(changed)
    np.testing.assert_allclose(layer_similarity(other, batch), before, rtol=0, atol=1e-9)
    between = layer_similarity(model, batch, other)
    np.testing.assert_allclose(between, before, rtol=0, atol=1e-9)
    assert between[-1, -1] == pytest.approx(1, abs=1e-12)


def test_what_images_have_in_common_costs_no_digits():
    """A large part that all share, against the definition in whole fractions."""
    generator = np.random.default_rng(0)
    ours, theirs = generator.standard_normal((5, 3)) + 1e6, generator.standard_normal((5, 4)) - 1e5

    def exact(values):
        return [[Fraction(value) for value in row] for row in values.tolist()]

    expected = hsic_of_lists(exact(ours), exact(theirs), sum)
    scale = hsic_of_lists(exact(ours), exact(ours), sum) * hsic_of_lists(exact(theirs), exact(theirs), sum)
    grams = [similarity._compute_gram(torch.from_numpy(values))[None] for values in (ours, theirs)]
    found = similarity._compute_cka([grams[0]], [grams[1]])
    assert found[0, 0] == pytest.approx(float(expected) / math.sqrt(scale), abs=1e-8)
    assert abs(hsic_by_definition(*map(torch.from_numpy, (ours, theirs))) / float(expected) - 1) > 1e-3


def test_unrelated_representations_have_nothing_in_common():
    """Noise that does not know the image: the plain estimate would be far above 0 with more features than images."""
    model, generator = vit(depth=2), torch.Generator().manual_seed(0)
    for block in model.encoder.blocks:
        block.register_forward_hook(lambda module, arguments, z: torch.randn(z.shape, generator=generator).double())
    found = layer_similarity(model, pictures(128))
    np.testing.assert_allclose(np.diag(found), 1, rtol=0, atol=1e-12)
    assert abs(found[0, 1]) < 0.1


def test_a_layer_that_gives_the_same_for_every_image():
    model = vit().float()
    value = torch.full((1, 7, 32), 0.1)
    noise = 1 + 1e-7 * torch.rand(6, 7, 32, generator=torch.Generator().manual_seed(0))  # as rounding leaves it
    model.encoder.blocks[1].register_forward_hook(lambda module, arguments, z: value * noise)
    found = layer_similarity(model, images(6))
    np.testing.assert_array_equal(found[1], [0, 0, 0])
    np.testing.assert_array_equal(found[:, 1], [0, 0, 0])
    assert found[0, 0] == pytest.approx(1)


def test_what_is_no_number_is_not_hidden():
    model = vit()
    model.encoder.blocks[-1].register_forward_hook(lambda module, arguments, z: z * math.nan)
    found = layer_similarity(model, pictures(4))
    assert np.isnan(found[-1]).all()
    assert not np.isnan(found[:-1, :-1]).any()


@pytest.mark.parametrize("options", KINDS)
def test_models_whose_weights_are_no_numbers_give_none(options):
    model, batch = small_vit(**options), images(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    assert np.isnan(layer_similarity(model, batch)).all()
    off_diagonal = ~np.eye(6, dtype=bool)
    assert np.isnan(measure_tokens(model, batch).similarity[0].reshape(4, 6, 6)[:, off_diagonal]).all()


def test_layers_of_a_resnet():
    model, batch = bit(), pictures(4, (32, 32))
    expected = states_of_bit(model, batch)[1:]
    found = measure_layers(model, batch).cka
    assert found.shape == (4, 4)
    np.testing.assert_allclose(found[1:, 1:], cka_by_definition(expected, expected, [4]), rtol=0, atol=1e-9)


@torch.no_grad()
def test_layers_of_timm(swin):
    convnext = network("test_convnext", (32, 32))
    for model, batch, stem, stages in [
        (convnext, pictures(4, (32, 32)), convnext.peer.stem, convnext.peer.stages),
        (swin, pictures(4, (64, 64)), swin.peer.patch_embed, swin.peer.layers),
    ]:
        x = stem(batch)
        expected = [x := stage(x) for stage in stages]
        found = measure_layers(model, batch).cka
        assert found.shape == (4, 4)
        np.testing.assert_allclose(np.diag(found), 1, rtol=0, atol=1e-12)
        expected = [state - state.mean(dim=0) for state in expected]  # what they share costs the definition digits
        np.testing.assert_allclose(found[2:, 3:], cka_by_definition(expected[2:], expected[3:], [4]), rtol=0, atol=1e-9)


def batches_seen(model, batch):
    seen = []
    hook = anatomy.list_layers(model)["block 1"].register_forward_hook(lambda m, arguments, z: seen.append(len(z)))
    measure_layers(model, batch)
    hook.remove()
    assert seen[0] == 1, "one image tells how much all layers give out"
    return seen[1:]


@pytest.mark.parametrize(
    ("count", "room", "expected"),
    [
        (64, 1_000, [32, 32]),
        (33, 1_000, [17, 16]),
        (20, 9, [7, 7, 6]),
        (9, 4, [5, 4]),
        (11, 1, [6, 5]),
        (7, 0.5, [7]),
        (4, 1_000, [4]),
    ],
)
def test_batches_are_as_small_as_memory_asks_and_large_enough(monkeypatch, count, room, expected):
    model = small_vit()
    monkeypatch.setattr(similarity, "MOST_STATES", int(room * 2 * 7 * 32 * 4))  # layers, tokens, width, bytes
    assert batches_seen(model, images(count)) == expected


def test_both_models_see_the_same_batches(monkeypatch):
    a, b, seen = small_vit(), small_vit(width=64), []
    for model in (a, b):
        model.encoder.blocks[0].register_forward_hook(lambda m, arguments, z: seen.append((z.shape[2], len(z))))
    monkeypatch.setattr(similarity, "MOST_STATES", 10 * 2 * 7 * 32 * 4)
    measure_layers_between(a, images(20), b, images(20))
    assert [size for width, size in seen if width == 64] == [1, 5, 5, 5, 5]
    assert [size for width, size in seen if width == 32] == [1, 5, 5, 5, 5]


def test_no_state_outlives_the_layer_after_it():
    model, kept, most = vit(depth=8), [], 0

    def reduce(state):
        nonlocal most
        kept.append(weakref.ref(state))
        most = max(most, sum(reference() is not None for reference in kept))
        return len(state)

    assert len(similarity._reduce_layers(model, pictures(2), reduce)) == 8
    assert most <= 2, "what a block is given, and what it gives out"


def test_questions_without_an_answer():
    model, batch = vit(), pictures(4)
    with pytest.raises(NotApplicableError, match=r"at least 4 images.* 3$"):
        layer_similarity(model, batch[:3])
    with pytest.raises(NotApplicableError, match=r"at least 4 images.* 0$"):
        measure_layers_between(model, batch[:0], model, batch[:0])
    with pytest.raises(InputError, match=r"4 images .* 3 "):
        layer_similarity(model, batch, model, batch[:3])
    with pytest.raises(ConfigError, match="other_images"):
        layer_similarity(model, batch, other_images=batch)


# Without a trace


@pytest.mark.parametrize(
    "measure", [lambda m, x: token_similarity(m, x), lambda m, x: measure_tokens(m, x).similarity[0], layer_similarity]
)
def test_modes_and_hooks_are_as_before(measure):
    model, batch = vit(dropout=0.5, stochastic_depth=0.5), pictures(4)
    quiet = measure(model, batch)
    model.train()
    model.encoder.blocks[1].eval()
    modes = [part.training for part in model.modules()]
    np.testing.assert_array_equal(measure(model, batch), quiet, "evaluation mode, whatever it was in")
    assert [part.training for part in model.modules()] == modes
    assert not any(part._forward_hooks for part in model.modules())
    with pytest.raises(InputError, match="patches"):
        measure(model, pictures(4, (16, 25)))
    assert [part.training for part in model.modules()] == modes
    assert not any(part._forward_hooks for part in model.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("measure", [token_similarity, layer_similarity])
def test_a_compiled_model_is_no_trap(measure):
    model, batch = vit(), pictures(4)
    expected = measure(model, batch)
    np.testing.assert_array_equal(measure(torch.compile(model, backend="eager"), batch), expected)
    model.encoder.compile(backend="eager")
    with torch.no_grad():
        model(batch)  # compiled now, with nothing to listen to its blocks
    np.testing.assert_allclose(measure(model, batch), expected, rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match="Linear"):
        measure(nn.Linear(2, 2), batch)
