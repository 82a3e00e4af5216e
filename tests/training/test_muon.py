"""Muon: its steps beside torch's own and AdamW's, and which weights take them."""

from __future__ import annotations

import copy

import pytest
import torch

from vitrail.errors import ConfigError
from vitrail.model.create import create_model
from vitrail.objectives.classification import Classification
from vitrail.training.config import OptimizerConfig
from vitrail.training.muon import orthogonalise
from vitrail.training.optim import build_optimizer, find_encoder_matrices, initialise_state, set_learning_rate

CPU = torch.device("cpu")
SMALL = {"image_size": 32, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 48, "num_classes": 5}
RATES = (0.01, 0.03, 0.02)


def learner(**options) -> Classification:
    torch.manual_seed(0)
    return Classification(create_model("Ti/16", **SMALL, **options).double())


def parts_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Queries, keys and values apart."""
    found = {}
    for name, weight in weights.items():
        pieces = weight.chunk(3) if name.endswith("qkv.weight") else [weight]
        found |= {f"{name}.{number}": piece for number, piece in enumerate(pieces)}
    return found


def theirs(kind: type, weights: dict[str, torch.Tensor], gradients: list[dict], **options) -> dict[str, torch.Tensor]:
    """What an optimiser of torch's makes of weights in steps of RATES."""
    learned = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
    optimizer = kind(learned.values(), **options)
    for rate, given in zip(RATES, gradients, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        for name, parameter in learned.items():
            parameter.grad = given[name].clone()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in learned.items()}


@pytest.mark.parametrize("materialised", [False, True])
def test_steps_are_torchs(monkeypatch, materialised):
    """Matrices of the encoder by its Muon, which computes in bf16 unless it is kept from that; all else by AdamW."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    built = learner()
    before = {name: parameter.detach().clone() for name, parameter in built.named_parameters()}
    optimizer = build_optimizer(built, OptimizerConfig(kind="muon", momentum=0.9, weight_decay=0.3), CPU)
    if materialised:
        initialise_state(optimizer)
    generator, gradients = torch.Generator().manual_seed(0), []
    for rate in RATES:
        set_learning_rate(optimizer, rate)
        for parameter in built.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        gradients.append({name: parameter.grad.clone() for name, parameter in built.named_parameters()})
        optimizer.step()
    after = {name: parameter.detach() for name, parameter in built.named_parameters()}

    def of(tensors: dict, names: list[str]) -> dict:
        return {name: tensors[name] for name in names}

    matrices = [name for name in before if "blocks" in name and before[name].ndim == 2]
    kernels = ["model.patch_embed.projection.weight", "model.head.weight"]
    rest = [name for name in before if name not in matrices and name not in kernels]
    assert len(matrices) == 2 * 4
    expected = theirs(
        torch.optim.Muon,
        parts_of(of(before, matrices)),
        [parts_of(of(given, matrices)) for given in gradients],
        momentum=0.9,
        weight_decay=0.3,
        adjust_lr_fn="match_rms_adamw",
    )
    for names, decay in ((kernels, 0.3), (rest, 0.0)):
        given = [of(step, names) for step in gradients]
        expected |= theirs(torch.optim.AdamW, of(before, names), given, weight_decay=decay)
    found = parts_of(of(after, matrices)) | of(after, [*kernels, *rest])
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def test_what_is_orthogonal_keeps_its_directions():
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(4, n, 20, generator=generator, dtype=torch.float64))[0] for n in (20, 50)
    )
    values = torch.logspace(0, -2, 20, dtype=torch.float64)
    found = left.mT @ orthogonalise(left * values @ right.mT) @ right
    sizes = found.diagonal(dim1=1, dim2=2)
    assert (found - torch.diag_embed(sizes)).abs().max() < 1e-12
    assert 0.6 < sizes.min() < sizes.max() < 1.25


def test_matrices_of_every_encoder_are_found_once():
    built = Classification(create_model("R26+Ti/16", **SMALL, block="axial", pool="average"))
    counts = sorted(find_encoder_matrices(built).values())
    assert counts == [1] * 3 * 4 + [3] * 4  # two blocks of two halves
    optimizer = build_optimizer(built, OptimizerConfig(kind="muon", layer_decay=0.8), CPU)
    learned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(learned) == len(set(learned)) == len(list(built.parameters()))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_its_state_comes_back(momentum):
    """By torch's own way; a checkpoint holds what `materialise` makes."""
    built = learner()
    config = OptimizerConfig(kind="muon", momentum=momentum)
    optimizer, other = (build_optimizer(built, config, CPU) for _ in range(2))
    initialise_state(optimizer)
    before = {name: set(state) for name, state in enumerate(optimizer.state.values())}
    for parameter in built.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert {name: set(state) for name, state in enumerate(optimizer.state.values())} == before
    other.load_state_dict(optimizer.state_dict())
    for parameter in built.parameters():
        ours, theirs = optimizer.state[parameter], other.state[parameter]
        assert all(torch.equal(ours[key], theirs[key]) for key in ours | theirs)
    assert len(copy.deepcopy(optimizer).param_groups) == len(optimizer.param_groups)


def test_a_model_without_encoder_blocks_has_nothing_for_it():
    built = Classification(create_model("BiT-R26x1", num_classes=3))
    with pytest.raises(ConfigError, match=r"optimizer\.kind=adamw"):
        build_optimizer(built, OptimizerConfig(kind="muon"), CPU)


def test_a_step_left_out_changes_nothing_and_what_has_no_gradient_stays():
    built = learner()
    optimizer = build_optimizer(built, OptimizerConfig(kind="muon", weight_decay=0.1), CPU)
    initialise_state(optimizer)
    names = dict(built.named_parameters())
    frozen = names["model.encoder.blocks.0.mlp.fc1.weight"]

    def state() -> list[torch.Tensor]:
        kept = [tensor for parameter in names.values() for tensor in optimizer.state[parameter].values()]
        return [tensor.detach().clone() for tensor in [*names.values(), *kept]]

    for value, missed in ((1.0, 0.0), (torch.nan, 1.0), (1.0, 0.0)):
        for parameter in names.values():
            parameter.grad = None if parameter is frozen else torch.full_like(parameter, value)
        optimizer.found_inf = torch.tensor(missed)
        for group in optimizer.param_groups:
            group["fused"] = True  # as on a GPU: those can leave out a step
        before, kept = state(), frozen.detach().clone()
        optimizer.step()
        same = [torch.equal(old, new) for old, new in zip(before, state(), strict=True)]
        moving = [here for here, parameter in zip(same, names.values(), strict=False) if parameter is not frozen]
        assert all(same) if missed else not any(moving)
        assert torch.equal(frozen, kept)
        assert all(torch.isfinite(tensor).all() for tensor in state())
