"""Every initial value of every model, in one place."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import init

from vitrail.model.attention import SelfAttention
from vitrail.model.encoder import LayerScale
from vitrail.model.heads import DistilledHead, MlpHead
from vitrail.model.mlp import MlpBlock, SwigluBlock
from vitrail.model.patches import ConvStem, PatchEmbed
from vitrail.model.pooling import AttentionPool
from vitrail.model.positions import LearnedPositions1d, LearnedPositions2d, RelativePositions, SinCosPositions
from vitrail.model.relative_bias import RelativeBias
from vitrail.model.resnet import HybridUnit, StdConv
from vitrail.model.rotary import LearnedRotaryPositions

TRUNCATED_NORMAL_STD = 0.87962566103423978
"""Standard deviation of a unit normal that is truncated at ±2; weights are divided by it to get the right variance."""


@torch.no_grad()
def initialise(model: nn.Module, generator: torch.Generator | None = None, head_bias: float = 0.0) -> None:
    """Fill all parameters and buffers of a model, as in the authors' released code.

    A convolutional stem is none of theirs. torchvision leaves its layers to PyTorch (uniform, a third of our variance)
    and draws the last one from N(0, 2/D). Ours are LeCun normal like the projection they replace: the recipes with a
    stem were measured so.

    | what                                          | weight                               | bias       |
    |-----------------------------------------------|--------------------------------------|------------|
    | patch projection, stems, tanh layer of a head | LeCun normal (truncated at 2 sigma)  | 0          |
    | q, k, v, each on its own fan; out             | Xavier uniform                       | 0          |
    | both layers of an MLP; a SwiGLU's gate and    | Xavier uniform                       | N(0, 1e-6) |
    | value, each on its own fan                    |                                      |            |
    | norms                                         | 1                                    | 0          |
    | last norm of a hybrid's residual unit         | 0                                    | 0          |
    | last layer of the head                        | 0                                    | head_bias  |
    | learned positions, relative ones, registers   | N(0, 0.02)                           |            |
    | class token, relative bias (BEiT)             | 0                                    |            |
    | learned rotary frequencies                    | base^(−4i/d) in two directions at a  |            |
    |                                               | right angle, random for each head    |            |
    | query of attention pooling                    | Xavier uniform, fans 1 and D         |            |
    | layer scale                                   | the architecture's value             |            |

    Args:
        model: a model whose parameters have memory, but no values yet.
        generator: the source of randomness, on the parameters' device; torch's global one if None.
        head_bias: the released code uses −10 to pre-train on ImageNet-21k with a sigmoid loss.
    """
    for module in model.modules():
        initialise_module(module, generator)
    for module in model.modules():
        if isinstance(module, HybridUnit):  # starts as the identity; after the loop above, which sets all norms to 1
            init.zeros_(module.norm3.weight)
    parameters = dict(model.named_parameters(recurse=False))
    if "class_token" in parameters:
        init.zeros_(parameters["class_token"])
    if "registers" in parameters:
        init.normal_(parameters["registers"], std=0.02, generator=generator)
    initialise_head(model.get_submodule("head"), head_bias)


def initialise_module(module: nn.Module, generator: torch.Generator | None) -> None:
    """Fill the parameters of one module, not of those inside it, as the table of `initialise` says; leave others."""
    match module:
        case PatchEmbed():
            fill_lecun_normal(module.projection, generator)
        case ConvStem():
            for convolution in (each for each in module.modules() if isinstance(each, nn.Conv2d)):
                fill_lecun_normal(convolution, generator)
        case StdConv():
            fill_lecun_normal(module, generator)
        case MlpHead():
            fill_lecun_normal(module.hidden, generator)
        case SelfAttention():
            fill_xavier_uniform(module.qkv, generator, parts=3)
            fill_xavier_uniform(module.out, generator)
            for bias in (module.q_bias, module.v_bias):
                if bias is not None:
                    init.zeros_(bias)
        case AttentionPool():
            init.xavier_uniform_(module.query, generator=generator)
            for linear, parts in ((module.q, 1), (module.kv, 2), (module.out, 1)):
                fill_xavier_uniform(linear, generator, parts)
        case MlpBlock() | SwigluBlock():
            for linear, parts in ((module.fc1, 2 if isinstance(module, SwigluBlock) else 1), (module.fc2, 1)):
                fill_xavier_uniform(linear, generator, parts)
                if linear.bias is not None:
                    init.normal_(linear.bias, std=1e-6, generator=generator)
        case LayerScale():
            init.constant_(module.factor, module.initial)
        case LearnedPositions1d() | LearnedPositions2d() | RelativePositions():
            for table in module.parameters():
                init.normal_(table, std=0.02, generator=generator)
        case RelativeBias():
            init.zeros_(module.table)
        case LearnedRotaryPositions():
            module.draw_frequencies(generator)
        case SinCosPositions():
            module.fill_table()
        case nn.LayerNorm() | nn.RMSNorm() | nn.GroupNorm() | nn.BatchNorm2d():
            module.reset_parameters()


@torch.no_grad()
def initialise_head(head: nn.Module, bias: float = 0.0) -> None:
    """Set the layers that compute the logits to zero, and their biases to `bias`."""
    for layer in head.children() if isinstance(head, MlpHead | DistilledHead) else [head]:
        if isinstance(layer, nn.Linear) and layer is not getattr(head, "hidden", None):
            init.zeros_(layer.weight)
            init.constant_(layer.bias, bias)


def fill_lecun_normal(layer: nn.Linear | nn.Conv2d, generator: torch.Generator | None) -> None:
    """Fill a weight from a normal of variance 1/fan_in, truncated at two standard deviations; set the bias to 0."""
    fan_in = layer.weight[0].numel()
    std = math.sqrt(1 / fan_in) / TRUNCATED_NORMAL_STD
    init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std, generator=generator)
    if layer.bias is not None:
        init.zeros_(layer.bias)


def fill_xavier_uniform(linear: nn.Linear, generator: torch.Generator | None, parts: int = 1) -> None:
    """Fill each of the stacked `parts` of a weight uniformly, variance 2/(fan_in + fan_out); set the bias to 0."""
    weights: tuple[Tensor, ...] = linear.weight.chunk(parts)
    for weight in weights:
        init.xavier_uniform_(weight, generator=generator)
    if linear.bias is not None:
        init.zeros_(linear.bias)
