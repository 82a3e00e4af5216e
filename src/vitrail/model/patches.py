"""From images to embedded patches: x_p · E of equation 1, or a convolutional stem instead.

Shapes: B images, C channels, H×W pixels, P patch side, N = (H/P)·(W/P) patches in row-major order, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from vitrail.model.architecture import ConvLayer, VitArchitecture

CONV_STEM_NORMS: dict[str, Callable[[int], nn.Module] | None] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(32, channels),
    "none": None,
}
CONV_STEM_ACTIVATIONS: dict[str, Callable[[], nn.Module] | None] = {"relu": nn.ReLU, "gelu": nn.GELU, "none": None}


class PatchEmbed(nn.Module):
    """The trainable linear map E of equation 1, from flattened patches to width D.

    The rows of E flatten a patch as (channel, row, column), so the weight is a view of the equivalent
    convolution's. It is a linear layer because the paper's is one, and because it runs faster than the convolution.
    """

    def __init__(self, in_channels: int, patch_size: int, width: int, bias: bool = True) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.patch_size = patch_size
        self.projection = nn.Linear(in_channels * patch_size**2, width, bias=bias)

    def split_patches(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, N, C·P·P): cut images into flattened patches, in row-major order."""
        side = self.patch_size
        images = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))  # B, C, rows, P, columns, P
        return images.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, N, D)."""
        tokens: Tensor = self.projection(self.split_patches(images))
        return tokens


class ConvStem(nn.Module):
    """Strided convolutions and a last 1×1 convolution, instead of the patch projection (arXiv 2106.14881).

    The layers are torchvision's, so that its weights can be loaded; the initial values are not (see `initialise`).
    """

    def __init__(self, in_channels: int, layers: Sequence[ConvLayer], width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for layer in layers:
            self.layers.append(build_conv_layer(in_channels, layer))
            in_channels = layer.channels
        self.projection = nn.Conv2d(in_channels, width, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, N, D)."""
        features: Tensor = self.projection(self.layers(images))
        return features.flatten(2).transpose(1, 2)


def build_conv_layer(in_channels: int, layer: ConvLayer) -> nn.Sequential:
    """Build one layer of the stem; the convolution has a bias only if no norm follows it."""
    norm, activation = CONV_STEM_NORMS[layer.norm], CONV_STEM_ACTIVATIONS[layer.activation]
    convolution = nn.Conv2d(
        in_channels,
        layer.channels,
        layer.kernel,
        stride=layer.stride,
        padding=(layer.kernel - 1) // 2,
        bias=norm is None,
    )
    parts: list[nn.Module] = [convolution]
    if norm is not None:
        parts.append(norm(layer.channels))
    if activation is not None:
        parts.append(activation())
    return nn.Sequential(*parts)


def build_patch_embed(a: VitArchitecture) -> PatchEmbed | ConvStem:
    """Build the module that turns images, or the feature map of a hybrid, into tokens."""
    if a.conv_stem is not None:
        return ConvStem(a.in_channels, a.conv_stem, a.width)
    return PatchEmbed(a.backbone.out_channels if a.backbone else a.in_channels, a.patch_size, a.width, a.patch_bias)
