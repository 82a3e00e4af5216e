"""ResNets with GroupNorm and weight-standardised convolutions: the hybrids' backbone and BiT's.

The two differ as the authors' two releases do: hybrids are post-activation with TensorFlow's SAME padding, BiT
is pre-activation with symmetric padding.

Shapes: B images, C channels, height and width of the feature map.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vitrail.model.architecture import NORM_GROUPS, Backbone


class StdConv(nn.Conv2d):
    """A convolution without bias whose filters have zero mean and unit variance when applied."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int, backbone: Backbone) -> None:
        super().__init__(in_channels, out_channels, kernel, stride=stride, bias=False)
        self.by_std = backbone.standardise_by == "std"
        self.eps = backbone.standardise_eps
        self.pad = compute_padding(kernel, stride, backbone)

    def standardise_weight(self) -> Tensor:
        """Return the standardised weight, which `forward` applies."""
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, correction=0)
        scale = variance.sqrt() + self.eps if self.by_std else (variance + self.eps).sqrt()
        return (self.weight - mean) / scale

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, height, width) → (B, C', height / stride, width / stride)."""
        return F.conv2d(F.pad(x, self.pad), self.standardise_weight(), stride=self.stride)


def compute_padding(kernel: int, stride: int, backbone: Backbone) -> tuple[int, int, int, int]:
    """Return the padding (left, right, top, bottom). TensorFlow's SAME puts the odd pixel right and below."""
    if backbone.form == "bit":
        return (kernel // 2,) * 4
    total = max(kernel - stride, 0)
    return (total // 2, total - total // 2) * 2


class HybridUnit(nn.Module):
    """A post-activation bottleneck: 1×1 → 3×3 → 1×1 beside a shortcut, the last ReLU after their sum."""

    def __init__(self, in_channels: int, channels: int, stride: int, backbone: Backbone) -> None:
        super().__init__()
        out_channels = 4 * channels
        self.conv1 = StdConv(in_channels, channels, 1, 1, backbone)
        self.norm1 = nn.GroupNorm(NORM_GROUPS, channels, eps=backbone.norm_eps)
        self.conv2 = StdConv(channels, channels, 3, stride, backbone)
        self.norm2 = nn.GroupNorm(NORM_GROUPS, channels, eps=backbone.norm_eps)
        self.conv3 = StdConv(channels, out_channels, 1, 1, backbone)
        self.norm3 = nn.GroupNorm(NORM_GROUPS, out_channels, eps=backbone.norm_eps)
        self.shortcut = nn.Sequential()
        if in_channels != out_channels or stride != 1:
            self.shortcut.append(StdConv(in_channels, out_channels, 1, stride, backbone))
            self.shortcut.append(nn.GroupNorm(NORM_GROUPS, out_channels, eps=backbone.norm_eps))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, height, width) → (B, 4·channels, height / stride, width / stride)."""
        y = self.norm1(self.conv1(x)).relu()
        y = self.norm2(self.conv2(y)).relu()
        y = self.norm3(self.conv3(y))
        out: Tensor = (y + self.shortcut(x)).relu()
        return out


class BitUnit(nn.Module):
    """A pre-activation bottleneck: norm and ReLU before each convolution, the first also before a projection."""

    def __init__(self, in_channels: int, channels: int, stride: int, backbone: Backbone) -> None:
        super().__init__()
        out_channels = 4 * channels
        self.norm1 = nn.GroupNorm(NORM_GROUPS, in_channels, eps=backbone.norm_eps)
        self.conv1 = StdConv(in_channels, channels, 1, 1, backbone)
        self.norm2 = nn.GroupNorm(NORM_GROUPS, channels, eps=backbone.norm_eps)
        self.conv2 = StdConv(channels, channels, 3, stride, backbone)
        self.norm3 = nn.GroupNorm(NORM_GROUPS, channels, eps=backbone.norm_eps)
        self.conv3 = StdConv(channels, out_channels, 1, 1, backbone)
        projects = in_channels != out_channels or stride != 1
        self.shortcut = StdConv(in_channels, out_channels, 1, stride, backbone) if projects else None

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, height, width) → (B, 4·channels, height / stride, width / stride)."""
        y = self.norm1(x).relu()
        shortcut = x if self.shortcut is None else self.shortcut(y)
        y = self.conv1(y)
        y = self.conv2(self.norm2(y).relu())
        y = self.conv3(self.norm3(y).relu())
        out: Tensor = y + shortcut
        return out


class ResNetBackbone(nn.Module):
    """Image → feature map: a root, which divides the resolution by 4 unless it is small, then the stages."""

    def __init__(self, in_channels: int, backbone: Backbone) -> None:
        super().__init__()
        unit = HybridUnit if backbone.form == "hybrid" else BitUnit
        channels, self.pools = backbone.root_channels, backbone.root == "large"
        self.root = StdConv(in_channels, channels, backbone.root_kernel, 2 if self.pools else 1, backbone)
        # BiT's first norm belongs to its first unit.
        self.root_norm = (
            nn.GroupNorm(NORM_GROUPS, channels, eps=backbone.norm_eps) if backbone.form == "hybrid" else None
        )
        self.pool_pad = compute_padding(3, 2, backbone)
        self.units = nn.ModuleList()
        in_channels = channels
        for stage, blocks in enumerate(backbone.blocks):
            for index in range(blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                self.units.append(unit(in_channels, channels, stride, backbone))
                in_channels = 4 * channels
            channels *= 2
        self.gradient_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, out channels, H / stride, W / stride)."""
        x = self.root(x)
        if self.root_norm is not None:
            x = self.root_norm(x).relu()
        # Padded with zeros: the least value after a hybrid's ReLU, and what BiT, without one here, was trained with.
        if self.pools:
            x = F.max_pool2d(F.pad(x, self.pool_pad), kernel_size=3, stride=2)
        for unit in self.units:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(unit, x, use_reentrant=False)
            else:
                x = unit(x)
        return x
