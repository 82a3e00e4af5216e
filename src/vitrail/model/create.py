"""`create_model` builds a model with fresh weights from a name."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import nn

from vitrail.errors import ConfigError
from vitrail.model.architecture import (
    BACKBONE_OPTIONS,
    Architecture,
    Backbone,
    ConvLayer,
    PositionResize,
    ResNetArchitecture,
    Rotary,
    TimmArchitecture,
    VitArchitecture,
)
from vitrail.model.base import ImageModel
from vitrail.model.bit import BitResNet
from vitrail.model.initialise import initialise
from vitrail.model.timm_model import TimmModel
from vitrail.model.variants import make_architecture
from vitrail.model.vit import VisionTransformer
from vitrail.system.device import parse_device


def create_model(
    name: str,
    *,
    image_size: int | tuple[int, int] = 224,
    in_channels: int = 3,
    num_classes: int = 1000,
    patch_size: int | None = None,
    width: int | None = None,
    depth: int | None = None,
    mlp_dim: int | None = None,
    num_heads: int | None = None,
    backbone: Backbone | None = None,
    root: Literal["large", "small"] | None = None,
    stage_channels: int | None = None,
    blocks: Sequence[int] | None = None,
    pool: Literal["class", "average", "attention", "class+average", "distilled"] = "class",
    class_token: bool | None = None,
    registers: int = 0,
    pool_heads: int | None = None,
    pool_mlp_dim: int | None = None,
    pool_prefix: bool = False,
    position: Literal["none", "learned-1d", "learned-2d", "relative", "relative-bias", "sin-cos"] = "learned-1d",
    position_at: Literal["input", "every-layer", "shared"] = "input",
    position_prefix: Literal["class", "all", "none"] = "class",
    position_resize: PositionResize = "bicubic-antialias",
    rotary: Rotary | Mapping[str, Any] | None = None,
    block: Literal["plain", "axial"] = "plain",
    representation_size: int | None = None,
    conv_stem: Sequence[ConvLayer | Sequence[Any]] | None = None,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    stochastic_depth: float = 0.0,
    layer_scale: float | None = None,
    mlp: Literal["gelu", "swiglu"] = "gelu",
    gelu: Literal["tanh", "exact", "quick"] = "tanh",
    norm: Literal["layer", "rms"] = "layer",
    norm_eps: float = 1e-6,
    input_norm: bool = False,
    norm_after_pool: bool = False,
    norm_at: Literal["before", "after"] = "before",
    final_norm: bool = True,
    patch_norm: bool = False,
    qk_norm: bool = False,
    attention_norm: bool = False,
    mlp_norm: bool = False,
    qkv_bias: bool = True,
    key_bias: bool = True,
    out_bias: bool = True,
    mlp_bias: bool = True,
    patch_bias: bool = True,
    seed: int | None = None,
    head_bias: float = 0.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> VisionTransformer | BitResNet:
    """Create a model with fresh weights, initialised as in the authors' released code.

    A BiT ResNet takes image_size, in_channels, num_classes, backbone, root, stage_channels and blocks, and no other
    option of the architecture.

        vitrail.create_model("BiT-R26x1", root="small", image_size=32, num_classes=10)

    Args:
        name: SIZE/PATCH ("Ti/16", "S/8", "B/16", "L/32", "H/14"), a hybrid ("R50+B/16") or a BiT ResNet
            ("BiT-R50x1"); `vitrail models` lists them.
        image_size: pixels, or (height, width); the patch size must divide it.
        in_channels: channels of an image.
        num_classes: outputs of the head; 0 leaves the head out, and the model returns its representation.
        patch_size: side of a patch in image pixels, or in pixels of the feature map if there is a backbone. This and
            the next five replace what the name says; None keeps it.
        width: size of a token's vector.
        depth: number of encoder blocks.
        mlp_dim: width of the hidden layer of each block's MLP.
        num_heads: attention heads; they divide the width.
        backbone: the ResNet of a hybrid.
        root: the first layers of a ResNet, in a hybrid or BiT. "large" (if None): a 7×7 convolution and a pooling, each
            of stride 2. "small", for small images: a 3×3 convolution of stride 1. The stride of a hybrid is then a
            quarter of the one in its name: that of "R26+Ti/16" is 4.
        stage_channels: channels inside the bottlenecks of a ResNet's first stage, a multiple of 32; 64 if None.
            Each further stage has twice as many.
        blocks: bottleneck blocks in each stage of a ResNet; None: by name. Each stage after the first doubles the
            stride.
        pool: how tokens become the representation. "class+average": both, side by side (DINOv2's classifiers).
            "distilled": the class token and the first register, each with a head, whose logits are averaged (DeiT).
        class_token: whether there is a class token; None: only if `pool` reads it.
        registers: number of learned tokens after the class token.
        pool_heads: heads of attention pooling; None: num_heads.
        pool_mlp_dim: hidden width of attention pooling's MLP; None: mlp_dim.
        pool_prefix: whether attention pooling also reads the tokens before the patches (Perception Encoder).
        position: the kind of position embedding. "relative-bias": a learned number for each head and 2-D offset (BEiT).
        position_at: added once to the input, before every layer with a table for each, or with one shared table. A
            "relative-bias" has a table for each layer or a shared one.
        position_prefix: which of the tokens before the patches have a row in the learned table.
        position_resize: how a learned table is interpolated to another grid: as in timm ("bicubic-antialias"),
            transformers ("bicubic"), DINOv2's own code ("bicubic-offset"), torchvision ("bicubic-corners"), Google's
            code ("bilinear-corners"), SigLIP 2 for any shape ("bilinear-antialias") or transformers' BEiT ("bilinear").
        rotary: rotary positions in every attention, also beside `position`: a `Rotary`, or a dict of its fields.
        block: "axial" attends along rows and then along columns.
        representation_size: width of the tanh layer of the pre-training head; None leaves it out.
        conv_stem: layers (channels, kernel, stride, norm, activation) instead of the patch projection.
        dropout: rate in [0, 1) after every dense layer except the qkv projections, and after the positions.
        attention_dropout: rate in [0, 1) for attention weights.
        stochastic_depth: rate in [0, 1) for the last block; it grows linearly from 0 at the first.
        layer_scale: initial value of a learned factor on each residual branch; None leaves it out.
        mlp: "swiglu" multiplies a gate silu(x) by a value, each mlp_dim wide, instead of a GELU.
        gelu: tanh approximation (the released code), exact, or the sigmoid approximation "quick" (CLIP).
        norm: LayerNorm or RMSNorm.
        norm_eps: epsilon of the norms.
        input_norm: a norm on the tokens before the first block (CLIP).
        norm_after_pool: the final norm acts on the pooled vector instead of on every token (MAE).
        norm_at: "after" puts the norms of a block behind attention and MLP.
        final_norm: whether there is a last norm.
        patch_norm: a norm on the embedded patches, before positions (AIMv2).
        qk_norm: a norm on every head's queries and keys.
        attention_norm: a norm before attention's output projection (EVA-02).
        mlp_norm: a norm before the second layer of an MLP (EVA-02).
        qkv_bias: whether the qkv projections have a bias.
        key_bias: with qkv_bias, whether keys have one too (BEiT, EVA and DINOv3: False).
        out_bias: whether attention's output projection has a bias.
        mlp_bias: whether the layers of the blocks' MLPs have biases.
        patch_bias: whether the patch projection has a bias.
        seed: the same seed gives the same weights on every device; None draws from torch's global generator.
        head_bias: initial bias of the head.
        device: where the parameters live; torch's default device if None. "meta" gives shapes without memory.
        dtype: floating-point type of the parameters; values are drawn in float32 first.

    Returns:
        A `VisionTransformer` or a `BitResNet`, in training mode.

    Raises:
        ConfigError: an unknown name, values that do not fit together, or an option that the named model does
            not have.
    """
    # Only what differs from the defaults is passed on: a BiT ResNet has none of the Vision Transformer's options.
    arguments, defaults = locals(), create_model.__kwdefaults__ or {}
    options = (*VitArchitecture.model_fields, *BACKBONE_OPTIONS)
    given = [option for option in options if arguments[option] != defaults[option]]
    architecture = make_architecture(name, **{option: arguments[option] for option in given})
    return create_from_architecture(architecture, seed=seed, head_bias=head_bias, device=device, dtype=dtype)


def create_from_architecture(
    architecture: Architecture,
    *,
    seed: int | None = None,
    head_bias: float = 0.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> VisionTransformer | BitResNet:
    """Create the model of an architecture with fresh weights. The other arguments are those of `create_model`."""
    target = parse_device(device) if device is not None else torch.get_default_device()
    check_dtype(dtype)
    model = build_empty_model(architecture)
    if target.type != "meta":
        # Values are drawn on the CPU, so that a seed gives the same weights on every device.
        model = model.to_empty(device="cpu")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        initialise(model, generator, head_bias)
    return model.to(device=target, dtype=dtype)


@overload
def build_empty_model(architecture: Architecture) -> VisionTransformer | BitResNet: ...
@overload
def build_empty_model(architecture: TimmArchitecture) -> TimmModel: ...
def build_empty_model(architecture: Architecture | TimmArchitecture) -> VisionTransformer | BitResNet | TimmModel:
    """Build the network of an architecture on the meta device, without memory or values."""
    if isinstance(architecture, TimmArchitecture):
        return TimmModel(architecture)
    with torch.device("meta"):
        if isinstance(architecture, ResNetArchitecture):
            return BitResNet(architecture)
        return VisionTransformer(architecture)


def copy_model(model: ImageModel, **options: Any) -> ImageModel:
    """Return a copy of a model with tensors of its own, ready to evaluate.

    Args:
        model: stays as it is.
        options: fields of the architecture to change that no tensor depends on, such as dropout.
    """
    architecture = model.architecture
    fields = {name: getattr(architecture, name) for name in type(architecture).model_fields}
    copied: ImageModel = build_empty_model(type(architecture)(**{**fields, **options}))
    copied.load_state_dict({name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, assign=True)
    copied.preprocessing, copied.labels = model.preprocessing, model.labels
    copied.origin, copied.training_cost = model.origin, model.training_cost
    copied.learned_from, copied.chosen_by = model.learned_from, model.chosen_by
    copied.stored_task, copied.reliability = model.stored_task, model.reliability
    copied.unused_tensors = dict(model.unused_tensors)
    return copied.eval()


def share_model(model: ImageModel) -> ImageModel:
    """Return a copy of a model that shares its tensors. The copy can be moved, cast or put into another mode; the model
    stays as it is."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.buffers(), *model.unused_tensors.values())}
    for parameter in model.parameters():
        shared[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    return copy.deepcopy(model, shared)


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise a ConfigError if `dtype` is not a floating-point type of torch."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype = {dtype!r}: give a floating-point type such as torch.bfloat16")
