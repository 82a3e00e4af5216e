"""Which parameter is treated how, by name; and every optimiser against loops in float64."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

from vitrail.model.create import create_model
from vitrail.objectives.classification import Classification
from vitrail.objectives.masked_patches import MaskedPatches
from vitrail.training.config import OptimizerConfig
from vitrail.training.optim import (
    build_optimizer,
    find_kernels,
    find_layers,
    group_parameters,
    initialise_state,
    set_learning_rate,
)
from vitrail.training.schedule import learning_rate

CPU = torch.device("cpu")
SMALL = {"image_size": 32, "width": 32, "depth": 3, "num_heads": 2, "mlp_dim": 48, "num_classes": 5}
STEM = [(8, 3, 2, "batch", "relu"), (8, 3, 2, "none", "gelu"), (32, 3, 4, "group", "none")]
MODELS = {
    "plain": ("Ti/16", {}),
    "pre-training head": ("Ti/16", {"representation_size": 16}),
    "without classes": ("Ti/16", {"num_classes": 0}),
    "without biases": ("Ti/16", {"qkv_bias": False, "patch_bias": False}),
    "conv stem": ("Ti/16", {"conv_stem": STEM}),
    "registers": ("Ti/16", {"registers": 3, "position_prefix": "all"}),
    "layer scale": ("Ti/16", {"layer_scale": 0.1}),
    "attention pooling": ("Ti/16", {"pool": "attention"}),
    "average of two tokens": ("Ti/16", {"pool": "distilled", "registers": 1}),
    "norm after pooling": ("Ti/16", {"pool": "average", "norm_after_pool": True}),
    "norms of another kind": ("Ti/16", {"norm": "rms", "input_norm": True}),
    "relative positions": ("Ti/16", {"position": "relative"}),
    "2-D positions": ("Ti/16", {"position": "learned-2d"}),
    "positions in every layer": ("Ti/16", {"position_at": "every-layer"}),
    "fixed positions": ("Ti/16", {"position": "sin-cos"}),
    "axial": ("Ti/16", {"block": "axial", "pool": "average"}),
    "hybrid": ("R26+Ti/16", {}),
    "BiT": ("BiT-R26x1", None),
}

BLOCK = r"model\.encoder\.blocks\.\d+\.((rows|columns)\.)?"
UNIT = r"model\.backbone\.units\.\d+\."
KERNELS = (
    r"model\.patch_embed\.projection\.weight",
    r"model\.patch_embed\.layers\.\d\.0\.weight",
    BLOCK + r"attention\.(qkv|out)\.weight",
    BLOCK + r"mlp\.fc[12]\.weight",
    r"model\.pool\.(q|kv|out)\.weight",
    r"model\.pool\.mlp\.fc[12]\.weight",
    r"model\.head\.weight",
    r"model\.head\.(hidden|linear|distilled)\.weight",
    r"model\.backbone\.root\.weight",
    UNIT + r"conv[123]\.weight",
    UNIT + r"shortcut\.weight",  # BiT's
    UNIT + r"shortcut\.0\.weight",  # a hybrid's
    r"prediction\.weight",
)
OTHERS = (
    r".*\.bias",
    r"model\.class_token",
    r"model\.registers",
    r"model\.position_embedding\.\d\.(table|prefix_table|row_table|column_table)",
    BLOCK + r"attention\.relative\.table",
    BLOCK + r"norm[12]\.weight",
    BLOCK + r"scale[12]\.factor",
    r"model\.(input_norm|encoder\.norm|pool_norm|norm)\.weight",
    r"model\.pool\.query",
    r"model\.pool\.norm\.weight",
    r"model\.patch_embed\.layers\.\d\.1\.weight",  # a norm
    r"model\.backbone\.root_norm\.weight",
    UNIT + r"norm[123]\.weight",
    UNIT + r"shortcut\.1\.weight",  # a norm
    r"mask_token",
)


def objective(kind: str, masked: bool = False) -> Classification | MaskedPatches:
    """With shapes alone: nothing is computed."""
    name, options = MODELS[kind]
    given = {"num_classes": 5} if options is None else {**SMALL, **options}
    model = create_model(name, device="meta", **given)
    return MaskedPatches(model) if masked else Classification(model)


EVERY = [(kind, False) for kind in MODELS if kind != "without classes"] + [(k, True) for k in MODELS if k != "BiT"]


def matching(name: str, patterns: tuple[str, ...]) -> list[str]:
    return [pattern for pattern in patterns if re.fullmatch(pattern, name)]


@pytest.mark.parametrize(("kind", "masked"), EVERY)
def test_kernels_alone_decay_name_by_name(kind, masked):
    built = objective(kind, masked)
    names = {id(parameter): name for name, parameter in built.named_parameters()}
    seen = []
    for group in group_parameters(built, weight_decay=0.3):
        assert group["weight_decay"] in (0.0, 0.3)
        assert group["scale"] == 1
        for parameter in group["params"]:
            name = names[id(parameter)]
            seen.append(name)
            kernel, other = matching(name, KERNELS), matching(name, OTHERS)
            assert len(kernel) + len(other) == 1, name
            assert group["weight_decay"] == (0.3 if kernel else 0.0), name
    # Every learning parameter is in exactly one group, and what is frozen in none.
    assert sorted(seen) == sorted(name for name, p in built.named_parameters() if p.requires_grad)
    assert len(set(find_kernels(built))) == len(find_kernels(built))


def test_the_rule_above_speaks_of_nothing_that_is_not_there():
    names = [name for kind, masked in EVERY for name, _ in objective(kind, masked).named_parameters()]
    unused = [pattern for pattern in KERNELS + OTHERS if not any(re.fullmatch(pattern, name) for name in names)]
    assert unused == []


def test_what_is_frozen_is_left_out():
    built = objective("plain")
    built.model.patch_embed.requires_grad_(False)
    held = {id(parameter) for group in group_parameters(built, 0.1) for parameter in group["params"]}
    assert not held & {id(parameter) for parameter in built.model.patch_embed.parameters()}
    assert len(held) == len(list(built.parameters())) - 2


# ---- Factors on the learning rate ------------------------------------------------------------------------------------


def exponents(built: nn.Module) -> dict[str, int]:
    """By parameter: how often the factor was applied. 1/2 and its powers are exact."""
    names = {id(parameter): name for name, parameter in built.named_parameters()}
    found = {}
    for group in group_parameters(built, 0.1, layer_decay=0.5):
        for parameter in group["params"]:
            found[names[id(parameter)]] = round(-np.log2(group["scale"]))
            assert group["scale"] == 0.5 ** found[names[id(parameter)]]
    return found


def expected_exponent(name: str, units: int, blocks: int) -> int:
    """Layers are counted from the head down: encoder blocks, then residual units."""
    if found := re.match(r"model\.encoder\.blocks\.(\d+)\.", name):
        return blocks - int(found.group(1))
    if found := re.match(r"model\.backbone\.units\.(\d+)\.", name):
        return blocks + units - int(found.group(1))
    if re.match(r"model\.backbone\.root", name):
        return blocks + units + 1
    if re.match(r"model\.(encoder\.norm|norm|pool|pool_norm|head)\.|prediction\.", name):
        return 0
    assert re.match(r"model\.(patch_embed|class_token|registers|position_embedding|input_norm)|mask_token", name), name
    return blocks + 1


@pytest.mark.parametrize(("kind", "masked"), EVERY)
def test_layer_decay_name_by_name(kind, masked):
    units = {"hybrid": 8, "BiT": 8}.get(kind, 0)
    blocks = 0 if kind == "BiT" else 3
    built = objective(kind, masked)
    assert len(find_layers(built)) == units + blocks
    found = exponents(built)
    assert found == {name: expected_exponent(name, units, blocks) for name in found}


def test_layer_decay_worked_by_hand():
    hybrid = exponents(objective("hybrid"))
    assert hybrid["model.head.weight"] == hybrid["model.encoder.norm.bias"] == 0
    assert hybrid["model.encoder.blocks.2.mlp.fc1.weight"] == 1
    assert hybrid["model.encoder.blocks.0.norm1.weight"] == 3
    assert hybrid["model.patch_embed.projection.weight"] == hybrid["model.class_token"] == 4
    assert hybrid["model.backbone.units.7.conv3.weight"] == 4
    assert hybrid["model.backbone.units.0.conv1.weight"] == 11
    assert hybrid["model.backbone.root.weight"] == hybrid["model.backbone.root_norm.weight"] == 12
    bit = exponents(objective("BiT"))
    assert (
        bit["model.norm.weight"],
        bit["model.backbone.units.7.conv1.weight"],
        bit["model.backbone.root.weight"],
    ) == (
        *(0, 1),
        9,
    )


def test_without_layer_decay_there_are_two_groups_and_with_it_two_for_each_layer():
    built = objective("plain")
    assert len(group_parameters(built, 0.1)) == 2
    assert len(group_parameters(built, 0.0)) == 1
    assert len(group_parameters(built, 0.1, 0.7)) == 2 * (3 + 2)


def test_the_learning_rate_goes_to_every_group_by_its_scale():
    built = objective("plain")
    optimizer = build_optimizer(built, OptimizerConfig(weight_decay=0.1, layer_decay=0.75), CPU)
    set_learning_rate(optimizer, 0.02)
    assert {group["lr"] for group in optimizer.param_groups} == {0.02 * 0.75**power for power in range(5)}


# ---- Steps -----------------------------------------------------------------------------------------------------------


def learner(seed: int = 0) -> Classification:
    """A small model in float64."""
    options = {"image_size": 8, "width": 8, "depth": 2, "num_heads": 2, "mlp_dim": 8, "num_classes": 3}
    return Classification(create_model("Ti/4", seed=seed, dtype=torch.float64, **options))


def values(built: nn.Module) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy().copy() for name, parameter in built.named_parameters()}


def test_adamw_decay_is_the_formula_on_a_weight_without_gradient():
    built = learner()
    optimizer = build_optimizer(built, OptimizerConfig(learning_rate=3e-3, weight_decay=0.2), CPU)
    before = values(built)
    for parameter in built.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kernels = set(find_kernels(built))
    for name, after in values(built).items():
        expected = before[name] * (1 - 3e-3 * 0.2) if name in kernels else before[name]
        np.testing.assert_array_equal(after, expected, err_msg=name)


def test_decay_decoupled_from_the_learning_rate_in_jax_is_the_product_here():
    """Theirs multiplies by 1 − (rate / base) · 1e-4 in every step of a schedule; with a base of 1e-3 ours is 0.1."""
    built = learner()
    optimizer = build_optimizer(built, OptimizerConfig(learning_rate=1e-3, weight_decay=0.1), CPU)
    before, kept = values(built), 1.0
    for step in range(50):
        rate = learning_rate(step, base=1e-3, steps=50, warmup_steps=10, decay="cosine")
        set_learning_rate(optimizer, rate)
        for parameter in built.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        kept *= 1 - rate / 1e-3 * 1e-4
    after = values(built)
    assert kept < 0.998
    for name in find_kernels(built):
        np.testing.assert_allclose(after[name], before[name] * kept, rtol=1e-12, err_msg=name)


BETAS, EPS, MOMENTUM, DECAY, FACTOR = (0.8, 0.95), 1e-6, 0.7, 0.3, 0.5
RATES = (0.01, 0.03, 0.02)


def looped(kind: str, weight: float, gradients: list[float], rates: list[float], decay: float) -> float:
    """One number through all steps, as the papers write them."""
    first = second = 0.0
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        if kind == "adamw":
            weight -= rate * decay * weight
        else:
            gradient += decay * weight
        if kind == "sgd":
            first = MOMENTUM * first + gradient
            weight -= rate * first
            continue
        first = BETAS[0] * first + (1 - BETAS[0]) * gradient
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
        mean, square = first / (1 - BETAS[0] ** step), second / (1 - BETAS[1] ** step)
        weight -= rate * mean / (square**0.5 + EPS)
    return weight


@pytest.mark.parametrize("materialised", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_steps_are_a_loop_in_float64(kind, materialised):
    """`materialised`: with the state that a checkpoint is read into, which must change nothing."""
    built = learner()
    config = OptimizerConfig(kind=kind, weight_decay=DECAY, betas=BETAS, eps=EPS, momentum=MOMENTUM, layer_decay=FACTOR)
    optimizer = build_optimizer(built, config, CPU)
    if materialised:
        initialise_state(optimizer)
    before, generator = values(built), torch.Generator().manual_seed(0)
    gradients = {name: [] for name in before}
    for rate in RATES:
        set_learning_rate(optimizer, rate)
        for name, parameter in built.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            gradients[name].append(parameter.grad.numpy().copy())
        optimizer.step()
    after, kernels, powers = values(built), set(find_kernels(built)), exponents(built)
    for name, start in before.items():
        rates = [rate * FACTOR ** powers[name] for rate in RATES]
        columns = [gradient.ravel() for gradient in gradients[name]]
        for place in range(0, start.size, max(start.size // 5, 1)):
            given = [float(column[place]) for column in columns]
            expected = looped(kind, float(start.ravel()[place]), given, rates, DECAY if name in kernels else 0.0)
            assert after[name].ravel()[place] == pytest.approx(expected, rel=1e-12, abs=1e-14), name


def test_momentum_of_none_keeps_nothing():
    built = learner()
    optimizer = build_optimizer(built, OptimizerConfig(kind="sgd", momentum=0.0), CPU)
    initialise_state(optimizer)
    assert not any(optimizer.state.values())
    kinds = {kind: type(build_optimizer(built, OptimizerConfig(kind=kind), CPU)) for kind in ("adam", "adamw", "sgd")}
    assert kinds == {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
