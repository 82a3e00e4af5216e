"""Optimizers, and which parameters they decay, scale and orthogonalise.

Weight decay acts on kernels only: the weights of dense and convolutional layers. Biases, norms, the class token,
registers, position tables, rotary frequencies, layer scales and the mask embedding keep their size.

Decay here is PyTorch's. AdamW multiplies a weight by 1 − learning_rate · weight_decay in every step. JAX recipes of the
"big_vision" line multiply by 1 − (learning_rate / base) · their_decay, so their 1e-4 at a base of 1e-3 is 0.1 here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.model.encoder import AxialEncoderBlock, EncoderBlock
from vitrail.model.mlp import SwigluBlock
from vitrail.model.resnet import BitUnit, HybridUnit
from vitrail.model.timm_model import TimmModel
from vitrail.objectives.base import Objective
from vitrail.training.config import OptimizerConfig
from vitrail.training.muon import Muon

_AFTER = (
    *("model.encoder.norm.", "model.norm.", "model.pool.", "model.pool_norm.", "model.head."),
    *("prediction.", "decoder.", "projector.", "teacher."),
)
"""Prefixes of the parameters after the last layer. Decoders and projectors count as such; a teacher does not learn."""
_BACKBONE = "model.backbone."


def build_optimizer(objective: Objective, config: OptimizerConfig, device: torch.device) -> torch.optim.Optimizer:
    """Build the optimizer, with parameters grouped by weight decay and by the factor on their learning rate.

    Raises:
        ConfigError: Muon is asked for, and the model has no encoder blocks.
    """
    groups = group_parameters(objective, config.weight_decay, config.layer_decay)
    if config.kind == "muon":
        matrices = find_encoder_matrices(objective)
        if not matrices:
            raise ConfigError(
                'optimizer.kind = "muon" moves the matrices of encoder blocks, and this model has none: '
                "give optimizer.kind=adamw"
            )
        groups = separate_matrices(groups, matrices, config.momentum)
    options: dict[str, Any] = {"lr": config.learning_rate}
    if device.type == "cuda":
        options["fused"] = True  # one kernel for all parameters
    if config.kind == "sgd":
        return torch.optim.SGD(groups, momentum=config.momentum, **options)
    kinds: dict[str, type[torch.optim.Adam]] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "muon": Muon}
    return kinds[config.kind](groups, betas=config.betas, eps=config.eps, **options)


def group_parameters(
    objective: nn.Module, weight_decay: float, layer_decay: float | None = None
) -> list[dict[str, Any]]:
    """Group the parameters that learn by weight decay and by `scale`, the factor on the learning rate."""
    kernels = set(find_kernels(objective))
    above = {} if layer_decay is None else count_layers_above(objective)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in objective.named_parameters():
        if parameter.requires_grad:
            decay = weight_decay if name in kernels else 0.0
            scale = 1.0 if layer_decay is None else layer_decay ** above[name]
            groups.setdefault((decay, scale), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "scale": scale} for (decay, scale), parameters in groups.items()
    ]


def find_encoder_matrices(objective: nn.Module) -> dict[Tensor, int]:
    """Return the weights of dense layers in encoder blocks, with the number of matrices stacked in each."""
    blocks = [part for part in objective.modules() if isinstance(part, EncoderBlock)]
    stacked = {block.attention.qkv.weight: 3 for block in blocks}
    stacked |= {block.mlp.fc1.weight: 2 for block in blocks if isinstance(block.mlp, SwigluBlock)}  # gate and value
    dense = [part.weight for block in blocks for part in block.modules() if isinstance(part, nn.Linear)]
    return {weight: stacked.get(weight, 1) for weight in dense}


def separate_matrices(
    groups: list[dict[str, Any]], matrices: dict[Tensor, int], momentum: float
) -> list[dict[str, Any]]:
    """Split each group in two: the matrices, as `Muon` needs them, and the rest."""
    split = []
    for group in groups:
        apart = [parameter for parameter in group["params"] if parameter in matrices]
        rest = [parameter for parameter in group["params"] if parameter not in matrices]
        parts = [matrices[parameter] for parameter in apart]
        split += [{**group, "params": rest}] if rest else []
        split += [{**group, "params": apart, "parts": parts, "momentum": momentum}] if apart else []
    return split


def find_kernels(module: nn.Module) -> list[str]:
    """Return the names of the parameters that weight decay acts on."""
    return [
        f"{name}.weight".removeprefix(".")
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear | nn.Conv2d)
    ]


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the units that a model is stacked of by name, the lowest first: residual units, then encoder blocks.

    Empty for timm's networks.
    """
    blocks = AxialEncoderBlock | EncoderBlock
    found = {name: part for name, part in model.named_modules() if isinstance(part, HybridUnit | BitUnit | blocks)}
    # The halves of an axial block are one layer.
    return {name: part for name, part in found.items() if not any(name.startswith(f"{other}.") for other in found)}


def count_layers_above(objective: nn.Module) -> dict[str, int]:
    """Return for each parameter how many layers lie between it and the loss."""
    stack = [name for name in find_layers(objective) if not name.startswith(_AFTER)]
    found = {name: _layers_above(name, stack) for name, _ in objective.named_parameters()}
    for prefix, part in objective.named_modules():
        if isinstance(part, TimmModel):
            found |= {f"{prefix}.{name}".removeprefix("."): count for name, count in part.count_layers_above().items()}
    return found


def _layers_above(name: str, stack: list[str]) -> int:
    """Return how many layers lie between a parameter and the loss: 0 for parameters after the last layer.

    Parameters before a stack of layers count as one more layer below it. A hybrid has two stacks: its root comes before
    the ResNet; its patch embedding, tokens and positions come between the ResNet and the encoder.
    """
    for index, layer in enumerate(stack):
        if name.startswith(f"{layer}."):
            return len(stack) - index
    if name.startswith(_AFTER):
        return 0
    return 1 + sum(name.startswith(_BACKBONE) or not layer.startswith(_BACKBONE) for layer in stack)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate for the next step: in each group, `rate` times the group's scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]


def initialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer its state before its first step, all zero, as that step would.

    So every checkpoint has the same tensors, and can be read straight into them. It also keeps torch's fused SGD from
    leaving its momentum unset if the very first step is skipped.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if "momentum" in group:  # SGD's groups, and Muon's groups of matrices
                if group["momentum"] or isinstance(optimizer, Muon):
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                continue
            device = parameter.device if group["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
