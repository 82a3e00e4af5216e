"""Attention distance, rollout and heads: against loops, against closed forms, on planted models, on timm's networks."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import planted
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

import vitrail
from peers import timm
from samples import SMALL, images, randomise, small_vit
from vitrail.errors import InputError, NotApplicableError
from vitrail.inspection.measure import anatomy
from vitrail.inspection.measure.attention import (
    attention_rollout,
    describe_readout,
    head_attention,
    mean_attention_distance,
    measure_attention,
    name_attention_layers,
    rollout_by_layer,
)
from vitrail.model.architecture import Backbone, TimmArchitecture, VitArchitecture
from vitrail.model.attention import RowAttention, SelfAttention
from vitrail.model.create import build_empty_model
from vitrail.model.timm_model import TimmModel
from vitrail.model.variants import HYBRID

MODELS = {
    "class token": {},
    "class token, registers": {"registers": 3, "position_prefix": "all"},
    "average": {"pool": "average"},
    "average with a class token and registers": {"pool": "average", "class_token": True, "registers": 2},
    "class token and average": {"pool": "class+average", "registers": 1},
    "distilled": {"pool": "distilled", "registers": 2},
    "attention pool": {"pool": "attention", "registers": 1},
    "norm after the attention pool": {"pool": "attention", "norm_after_pool": True, "class_token": True},
    "relative positions": {"position": "relative"},
    "axial": {"block": "axial", "pool": "average"},
    "axial, attention pool": {"block": "axial", "pool": "attention"},
    "hybrid": {},
}
"""Grids are 2 × 3, so that rows and columns cannot be taken for each other."""


def small_hybrid() -> vitrail.VisionTransformer:
    """A ResNet of two units, then patches of 2 pixels of its feature map, which has an eighth of the image's side."""
    fields = {**SMALL, "image_size": (32, 48), "patch_size": 2, "backbone": Backbone(blocks=(1, 1), **HYBRID)}
    return randomise(build_empty_model(VitArchitecture(**fields)).to_empty(device="cpu").double())


@functools.cache
def made(kind: str) -> tuple[vitrail.VisionTransformer, torch.Tensor]:
    """A model with random weights in float64, whose attention is far from uniform, and two images for it."""
    model = small_hybrid() if kind == "hybrid" else small_vit(dtype=torch.float64, **MODELS[kind])
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, SelfAttention):
                module.qkv.weight *= 5
    return model, images(size=model.image_size, dtype=torch.float64)


# References: lists of floats and loops


def softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


def attended(queries, keys, bias=None) -> list[list[float]]:
    """(t, d) each → (t, t)."""
    scale = 1 / math.sqrt(len(queries[0]))
    return [
        softmax(
            [
                scale * sum(a * b for a, b in zip(query, key, strict=True)) + (bias[i][j] if bias else 0.0)
                for j, key in enumerate(keys)
            ]
        )
        for i, query in enumerate(queries)
    ]


def relative_bias(module: SelfAttention, queries) -> list[list[float]] | None:
    if module.relative is None:
        return None
    prefix, patches, table = module.relative.prefix, module.relative.patches, module.relative.table.tolist()
    bias = [[0.0] * len(queries) for _ in queries]
    for i, j in itertools.product(range(patches), repeat=2):
        row, query = table[i - j + patches - 1], queries[prefix + i]
        bias[prefix + i][prefix + j] = sum(a * b for a, b in zip(query, row, strict=True)) / math.sqrt(len(query))
    return bias


@torch.no_grad()
def maps_by_hand(model, batch) -> list[list[list[list[list[float]]]]]:
    """[image][layer][head] → (T, T), for axial layers too: zeros where a patch lies in another row or column."""
    inputs = []
    modules = [module for module in model.modules() if isinstance(module, SelfAttention)]
    hooks = [module.register_forward_hook(lambda m, args, out: inputs.append(args[0])) for module in modules]
    model(batch)
    for hook in hooks:
        hook.remove()
    return [
        [
            layer_by_hand(number, module, x[image])
            for number, (module, x) in enumerate(zip(modules, inputs, strict=True))
        ]
        for image in range(len(batch))
    ]


def layer_by_hand(number: int, module: SelfAttention, x: torch.Tensor) -> list[list[list[float]]]:
    heads, width = module.num_heads, module.qkv.in_features // module.num_heads
    along_columns = number % 2 == 1
    if isinstance(module, RowAttention):  # here (lines, places in the line, D)
        lines, places = x.shape[:2]
        numbers = [
            [place * lines + line if along_columns else line * places + place for place in range(places)]
            for line in range(lines)
        ]
    else:
        x, numbers = x[None], [list(range(len(x)))]
    total = sum(len(line) for line in numbers)
    found = []
    for head in range(heads):
        whole = [[0.0] * total for _ in range(total)]
        for line, tokens in zip(numbers, x, strict=True):
            qkv = module.qkv(tokens)
            queries = qkv[:, head * width : (head + 1) * width].tolist()
            keys = qkv[:, (heads + head) * width : (heads + head + 1) * width].tolist()
            small = attended(queries, keys, relative_bias(module, queries))
            for i, j in itertools.product(range(len(line)), repeat=2):
                whole[line[i]][line[j]] = small[i][j]
        found.append(whole)
    return found


@torch.no_grad()
def reading_by_hand(model, batch, image: int) -> list[float]:
    """How much of each token the representation takes."""
    prefix, patches = model.prefix, math.prod(model.measure_grid(batch))
    zeros = [0.0] * (prefix + patches)
    match model.architecture.pool:
        case "class":
            return [1.0, *zeros[1:]]
        case "average":
            return [0.0] * prefix + [1 / patches] * patches
        case "class+average":
            return [0.5] + [0.0] * (prefix - 1) + [0.5 / patches] * patches
        case "distilled":
            return [0.5, 0.5, *zeros[2:]]
    pool = model.pool
    query, rows = pool.q(pool.query)[0].tolist(), pool.kv(model.forward_features(batch)[image, prefix:]).tolist()
    width = len(query) // pool.num_heads
    found = zeros
    for head in range(pool.num_heads):
        part = slice(head * width, (head + 1) * width)
        (weights,) = attended([query[part]], [row[part] for row in rows])
        found = [a + b / pool.num_heads for a, b in zip(found, [0.0] * prefix + weights, strict=True)]
    return found


def product(left, right) -> list[list[float]]:
    return [
        [sum(a * b for a, b in zip(row, column, strict=True)) for column in zip(*right, strict=True)] for row in left
    ]


def rollout_by_hand(layers, reading) -> list[list[float]]:
    """[layer][head] → (T, T) of one image → the row that is read, after each layer."""
    tokens = len(reading)
    so_far = [[float(i == j) for j in range(tokens)] for i in range(tokens)]
    found = []
    for heads in layers:
        mixed = []
        for i in range(tokens):
            row = [(sum(head[i][j] for head in heads) / len(heads) + float(i == j)) / 2 for j in range(tokens)]
            mixed.append([value / sum(row) for value in row])
        so_far = product(mixed, so_far)
        found.append(product([reading], so_far)[0])
    return found


def distance_by_hand(maps, prefix: int, grid: tuple[int, int], stride: int) -> np.ndarray:
    """(layers, heads)."""
    places = [(row, column) for row in range(grid[0]) for column in range(grid[1])]
    found = np.zeros((len(maps[0]), len(maps[0][0])))
    for layer, head in np.ndindex(found.shape):
        rows = []
        for image in maps:
            for i, a in enumerate(places):
                row = image[layer][head][prefix + i][prefix:]
                apart = [stride * math.dist(a, b) for b in places]
                if sum(row):
                    rows.append(sum(x * y for x, y in zip(row, apart, strict=True)) / sum(row))
        found[layer, head] = sum(rows) / len(rows) if rows else math.nan
    return found


# Any Vision Transformer


@pytest.mark.parametrize("kind", MODELS)
def test_all_as_by_hand(kind):
    model, batch = made(kind)
    maps = maps_by_hand(model, batch)
    readings = [reading_by_hand(model, batch, image) for image in range(len(batch))]
    rollout = np.array([rollout_by_hand(layers, reading) for layers, reading in zip(maps, readings, strict=True)])
    heads = np.array(
        [
            [[product([reading], head)[0] for head in layer] for layer in layers]
            for layers, reading in zip(maps, readings, strict=True)
        ]
    )
    distance = distance_by_hand(maps, model.prefix, (2, 3), model.stride)
    assert np.ptp(distance) > 0.05 * model.stride  # heads differ, so a mix-up would show

    np.testing.assert_allclose(rollout_by_layer(model, batch), rollout, rtol=0, atol=1e-12)
    np.testing.assert_allclose(head_attention(model, batch), heads, rtol=0, atol=1e-12)
    np.testing.assert_allclose(mean_attention_distance(model, batch), distance, rtol=0, atol=1e-10)
    shown = rollout[:, -1, model.prefix :].reshape(2, 2, 3)
    np.testing.assert_allclose(attention_rollout(model, batch), shown, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", MODELS)
def test_rows_sum_to_one_and_one_pass_gives_the_same(kind):
    model, batch = made(kind)
    rollout, heads = rollout_by_layer(model, batch), head_attention(model, batch)
    np.testing.assert_allclose(rollout.sum(axis=-1), 1, rtol=0, atol=1e-12)
    np.testing.assert_allclose(heads.sum(axis=-1), 1, rtol=0, atol=1e-12)

    found = measure_attention(model, batch)
    layers = len(found.layers)
    assert found.rollout.shape == (2, layers, 2, 3)
    assert found.heads.shape == (2, layers, 4, 2, 3)
    assert found.prefix == anatomy.prefix_names(model)
    assert found.layers == name_attention_layers(model)
    assert found.reads == describe_readout(model)
    flat = np.concatenate([found.rollout_prefix, found.rollout.reshape(2, layers, 6)], axis=-1)
    assert np.array_equal(flat, rollout)
    flat = np.concatenate([found.heads_prefix, found.heads.reshape(2, layers, 4, 6)], axis=-1)
    assert np.array_equal(flat, heads)
    assert np.array_equal(found.rollout[:, -1], attention_rollout(model, batch))


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    depth=st.integers(1, 3),
    pool=st.sampled_from(["class", "average", "attention", "class+average"]),
    registers=st.integers(0, 2),
)
def test_any_grid(rows, columns, depth, pool, registers):
    model = small_vit(image_size=(8 * rows, 8 * columns), depth=depth, pool=pool, registers=registers)
    batch = images(size=model.image_size)
    found = measure_attention(model, batch)
    assert found.rollout.shape == (2, depth, rows, columns)
    total = found.rollout.sum(axis=(-2, -1)) + found.rollout_prefix.sum(axis=-1)
    np.testing.assert_allclose(total, 1, rtol=0, atol=1e-6)
    distance = mean_attention_distance(model, batch)
    assert distance.shape == (depth, 4)
    assert (distance >= 0).all()
    assert (distance <= 8 * math.hypot(rows - 1, columns - 1) + 1e-9).all()


@pytest.mark.parametrize("options", [{}, {"position": "sin-cos", "pool": "average"}, MODELS["axial, attention pool"]])
def test_another_image_size_than_the_models_own(options):
    model, batch = small_vit(dtype=torch.float64, **options), images(size=(32, 16), dtype=torch.float64)
    found, distance = measure_attention(model, batch), mean_attention_distance(model, batch)
    assert found.rollout.shape[2:] == (4, 2)
    assert attention_rollout(model, batch).shape == (2, 4, 2)
    resized = small_vit(dtype=torch.float64, **options).resize((32, 16))
    np.testing.assert_allclose(found.rollout, measure_attention(resized, batch).rollout, rtol=0, atol=1e-12)
    np.testing.assert_allclose(distance, mean_attention_distance(resized, batch), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["class token", "attention pool", "axial"])
def test_in_parts_as_at_once(kind, monkeypatch):
    model, _ = made(kind)
    batch = images(batch=7, dtype=torch.float64)
    whole = (mean_attention_distance(model, batch), rollout_by_layer(model, batch), head_attention(model, batch))
    monkeypatch.setattr(anatomy, "MOST_IMAGES_AT_ONCE", 3)
    sizes = []
    hook = model.encoder.register_forward_hook(lambda module, args, out: sizes.append(len(out)))
    parts = (mean_attention_distance(model, batch), rollout_by_layer(model, batch), head_attention(model, batch))
    hook.remove()
    assert set(sizes) == {3, 1}
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("measure", [mean_attention_distance, attention_rollout, head_attention, measure_attention])
def test_maps_of_a_layer_are_gone_before_those_of_the_next_are_made(measure, monkeypatch):
    model, made_so_far, weights = small_vit(depth=4), [], SelfAttention.weights

    def watched(self, x, *places):
        assert all(reference.expired() for reference in made_so_far)
        maps = weights(self, x, *places)
        made_so_far.append(StorageWeakRef(maps.untyped_storage()))
        return maps

    monkeypatch.setattr(SelfAttention, "weights", watched)
    monkeypatch.setattr(anatomy, "MOST_IMAGES_AT_ONCE", 1)
    measure(model, images())
    assert len(made_so_far) == 8
    assert all(reference.expired() for reference in made_so_far)


def test_modes_hooks_and_gradients_are_left_as_they_were():
    model = small_vit(dropout=0.5, attention_dropout=0.5, stochastic_depth=0.5, pool="attention")
    calm = measure_attention(model, images())
    model.train()
    model.encoder.blocks[1].eval()
    before = [module.training for module in model.modules()]
    assert np.array_equal(measure_attention(model, images()).heads, calm.heads)
    mean_attention_distance(model, images())
    assert [module.training for module in model.modules()] == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(InputError):
        attention_rollout(model, images(size=(16, 23)))
    assert [module.training for module in model.modules()] == before


def test_numbers_are_float64_whatever_the_model_is():
    model = small_vit(dtype=torch.bfloat16, pool="attention")
    for measure in (mean_attention_distance, attention_rollout, rollout_by_layer, head_attention):
        found = measure(model, images(dtype=torch.bfloat16))
        assert found.dtype == np.float64
        assert np.isfinite(found).all()
    with pytest.raises(InputError, match="batch"):
        mean_attention_distance(model, images(dtype=torch.bfloat16)[0])


def test_names():
    assert name_attention_layers(small_vit(depth=3)) == ("1", "2", "3")
    axial = small_vit(block="axial", pool="average")
    assert name_attention_layers(axial) == ("1 rows", "1 columns", "2 rows", "2 columns")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ("class token",)),
        ({"pool": "average"}, ()),
        ({"registers": 1}, ("class token", "register")),
        ({"registers": 2}, ("class token", "register 1", "register 2")),
        ({"pool": "average", "registers": 2}, ("register 1", "register 2")),
        ({"pool": "distilled", "registers": 1}, ("class token", "distillation token")),
        ({"pool": "distilled", "registers": 2}, ("class token", "distillation token", "register")),
        (
            {"pool": "distilled", "registers": 3},
            ("class token", "distillation token", "register 1", "register 2"),
        ),
    ],
)
def test_names_of_tokens_that_are_no_patch(options, names):
    model = small_vit(**options)
    assert anatomy.prefix_names(model) == names
    assert len(names) == model.prefix


READ = {
    "class token, registers": "the class token",
    "average": "the mean of the patches",
    "class token and average": "the class token and the mean of the patches",
    "distilled": "the class token and the distillation token",
    "attention pool": "the attention pool",
}


@pytest.mark.parametrize("kind", READ)
def test_what_is_read(kind):
    assert describe_readout(made(kind)[0]) == READ[kind]


@torch.no_grad()
def test_weights_of_the_attention_pool_give_its_output():
    model = small_vit(pool="attention", registers=1)
    features = model.forward_features(images())
    weights, pool = model.pool.weights(features), model.pool
    assert weights.shape == (2, 4, 6)
    values = pool.kv(features[:, 1:])[..., 32:].unflatten(2, (4, 8)).transpose(1, 2)
    y = pool.out((weights.unsqueeze(2) @ values).flatten(1))
    torch.testing.assert_close(y + pool.mlp(pool.norm(y)), pool(features), rtol=0, atol=1e-5)
    assert model.bfloat16().pool.weights(features.bfloat16()).dtype == torch.float32


# Planted attention


def mean_distance_of_all_pairs(rows: int, columns: int) -> float:
    """How often each offset occurs, times how long it is."""
    offsets = itertools.product(range(1 - rows, rows), range(1 - columns, columns))
    pairs = sum((rows - abs(r)) * (columns - abs(c)) * math.sqrt(r * r + c * c) for r, c in offsets)
    return pairs / (rows * columns) ** 2


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 5), (4, 6), (7, 3)])
@pytest.mark.parametrize("options", [{}, {"registers": 2}, {"pool": "average"}])
def test_uniform_attention_has_the_mean_distance_of_all_pairs(rows, columns, options):
    model = planted.uniform(rows, columns, **options)
    batch = images(size=model.image_size, dtype=torch.float64)
    expected = planted.PATCH * mean_distance_of_all_pairs(rows, columns)
    np.testing.assert_allclose(mean_attention_distance(model, batch), expected, rtol=1e-12)
    tokens = rows * columns + model.prefix
    np.testing.assert_allclose(head_attention(model, batch), 1 / tokens, rtol=1e-12)


def test_uniform_attention_along_rows_and_columns():
    model = planted.uniform(4, 6, block="axial", pool="average")
    along = [4 * mean_distance_of_all_pairs(1, 6), 4 * mean_distance_of_all_pairs(4, 1)]
    expected = [[apart] * 2 for apart in along * 2]
    found = mean_attention_distance(model, images(size=model.image_size, dtype=torch.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_rollout_of_uniform_attention():
    """The class token keeps half of itself in each layer, and the rest spreads over all 25 tokens."""
    model = planted.uniform(depth=3)
    batch = images(size=model.image_size, dtype=torch.float64)
    kept = [1 / 2, 1 / 4, 1 / 8]
    expected = [[(1 - share) / 25 + share * (token == 0) for token in range(25)] for share in kept]
    np.testing.assert_allclose(rollout_by_layer(model, batch), [expected] * 2, rtol=0, atol=1e-14)


@pytest.mark.parametrize("options", [{}, {"registers": 2, "pool": "average", "class_token": True}])
def test_identity_has_no_distance_and_shows_only_what_is_read(options):
    model = planted.identity(3, 4, **options)
    batch = images(size=model.image_size, dtype=torch.float64)
    with vitrail.record_attention(model) as maps:
        model(batch)
    for found in maps.values():
        eye = torch.eye(model.prefix + 12, dtype=torch.float64).expand_as(found)
        torch.testing.assert_close(found, eye, rtol=0, atol=1e-12)
    assert (mean_attention_distance(model, batch) == 0).all()
    shown = 0.0 if model.architecture.pool == "class" else 1 / 12
    np.testing.assert_allclose(attention_rollout(model, batch), shown, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("apart", "patch_size"), [(1, 4), (2, 4), (3, 2)])
def test_a_swap_of_columns_is_exactly_so_far(apart, patch_size):
    model = planted.swap(3, 2 * apart, apart, patch_size=patch_size)
    batch = images(size=model.image_size, dtype=torch.float64)
    np.testing.assert_allclose(mean_attention_distance(model, batch), apart * patch_size, rtol=1e-12)


def test_heads_at_fixed_offsets():
    rows, columns, shifts = 4, 5, [(0, 1), (1, 0), (-1, 2), (3, 4), (0, -5)]
    model = planted.offset(rows, columns, *shifts)
    batch = images(size=model.image_size, dtype=torch.float64)
    # Of 20 patches those have a target inside that lie far enough from the border; the others attend to themselves.
    inside = [(rows - abs(r)) * (columns - abs(c)) for r, c in shifts]
    assert inside == [16, 15, 9, 1, 0]
    expected = [planted.PATCH * math.hypot(*shift) * n / 20 for shift, n in zip(shifts, inside, strict=True)]
    np.testing.assert_allclose(mean_attention_distance(model, batch), [expected] * 2, rtol=1e-12)


def test_rollout_follows_a_planted_offset():
    """Each layer moves half of what the mean of the patches holds one column to the right; the last ones keep it."""
    model = planted.offset(1, 4, (0, 1), pool="average")
    batch = images(size=model.image_size, dtype=torch.float64)
    once, twice = [1 / 8, 1 / 4, 1 / 4, 3 / 8], [1 / 16, 3 / 16, 1 / 4, 1 / 2]
    np.testing.assert_allclose(rollout_by_layer(model, batch), [[once, twice]] * 2, rtol=0, atol=1e-12)


def test_later_layers_stand_on_the_left():
    """The class token attends to the first patch in the last layer, and that to the second one in the first layer. In
    the order of the layers, the second patch is reached; in the other it is not."""
    model = planted.identity(1, 2)
    with torch.no_grad():
        first, last = (block.attention.qkv.weight for block in model.encoder.blocks)
        for head in range(2):
            first[[3 * head + 1, 3 * head + 2], 1] = first[[3 * head + 2, 3 * head + 1], 1]
            last[[3 * head, 3 * head + 1], 0] = last[[3 * head + 1, 3 * head], 0]
    found = rollout_by_layer(model, images(size=model.image_size, dtype=torch.float64))
    np.testing.assert_allclose(found, [[[1, 0, 0], [1 / 2, 1 / 4, 1 / 4]]] * 2, rtol=0, atol=1e-12)


def test_heads_that_never_attend_to_patches_have_no_distance():
    model = planted.offset(2, 2, (0, 1), (0, 0))
    tokens, factor = 5, planted.ABOVE * math.sqrt(5)
    with torch.no_grad():
        queries = model.encoder.blocks[0].attention.qkv.weight
        queries[:tokens] = 0
        queries[0, :tokens] = factor  # in the first head all attend to the class token
        queries[tokens + 1 : 2 * tokens, 1] = 0
        queries[tokens, 1] = factor  # in the second the first patch does
    found = mean_attention_distance(model, images(size=model.image_size, dtype=torch.float64))
    np.testing.assert_allclose(found, [[math.nan, 0], [planted.PATCH / 2, 0]], rtol=1e-12)


# Networks of timm's


def of_timm(name: str, image_size: tuple[int, int], dtype: torch.dtype = torch.float64) -> TimmModel:
    """With random weights that make attention uneven."""
    model = build_empty_model(TimmArchitecture(name=name, image_size=image_size, num_classes=3))
    generator = torch.Generator().manual_seed(0)
    state = {}
    for key, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.2
        state[key] = (noise + (1.0 if tensor.ndim == 1 and key.endswith("weight") else 0.0)).float()
    model.load_state_dict(state, assign=True)
    return model.to(dtype).eval()


def maps_of_timm(model: TimmModel, batch: torch.Tensor, monkeypatch: pytest.MonkeyPatch):
    """By hand from the queries and keys that timm gives to the fused kernel: [image][layer][head] → (T, T)."""
    given, kernel = [], torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, attn_mask=None, **options):
        given.append((q, k, attn_mask))
        return kernel(q, k, v, attn_mask=attn_mask, **options)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        model(batch)
    found = []
    for image in range(len(batch)):
        layers = []
        for q, k, bias in given:
            biases = [None] * q.shape[1] if bias is None else bias.expand(len(batch), -1, -1, -1)[image].tolist()
            heads = zip(q[image].tolist(), k[image].tolist(), biases, strict=True)
            layers.append([attended(queries, keys, bias_of_head) for queries, keys, bias_of_head in heads])
        found.append(layers)
    return found


@pytest.mark.parametrize(
    ("name", "size", "prefix", "stride", "reads"),
    [
        ("eva02_tiny_patch14_224", (28, 42), ("class token",), 14, "average"),
        ("vit_tiny_patch16_224", (32, 48), ("class token",), 16, "class"),
        ("deit_tiny_distilled_patch16_224", (32, 48), ("class token", "distillation token"), 16, "distilled"),
        ("test_vit2", (32, 48), ("register",), 16, "average"),
        ("vit_tiny_r_s16_p8_224", (64, 96), ("class token",), 32, "class"),
    ],
)
def test_timms_networks_as_by_hand(name, size, prefix, stride, reads, monkeypatch):
    """Rotary positions, which vitrail has no layers for; plain, distilled, with a register, a hybrid."""
    model = of_timm(name, size)
    batch = images(batch=1, size=size, dtype=torch.float64)
    assert anatomy.prefix_names(model) == prefix
    maps, first = maps_of_timm(model, batch, monkeypatch), len(prefix)
    reading = {
        "class": [1.0] + [0.0] * (first + 5),
        "distilled": [0.5, 0.5] + [0.0] * 6,
        "average": [0.0] * first + [1 / 6] * 6,
    }[reads]
    assert np.ptp([head for layer in maps[0] for head in layer]) > 0.3
    found, rollout = measure_attention(model, batch), np.array(rollout_by_hand(maps[0], reading))
    np.testing.assert_allclose(rollout_by_layer(model, batch)[0], rollout, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.rollout[0].reshape(-1, 6), rollout[:, first:], rtol=0, atol=1e-10)
    heads = [[product([reading], head)[0] for head in layer] for layer in maps[0]]
    np.testing.assert_allclose(head_attention(model, batch)[0], heads, rtol=0, atol=1e-10)
    distance = distance_by_hand(maps, first, (2, 3), stride)
    np.testing.assert_allclose(mean_attention_distance(model, batch), distance, rtol=0, atol=1e-8)
    assert found.layers == tuple(str(number + 1) for number in range(len(maps[0])))
    assert all(part.fused_attn for part in model.modules() if hasattr(part, "fused_attn"))


def test_timms_mean_may_include_the_prefix():
    model = of_timm("vit_tiny_patch16_224", (32, 48))
    model.peer.global_pool, model.peer.pool_include_prefix = "avg", True
    assert describe_readout(model) == "the mean of all tokens"
    batch = images(size=(32, 48), dtype=torch.float64)
    with vitrail.record_attention(model) as maps, torch.no_grad():
        model(batch)
    np.testing.assert_allclose(head_attention(model, batch)[:, 0], maps[0].mean(dim=2), rtol=0, atol=1e-12)


def empty(name: str) -> TimmModel:
    """Without memory: what is refused need not be computed."""
    own = timm.models.get_pretrained_cfg(name)
    return build_empty_model(TimmArchitecture(name=name, image_size=own.input_size[1:], num_classes=3)).eval()


REFUSED = {
    "test_convnext": "no attention",
    "swin_tiny_patch4_window7_224": "patch to patch",
    "xcit_nano_12_p8_224": "patch to patch",
    "samvit_base_patch16": "attends within windows or to channels, not from patch to patch",
    "vit_dlittle_patch16_reg1_gap_256": "subtracts attention maps",
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("measure", [mean_attention_distance, attention_rollout, head_attention, measure_attention])
def test_timms_networks_that_do_not_attend_from_patch_to_patch(name, measure):
    model = empty(name)
    with pytest.raises(NotApplicableError, match=REFUSED[name]) as caught:
        measure(model, torch.empty(1, 3, *model.image_size, device="meta"))
    assert f"timm's {name}" in str(caught.value)
    assert not str(caught.value).endswith(".")


def test_timms_poolings_that_have_no_row_of_attention():
    model = empty("test_vit3")
    pictures = torch.empty(1, 3, *model.image_size, device="meta")
    for measure in (attention_rollout, head_attention, measure_attention):
        with pytest.raises(NotApplicableError, match='"map"'):
            measure(model, pictures)
    with pytest.raises(NotApplicableError, match='"map"'):
        describe_readout(model)
    assert mean_attention_distance(of_timm("test_vit3", (32, 32)), images(size=(32, 32), dtype=torch.float64)).size


MEASURES = [mean_attention_distance, attention_rollout, rollout_by_layer, head_attention, measure_attention]


@pytest.mark.parametrize("measure", MEASURES)
def test_grids_that_are_too_large_say_so_before_anything_is_computed(measure, monkeypatch):
    options = {"width": 4, "depth": 1, "num_heads": 1, "mlp_dim": 4, "num_classes": 0, "device": "meta"}
    model = vitrail.create_model("Ti/4", image_size=(256, 260), **options)
    with pytest.raises(NotApplicableError, match=r"4,160 patches .*4,096"):
        measure(model, torch.empty(1, 3, 256, 260, device="meta"))
    monkeypatch.setattr(anatomy, "MOST_PATCHES", 5)
    with pytest.raises(NotApplicableError, match="2×3 = 6 patches"):
        measure(made("class token")[0], made("class token")[1])
    with pytest.raises(NotApplicableError, match="14×14 = 196 patches"):
        measure(empty("vit_tiny_patch16_224"), torch.empty(1, 3, 224, 224, device="meta"))
    monkeypatch.setattr(anatomy, "MOST_PATCHES", 6)
    measure(made("class token")[0], made("class token")[1])


@pytest.mark.parametrize("kind", ["class token", "attention pool", "axial"])
def test_models_whose_weights_are_no_numbers_give_none(kind):
    model = small_vit(**MODELS[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    for measure in (mean_attention_distance, attention_rollout, rollout_by_layer):
        assert np.isnan(measure(model, images())).all()
    assert np.isnan(measure_attention(model, images()).rollout).all()


def parallel() -> TimmModel:
    """Two blocks, each with two attentions side by side."""
    block = timm.models.vision_transformer.ParallelThingsBlock
    network = timm.models.vision_transformer.VisionTransformer(
        img_size=(32, 48), patch_size=16, embed_dim=32, depth=2, num_heads=2, num_classes=3, block_fn=block
    )
    model = empty("vit_tiny_patch16_224")
    model.peer = network
    return model.double().eval()


def test_attentions_side_by_side_have_no_rollout():
    model, batch = parallel(), images(size=(32, 48), dtype=torch.float64)
    for measure in (attention_rollout, rollout_by_layer, measure_attention):
        with pytest.raises(NotApplicableError, match=r"side by side.*[^.]$"):
            measure(model, batch)
    assert mean_attention_distance(model, batch).shape == (4, 2)
    assert head_attention(model, batch).shape == (2, 4, 2, 7)


def test_timms_own_network_of_parallel_attentions_has_no_rollout():
    model = empty("vit_small_patch16_18x2_224")
    with pytest.raises(NotApplicableError, match="several attentions"):
        attention_rollout(model, torch.empty(1, 3, 224, 224, device="meta"))


def test_a_resnet_has_no_attention():
    model = vitrail.create_model("BiT-R50x1", device="meta")
    pictures = torch.empty(1, 3, 224, 224, device="meta")
    for measure in (mean_attention_distance, attention_rollout, rollout_by_layer, head_attention, measure_attention):
        with pytest.raises(NotApplicableError, match="no attention"):
            measure(model, pictures)
    for say in (name_attention_layers, describe_readout):
        with pytest.raises(NotApplicableError, match="no attention"):
            say(model)
