"""The Vision Transformer, plain and hybrid: images → tokens → encoded tokens → representation → logits.

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
from vitrail.model.attention import Places
from vitrail.model.base import ImageModel
from vitrail.model.encoder import build_encoder
from vitrail.model.heads import DistilledHead, build_head
from vitrail.model.initialise import initialise
from vitrail.model.norms import build_norm_if
from vitrail.model.patches import build_patch_embed
from vitrail.model.pooling import build_pool
from vitrail.model.positions import (
    Grid,
    InputPositions,
    RelativePositions,
    build_position_embedding,
    explain_relative_resize,
)
from vitrail.model.recording import record_blocks
from vitrail.model.relative_bias import RelativeBias, build_relative_bias
from vitrail.model.resnet import ResNetBackbone
from vitrail.model.rotary import build_rotary


class VisionTransformer(ImageModel):
    """The model of "An Image is Worth 16×16 Words" (arXiv 2010.11929): equations 1 to 4, then a head."""

    architecture: VitArchitecture

    def __init__(self, architecture: VitArchitecture) -> None:
        super().__init__(architecture)
        self.width = architecture.width
        self.stride = architecture.stride
        self.grid = architecture.grid(architecture.image_size)
        self.prefix = architecture.prefix

        backbone = architecture.backbone
        self.backbone = None if backbone is None else ResNetBackbone(architecture.in_channels, backbone)
        self.patch_embed = build_patch_embed(architecture)
        self.patch_norm = build_norm_if(architecture.patch_norm, architecture)
        self.class_token = nn.Parameter(torch.empty(1, self.width)) if architecture.class_token else None
        self.registers = (
            nn.Parameter(torch.empty(architecture.registers, self.width)) if architecture.registers else None
        )
        self.position_embedding = build_position_embedding(architecture, self.grid)
        self.rotary = build_rotary(architecture)
        self.relative_bias = (
            build_relative_bias(architecture, self.grid)
            if architecture.position == "relative-bias" and architecture.position_at == "shared"
            else None
        )
        self.dropout = nn.Dropout(architecture.dropout)
        self.input_norm = build_norm_if(architecture.input_norm, architecture)
        self.encoder = build_encoder(architecture, self.grid)
        self.pool = build_pool(architecture)
        self.pool_norm = build_norm_if(architecture.norm_after_pool, architecture)
        self.head = self.build_head()

        self.axial = architecture.block == "axial"
        self.position = architecture.position
        self.position_in_every_layer = architecture.position_at != "input" and self.position != "relative-bias"
        initialise(self)

    def build_head(self) -> nn.Module:
        """Build the head for `num_classes`: a tanh-MLP, a linear layer, or DeiT's two linear layers."""
        architecture = self.architecture
        if architecture.pool == "distilled" and architecture.num_classes:
            return DistilledHead(architecture.width, architecture.num_classes)
        return build_head(architecture.representation_width, architecture.representation_size, architecture.num_classes)

    def tokens(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, N, D): the embedded patches x_p · E of equation 1, without positions."""
        self.check_images(images)
        self.measure_grid(images)  # raises if the size does not divide into patches
        features = images if self.backbone is None else self.backbone(images)
        tokens: Tensor = self.patch_norm(self.patch_embed(features))
        return tokens

    def encode(self, tokens: Tensor, grid: Grid | None = None, visible: Tensor | None = None) -> Tensor:
        """(B, N, D) embedded patches → (B, T, D) encoded tokens after the last norm, prefix first: equations 1 to 3.

        Args:
            tokens: from `tokens`, N = rows · columns.
            grid: rows and columns of patches; the model's own if None.
            visible: (B, V), the numbers of the patches that the encoder sees; all if None. The result then has only
                them after the prefix, in this order.
        """
        grid = grid or self.grid
        if tokens.ndim != 3 or tokens.shape[1] != grid[0] * grid[1] or tokens.shape[2] != self.width:
            raise InputError(
                f"a grid of {grid[0]}×{grid[1]} patches needs tokens of shape (batch, {grid[0] * grid[1]}, "
                f"{self.width}), not {tuple(tokens.shape)}: for images of another size give encode(tokens, grid=…)"
            )
        if self.position == "relative" and grid != self.grid:
            raise InputError(explain_relative_resize(self.grid, grid))
        if visible is not None and (why := self.explain_hidden_patches()) is not None:
            raise InputError(why)
        positions = [self._make_table(embedding, grid) for embedding in self.position_embedding]
        z = self._prepend_prefix(tokens)
        if positions:
            z = z + positions[0]
        if visible is not None:
            z = self._pick_visible(z, visible)
        z = self.input_norm(self.dropout(z))
        if self.position_in_every_layer and len(positions) == 1:
            positions = positions * len(self.encoder.blocks)
        if self.axial:
            z, positions = z.unflatten(1, grid), [table.unflatten(0, grid) for table in positions]
        positions = positions if self.position_in_every_layer else []
        encoded: Tensor = self.encoder(z, positions, self._find_places(grid, z))
        return encoded.flatten(1, 2) if self.axial else encoded

    def forward_features(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, T, D) encoded tokens, after the last norm."""
        return self.encode(self.tokens(images), self.measure_grid(images))

    def pool_features(self, features: Tensor) -> Tensor:
        """(B, T, D) → (B, D): the representation y of equation 4; (B, 2D) for the pools that join two."""
        y: Tensor = self.pool_norm(self.pool(features))
        return y

    def intermediate_layers(self, images: Tensor, layers: Sequence[int], norm: bool = False) -> list[Tensor]:
        """Return the output (B, T, D) of each of the encoder blocks `layers`.

        Args:
            images: (B, C, H, W).
            layers: indices of blocks, from 0; negative ones count from the end.
            norm: whether to apply the last norm to each output.
        """
        with record_blocks(self.encoder, layers) as outputs:
            self.forward_features(images)
        states = [z.flatten(1, 2) if self.axial else z for z in outputs]
        return [self.encoder.norm(z) for z in states] if norm else states

    def measure_grid(self, images: Tensor) -> Grid:
        """Return the rows and columns of patches of a batch of images, (B, C, H, W)."""
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
                if isinstance(module, InputPositions | RelativePositions | RelativeBias):
                    module.resize(grid)
        except InputError:
            self.architecture = old
            raise
        self.grid = grid
        self._prepare_at_own_size()
        return self

    def explain_hidden_patches(self) -> str | None:
        """Return why patches cannot be hidden from the encoder (`encode(…, visible=…)`); None if they can."""
        if self.axial:
            return "axial attention goes along rows and columns of patches, and none of them can be hidden"
        if self.rotary is not None or self.position_in_every_layer or self.position in ("relative", "relative-bias"):
            return "patches cannot be hidden from an encoder whose layers have positions of their own"
        return None

    def set_gradient_checkpointing(self, enabled: bool = True) -> None:
        """Set it for every encoder block, and for every residual unit of a hybrid."""
        self.encoder.gradient_checkpointing = enabled
        if self.backbone is not None:
            self.backbone.gradient_checkpointing = enabled

    def _prepend_prefix(self, tokens: Tensor) -> Tensor:
        """(B, N, D) → (B, T, D): [x_class; registers; patches]."""
        prefix = [
            token.expand(tokens.shape[0], -1, -1) for token in (self.class_token, self.registers) if token is not None
        ]
        return torch.cat([*prefix, tokens], dim=1) if prefix else tokens

    def _pick_visible(self, z: Tensor, visible: Tensor) -> Tensor:
        """(B, T, D) → (B, prefix + V, D): the prefix, and the visible patches (B, V)."""
        if visible.ndim != 2 or len(visible) != len(z):
            raise InputError(f"visible patches are given as (batch, count) = ({len(z)}, …), not {tuple(visible.shape)}")
        prefix, patches = z.tensor_split([self.prefix], dim=1)
        return torch.cat([prefix, patches.gather(1, visible[:, :, None].expand(-1, -1, self.width))], dim=1)

    def _make_table(self, positions: nn.Module, grid: Grid) -> Tensor:
        """Return the position embedding of every token, (T, D); it is zero for tokens without a position."""
        assert isinstance(positions, InputPositions)
        table: Tensor = positions(grid)
        with_row, missing = positions.prefix, self.prefix - positions.prefix
        if not missing:
            return table
        return torch.cat([table[:with_row], table.new_zeros(missing, self.width), table[with_row:]])

    def _find_places(self, grid: Grid, like: Tensor) -> list[Places]:
        """Return where the tokens are for the attention of each block; nothing if no attention needs to know.

        Args:
            grid: rows and columns of patches.
            like: the tokens, for their device and dtype.
        """
        if self.rotary is None and self.position != "relative-bias":
            return []
        rotations = [None] * self.architecture.depth if self.rotary is None else self.rotary(grid, like)
        bias = None if self.relative_bias is None else self.relative_bias(grid)
        return [Places(grid, rotation, bias) for rotation in rotations]
