"""The Vision Transformer, plain and hybrid: tokens → encode → representation → head.

Shapes: B images, C channels, H×W pixels, N patches on a grid of (rows, columns), T = prefix + N tokens, D width,
K classes. The prefix is the class token, then the registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from vitrail.errors import InputError
from vitrail.model.architecture import VitArchitecture, explain_misfit
from vitrail.model.base import ImageModel
from vitrail.model.encoder import AxialEncoderBlock, Encoder, EncoderBlock, RowAttention, SelfAttention, build_norm
from vitrail.model.heads import (
    AttentionPool,
    AveragePool,
    ClassAveragePool,
    ClassPool,
    DistilledHead,
    DistilledPool,
    build_head,
)
from vitrail.model.initialise import initialise
from vitrail.model.patches import ConvStem, PatchEmbed
from vitrail.model.positions import (
    Grid,
    InputPositions,
    RelativePositions,
    build_input_positions,
    explain_relative_resize,
)
from vitrail.model.recording import record_blocks
from vitrail.model.resnet import ResNetBackbone


class VisionTransformer(ImageModel):
    """An image is worth 16×16 words."""

    architecture: VitArchitecture

    def __init__(self, architecture: VitArchitecture) -> None:
        super().__init__(architecture)
        self.width = architecture.width
        self.stride = architecture.stride
        self.grid = architecture.grid(architecture.image_size)
        self.prefix = architecture.prefix

        self.backbone = build_backbone(architecture)
        self.patch_embed = build_patch_embed(architecture)
        self.class_token = nn.Parameter(torch.empty(1, self.width)) if architecture.class_token else None
        self.registers = (
            nn.Parameter(torch.empty(architecture.registers, self.width)) if architecture.registers else None
        )
        self.position_embedding = build_position_embedding(architecture, self.grid)
        self.dropout = nn.Dropout(architecture.dropout)
        self.input_norm = _norm(architecture) if architecture.input_norm else nn.Identity()
        self.encoder = build_encoder(architecture, self.grid)
        self.pool = build_pool(architecture)
        self.pool_norm = _norm(architecture) if architecture.norm_after_pool else nn.Identity()
        self.head = self.build_head()

        self.axial = architecture.block == "axial"
        self.position = architecture.position
        self.position_in_every_layer = architecture.position_at != "input"
        initialise(self)

    def build_head(self) -> nn.Module:
        """tanh-MLP, one linear layer, or two of them that are averaged."""
        architecture = self.architecture
        if architecture.pool == "distilled" and architecture.num_classes:
            return DistilledHead(architecture.width, architecture.num_classes)
        return build_head(architecture.representation_width, architecture.representation_size, architecture.num_classes)

    def tokens(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, N, D): the embedded patches x_p · E, before positions."""
        self.check_images(images)
        self.measure_grid(images)
        features = images if self.backbone is None else self.backbone(images)
        tokens: Tensor = self.patch_embed(features)
        return tokens

    def encode(self, tokens: Tensor, grid: Grid | None = None) -> Tensor:
        """(B, N, D) embedded patches → (B, T, D) encoded tokens, prefix first, after the last norm.

        `grid`: rows and columns of the patches, where they are not the model's own.
        """
        grid = grid or self.grid
        if tokens.ndim != 3 or tokens.shape[1] != grid[0] * grid[1] or tokens.shape[2] != self.width:
            raise InputError(
                f"a grid of {grid[0]}×{grid[1]} patches needs tokens of shape (batch, {grid[0] * grid[1]}, "
                f"{self.width}), not {tuple(tokens.shape)}: for images of another size give encode(tokens, grid=…)"
            )
        if self.position == "relative" and grid != self.grid:
            raise InputError(explain_relative_resize(self.grid, grid))
        positions = [self._table(positions, grid) for positions in self.position_embedding]
        z = self._with_prefix(tokens)
        if positions:
            z = z + positions[0]
        z = self.input_norm(self.dropout(z))
        if self.position_in_every_layer and len(positions) == 1:
            positions = positions * len(self.encoder.blocks)
        if self.axial:
            z, positions = z.unflatten(1, grid), [table.unflatten(0, grid) for table in positions]
        encoded: Tensor = self.encoder(z, positions if self.position_in_every_layer else ())
        return encoded.flatten(1, 2) if self.axial else encoded

    def forward_features(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, T, D) encoded tokens, after the last norm."""
        return self.encode(self.tokens(images), self.measure_grid(images))

    def pool_features(self, features: Tensor) -> Tensor:
        """(B, T, D) → (B, D): the representation y of equation 4."""
        y: Tensor = self.pool_norm(self.pool(features))
        return y

    def intermediate_layers(self, images: Tensor, layers: Sequence[int], norm: bool = False) -> list[Tensor]:
        """(B, C, H, W) → one (B, T, D) for each of `layers`: what those blocks give out.

        Blocks are counted from 0; negative ones from the end. `norm` applies the last norm to each.
        """
        with record_blocks(self.encoder, layers) as outputs:
            self.forward_features(images)
        states = [z.flatten(1, 2) if self.axial else z for z in outputs]
        return [self.encoder.norm(z) for z in states] if norm else states

    def measure_grid(self, images: Tensor) -> Grid:
        """Rows and columns of patches that a batch of images has."""
        height, width = images.shape[2:]
        if height % self.stride or width % self.stride or not height or not width:
            raise InputError(explain_misfit((height, width), self.stride))
        return height // self.stride, width // self.stride

    def resize(self, image_size: int | tuple[int, int]) -> Self:
        """Change the image size for good: the position embedding is interpolated in two dimensions to the new grid."""
        old = self.architecture
        self._rebuild_architecture(image_size=image_size)
        grid = self.architecture.grid(self.image_size)
        try:
            for module in self.modules():
                if isinstance(module, InputPositions | RelativePositions):
                    module.resize(grid)
        except InputError:
            self.architecture = old
            raise
        self.grid = grid
        self.preprocessing = self.preprocessing.model_copy(update={"image_size": self.image_size})
        return self

    def set_gradient_checkpointing(self, enabled: bool = True) -> None:
        """For every encoder block, and every residual unit of a hybrid."""
        self.encoder.gradient_checkpointing = enabled
        if self.backbone is not None:
            self.backbone.gradient_checkpointing = enabled

    def _with_prefix(self, tokens: Tensor) -> Tensor:
        """[x_class; registers; patches]."""
        prefix = [
            token.expand(tokens.shape[0], -1, -1) for token in (self.class_token, self.registers) if token is not None
        ]
        return torch.cat([*prefix, tokens], dim=1) if prefix else tokens

    def _table(self, positions: nn.Module, grid: Grid) -> Tensor:
        """(T, D): the position embedding of every token, zero for those without one."""
        assert isinstance(positions, InputPositions)
        table: Tensor = positions(grid)
        owned, missing = positions.prefix, self.prefix - positions.prefix
        if not missing:
            return table
        return torch.cat([table[:owned], table.new_zeros(missing, self.width), table[owned:]])


def build_backbone(architecture: VitArchitecture) -> ResNetBackbone | None:
    """The ResNet of a hybrid."""
    return None if architecture.backbone is None else ResNetBackbone(architecture.in_channels, architecture.backbone)


def build_patch_embed(architecture: VitArchitecture) -> PatchEmbed | ConvStem:
    """What turns the image, or a hybrid's feature map, into tokens."""
    if architecture.conv_stem is not None:
        return ConvStem(architecture.in_channels, architecture.conv_stem, architecture.width)
    channels = architecture.backbone.out_channels if architecture.backbone else architecture.in_channels
    return PatchEmbed(channels, architecture.patch_size, architecture.width, architecture.patch_bias)


def build_position_embedding(architecture: VitArchitecture, grid: Grid) -> nn.ModuleList:
    """None, one, or one for each layer."""
    a = architecture
    copies = a.depth if a.position_at == "every-layer" else 1
    built = [build_input_positions(a.position, grid, a.width, a.position_rows) for _ in range(copies)]
    return nn.ModuleList(positions for positions in built if positions is not None)


def build_encoder(architecture: VitArchitecture, grid: Grid) -> Encoder:
    """The blocks; stochastic depth grows from 0 at the first to its full rate at the last."""

    def block(index: int) -> EncoderBlock:
        relative = None
        if architecture.position == "relative":
            relative = RelativePositions(grid, architecture.width // architecture.num_heads, architecture.prefix)
        return EncoderBlock(
            architecture.width,
            architecture.num_heads,
            architecture.mlp_dim,
            gelu=architecture.gelu,
            norm=architecture.norm,
            norm_eps=architecture.norm_eps,
            qkv_bias=architecture.qkv_bias,
            dropout=architecture.dropout,
            attention_dropout=architecture.attention_dropout,
            stochastic_depth=architecture.stochastic_depth * index / max(architecture.depth - 1, 1),
            layer_scale=architecture.layer_scale,
            relative=relative,
            attention=RowAttention if architecture.block == "axial" else SelfAttention,
        )

    blocks: list[EncoderBlock | AxialEncoderBlock]
    if architecture.block == "axial":
        blocks = [AxialEncoderBlock(block(index), block(index)) for index in range(architecture.depth)]
    else:
        blocks = [block(index) for index in range(architecture.depth)]
    return Encoder(blocks, nn.Identity() if architecture.norm_after_pool else _norm(architecture))


def build_pool(architecture: VitArchitecture) -> nn.Module:
    """Encoded tokens → y."""
    match architecture.pool:
        case "class":
            return ClassPool()
        case "average":
            return AveragePool(architecture.prefix)
        case "class+average":
            return ClassAveragePool(architecture.prefix)
        case "distilled":
            return DistilledPool()
        case "attention":
            return AttentionPool(
                architecture.width,
                architecture.num_heads,
                architecture.mlp_dim,
                _norm(architecture),
                architecture.gelu,
                architecture.prefix,
            )


def _norm(architecture: VitArchitecture) -> nn.LayerNorm | nn.RMSNorm:
    return build_norm(architecture.norm, architecture.width, architecture.norm_eps)
