"""The options of each kind of model, as data: two equal architectures build the same network.

This file does not import torch, so that names and sizes can be listed, checked and saved quickly.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from vitrail.config import Config, ImageSize, show_size
from vitrail.model.option_checks import POOLS_WITH_CLASS_TOKEN as POOLS_WITH_CLASS_TOKEN
from vitrail.model.option_checks import check_rotary_options, check_vit

MAX_COUNT = 1 << 20
"""Upper limit of every count: far above any real model, and no product of two overflows."""
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Field(gt=0, le=MAX_COUNT)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Epsilon = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""The eps of a norm."""
Factor = Annotated[float, Field(ge=1, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NORM_GROUPS = 32
"""Groups of every group norm: they divide its channels."""
BACKBONE_OPTIONS = ("root", "stage_channels", "blocks")
"""The fields of a backbone that are options of a model whose name has a ResNet."""
PositionResize = Literal[
    "bicubic-antialias",
    "bicubic",
    "bicubic-offset",
    "bicubic-corners",
    "bilinear-corners",
    "bilinear",
    "bilinear-antialias",
]
"""How a learned position table is interpolated to another grid; `model/positions.py` has the formulas."""
CONV_LAYER_FIELDS = ("channels", "kernel", "stride", "norm", "activation")


class ConvLayer(Config):
    """One layer of a convolutional stem: convolution, norm, activation. Padding makes the output size / stride."""

    channels: Positive
    kernel: Positive = 3
    stride: Positive = 2
    norm: Literal["batch", "group", "none"] = "batch"
    activation: Literal["relu", "gelu", "none"] = "relu"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kernel % 2 == 0 and self.stride == 1:
            raise ValueError(f"conv_stem: an even kernel ({self.kernel}) needs a stride of 2 or more")
        if self.norm == "group" and self.channels % NORM_GROUPS:
            raise ValueError(f"conv_stem: group norm needs channels divisible by {NORM_GROUPS}, not {self.channels}")
        return self


def _name_conv_layer_fields(value: object) -> object:
    if not isinstance(value, tuple | list):
        return value
    if len(value) > len(CONV_LAYER_FIELDS):
        raise ValueError(f"a layer of conv_stem is ({', '.join(CONV_LAYER_FIELDS)}), not {value}")
    return dict(zip(CONV_LAYER_FIELDS, value, strict=False))


ConvStemLayers = tuple[Annotated[ConvLayer, BeforeValidator(_name_conv_layer_fields)], ...]


class Backbone(Config):
    """A ResNet without its head: stages of bottleneck blocks, GroupNorm, weight-standardised convolutions."""

    blocks: tuple[Positive, ...]
    """Bottleneck blocks in each stage; all but the first halve the resolution. A hybrid may have none: only a root."""
    width_factor: Positive = 1
    """Factor on all channel counts: the 4 of R152x4."""
    stage_channels: Positive = 64
    """Channels inside the bottleneck of the first stage, before the width factor; four times as many leave it."""
    root: Literal["large", "small"] = "large"
    """`large`: a 7×7 convolution and a pooling, each of stride 2. `small`: a 3×3 convolution of stride 1, for small
    images: the first stage sees them at their own size."""
    form: Literal["hybrid", "bit"]
    """`hybrid`: post-activation, a norm on the projection shortcut, TensorFlow's SAME padding (the released ViT
    code). `bit`: pre-activation, symmetric padding (the BiT baselines)."""
    norm_eps: Epsilon
    standardise_by: Literal["std", "variance"]
    """Convolution weights become (w − mean) / (std + eps), or (w − mean) / √(variance + eps)."""
    standardise_eps: Epsilon

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.blocks and self.form == "bit":
            raise ValueError("a BiT ResNet has at least one stage of blocks")
        if self.stage_channels % NORM_GROUPS:
            raise ValueError(f"stage_channels = {self.stage_channels}: group norm needs a multiple of {NORM_GROUPS}")
        if self.out_channels > MAX_COUNT:
            raise ValueError(
                f"{len(self.blocks)} stages, the first of {self.root_channels} channels and each of twice as many as "
                f"the one before, end with more than {MAX_COUNT} channels: give fewer"
            )
        return self

    @property
    def root_channels(self) -> int:
        """Channels of the root, and inside the bottleneck of the first stage."""
        return self.stage_channels * self.width_factor

    @property
    def root_kernel(self) -> int:
        """Side of the root convolution."""
        return 7 if self.root == "large" else 3

    @property
    def stride(self) -> int:
        """Image pixels for each pixel of the feature map: 4 in a large root, then 2 in each stage but the first."""
        return (4 if self.root == "large" else 1) << max(len(self.blocks) - 1, 0)

    @property
    def out_channels(self) -> int:
        """Channels of the feature map."""
        return 4 * self.root_channels << (len(self.blocks) - 1) if self.blocks else self.root_channels


class Rotary(Config):
    """Rotary positions: every attention turns queries and keys by angles that grow with row and column.

    The defaults are DINOv3's. Tokens that are no patch are never turned.
    """

    coordinates: Literal["unit", "index"] = "unit"
    """`unit`: centres of patches in [−1, 1], each axis on its own; a full turn at 1 (DINOv3). `index`: row and column
    numbers from 0 on (EVA-02, Perception Encoder)."""
    base: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 100.0
    """Frequencies go from 1 down to almost 1/base."""
    layout: Literal["halves", "pairs"] = "halves"
    """Which dimensions of a head turn together: i and i + d/2, or 2i and 2i + 1."""
    offset: Finite = 0.0
    """Added to index coordinates."""
    first: Literal["row", "column"] = "row"
    """The axis of the first half of the frequencies."""
    reference_grid: tuple[Positive, Positive] | None = None
    """Index coordinates are stretched from the model's grid to these rows and columns."""
    learned: bool = False
    """Frequencies for each head, block and axis are parameters ("RoPE-Mixed")."""
    shift: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """While training, move each axis by a random number up to this."""
    jitter: Factor | None = None
    """While training, stretch each axis by a random factor from 1/jitter to jitter."""
    rescale: Factor | None = None
    """While training, stretch both axes by one random factor from 1/rescale to rescale."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_rotary_options(self)
        return self


class VitArchitecture(Config):
    """A Vision Transformer, plain or hybrid. The defaults are the paper's and the released code's."""

    image_size: ImageSize = (224, 224)
    in_channels: Positive = 3
    patch_size: Positive
    """Side of a patch: in image pixels, or in pixels of the feature map if there is a backbone."""
    width: Positive
    depth: Positive
    mlp_dim: Positive
    num_heads: Positive
    num_classes: Count = 1000
    """With 0 there is no head: the model then returns its representation."""

    pool: Literal["class", "average", "attention", "class+average", "distilled"] = "class"
    """`class+average`: both, side by side (DINOv2's classifiers). `distilled`: the class token and the first register,
    each with a head of its own, whose logits are averaged (DeiT)."""
    class_token: bool = True
    """By default, true if `pool` reads it."""
    registers: Count = 0
    """Learned tokens between the class token and the patches; only the pooling "distilled" reads one."""
    pool_heads: Positive | None = None
    """Heads of attention pooling; None: `num_heads`."""
    pool_mlp_dim: Positive | None = None
    """Hidden width of attention pooling's MLP, which always has a GELU and biases; None: `mlp_dim`."""
    pool_prefix: bool = False
    """Attention pooling also reads the tokens before the patches (Perception Encoder)."""
    position: Literal["none", "learned-1d", "learned-2d", "relative", "relative-bias", "sin-cos"] = "learned-1d"
    """`relative-bias`: a learned number for each head and 2-D offset on the attention's logits (BEiT)."""
    position_at: Literal["input", "every-layer", "shared"] = "input"
    """Added once, before every layer with a table for each, or before every layer with one shared table. A
    `relative-bias` acts in every layer, with a table for each or a shared one."""
    position_prefix: Literal["class", "all", "none"] = "class"
    """Which of the tokens before the patches have a row in the learned table."""
    position_resize: PositionResize = "bicubic-antialias"
    """How a learned table is interpolated to another grid. `bicubic-antialias`: as in timm. `bicubic`: transformers.
    `bicubic-offset`: DINOv2's own code. `bicubic-corners`: torchvision. `bilinear-corners`: Google's code.
    `bilinear-antialias`: SigLIP 2 for any shape. `bilinear`: transformers' BEiT, which stretches all offsets of a
    relative bias evenly; with any other value they are stretched as BEiT's own code does."""
    rotary: Rotary | None = None
    """Rotary positions in every attention, also beside `position`."""
    block: Literal["plain", "axial"] = "plain"
    """`axial`: attention along rows + MLP, then along columns + MLP, in every block."""
    representation_size: Positive | None = None
    """Width of the tanh layer of the pre-training head; None is the fine-tuning head, one linear layer."""
    conv_stem: ConvStemLayers | None = None
    """Convolutions instead of the patch projection; the product of their strides is `patch_size`."""
    backbone: Backbone | None = None
    """The ResNet of a hybrid."""

    dropout: Rate = 0.0
    """After every dense layer except the qkv projections, and after adding the position embedding."""
    attention_dropout: Rate = 0.0
    stochastic_depth: Rate = 0.0
    """Rate for the last block; it grows linearly from 0 at the first."""
    layer_scale: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Initial value of a learned factor on each residual branch; None leaves it out."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """`swiglu`: silu(gate) · value, each `mlp_dim` wide, instead of a GELU."""
    gelu: Literal["tanh", "exact", "quick"] = "tanh"
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: Epsilon = 1e-6
    input_norm: bool = False
    """A norm on the tokens before the first block (CLIP)."""
    norm_after_pool: bool = False
    """The final norm acts on the pooled vector instead of on every token (MAE and its descendants)."""
    norm_at: Literal["before", "after"] = "before"
    """`after`: z + norm(attention(z)), and the same with the MLP."""
    final_norm: bool = True
    """False leaves the last norm out."""
    patch_norm: bool = False
    """A norm on the embedded patches, before positions (AIMv2)."""
    qk_norm: bool = False
    """A norm on every query and key, over the width of a head."""
    attention_norm: bool = False
    """A norm on the mixed values, before attention's output projection (EVA-02)."""
    mlp_norm: bool = False
    """A norm on the hidden layer of the MLP, before its second layer (EVA-02)."""
    qkv_bias: bool = True
    key_bias: bool = True
    """With `qkv_bias`, whether keys have a bias too (BEiT, EVA and DINOv3: False)."""
    out_bias: bool = True
    """Whether attention's output projection has a bias."""
    mlp_bias: bool = True
    """Whether the layers of the blocks' MLPs have biases."""
    patch_bias: bool = True

    @model_validator(mode="before")
    @classmethod
    def _class_token_follows_pool(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("class_token") is None:
            values = {**values, "class_token": values.get("pool", "class") in POOLS_WITH_CLASS_TOKEN}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_vit(self)
        return self

    @property
    def stride(self) -> int:
        """Image pixels from one token to the next: the 16 of B/16."""
        return self.patch_size * (self.backbone.stride if self.backbone else 1)

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        return self.width // self.num_heads

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches."""
        return self.class_token + self.registers

    @property
    def position_rows(self) -> int:
        """Number of tokens before the patches that have a row in the position table."""
        if self.position not in ("learned-1d", "learned-2d"):
            return 0
        return {"none": 0, "class": int(self.class_token), "all": self.prefix}[self.position_prefix]

    @property
    def resizes_table(self) -> bool:
        """Whether a learned table is interpolated at other image sizes, as `position_resize` says."""
        return self.position in ("learned-1d", "learned-2d", "relative-bias")

    @property
    def representation_width(self) -> int:
        """Width of the representation y."""
        return self.width * (2 if self.pool in ("class+average", "distilled") else 1)

    def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of patches; raise a ValueError if the size does not divide."""
        if any(side % self.stride for side in image_size):
            raise ValueError(explain_misfit(image_size, self.stride))
        return image_size[0] // self.stride, image_size[1] // self.stride


class ResNetArchitecture(Config):
    """A BiT ResNet: the convolutional baseline that the paper compares with."""

    image_size: ImageSize = (224, 224)
    """Image size of the preprocessing; the network runs at any size from its stride on: 32 pixels, with a small root
    8."""
    in_channels: Positive = 3
    num_classes: Count = 1000
    backbone: Backbone

    @model_validator(mode="after")
    def _check(self) -> Self:
        if min(self.image_size) < self.backbone.stride:
            raise ValueError(f"image size {show_size(self.image_size)} is below the least, {self.backbone.stride}")
        return self

    @property
    def representation_width(self) -> int:
        """Width of the representation y."""
        return self.backbone.out_channels


Architecture = VitArchitecture | ResNetArchitecture
"""An architecture of one of vitrail's own networks."""


class TimmArchitecture(Config):
    """A network of timm, by its name. It may come from an untrusted config.json."""

    name: Annotated[str, Field(pattern=r"\A[a-z0-9_]+(\.[a-z0-9_]+)?\z", max_length=200)]
    """The name in timm's list, `resnet50` or `resnet50.a1_in1k`; a path or an address is refused."""
    image_size: ImageSize
    in_channels: Positive = 3
    num_classes: Count
    dropout: Rate | None = None
    """Rate before the head; None uses timm's default."""
    stochastic_depth: Rate | None = None
    """Rate for the last block; None uses timm's default."""

    def copy_at_size(self, image_size: int | tuple[int, int]) -> TimmArchitecture:
        """Return a copy for another image size."""
        return TimmArchitecture(**{**dict(self), "image_size": image_size})


def explain_misfit(image_size: tuple[int, int], stride: int) -> str:
    """Return the error message for an image size that does not divide into patches; it names the nearest ones."""
    below = tuple(max(side // stride, 1) * stride for side in image_size)
    above = tuple(-(-side // stride) * stride for side in image_size)
    nearest = dict.fromkeys(show_size((size[0], size[1])) for size in (below, above))
    verb = "size that does is" if len(nearest) == 1 else "sizes that do are"
    return (
        f"image size {show_size(image_size)} does not divide into patches of {stride}: "
        f"the nearest {verb} {' and '.join(nearest)}"
    )
