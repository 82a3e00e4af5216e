"""The BiT ResNets (arXiv 1912.11370) that the paper compares with."""

from __future__ import annotations

from typing import Self

from torch import Tensor, nn

from vitrail.errors import InputError
from vitrail.model.architecture import NORM_GROUPS, ResNetArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.heads import build_head
from vitrail.model.initialise import initialise
from vitrail.model.resnet import ResNetBackbone


class BitResNet(ImageModel):
    """Backbone → norm → ReLU → mean over the image → linear head. Takes images of any size from its stride on: 32
    pixels, with a small root 8."""

    architecture: ResNetArchitecture

    def __init__(self, architecture: ResNetArchitecture) -> None:
        super().__init__(architecture)
        backbone = architecture.backbone
        self.stride = backbone.stride
        self.backbone = ResNetBackbone(architecture.in_channels, backbone)
        self.norm = nn.GroupNorm(NORM_GROUPS, backbone.out_channels, eps=backbone.norm_eps)
        self.head = self.build_head()
        initialise(self)

    def build_head(self) -> nn.Module:
        """Build one linear layer, or nothing for 0 classes."""
        return build_head(self.architecture.representation_width, None, self.num_classes)

    def forward_features(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, D, H / stride, W / stride): the last feature map, after norm and ReLU."""
        self.check_images(images)
        if min(images.shape[2:]) < self.stride:
            raise InputError(
                f"images of {images.shape[2]}×{images.shape[3]} pixels leave nothing after a reduction by "
                f"{self.stride}: give at least {self.stride}×{self.stride}"
            )
        features: Tensor = self.norm(self.backbone(images)).relu()
        return features

    def pool_features(self, features: Tensor) -> Tensor:
        """(B, D, height, width) → (B, D)."""
        return features.mean(dim=(2, 3))

    def resize(self, image_size: int | tuple[int, int]) -> Self:
        """Change the image size of the preprocessing; the network itself runs at any size."""
        self._rebuild_architecture(image_size=image_size)
        self._prepare_at_own_size()
        return self

    def set_gradient_checkpointing(self, enabled: bool = True) -> None:
        """Set it for every residual unit."""
        self.backbone.gradient_checkpointing = enabled
