"""Images to embedded patches: x_p · E of equation 1, or a convolutional stem in its place.

Shapes: B images, C channels, H×W pixels, P patch side, N = (H/P)·(W/P) patches in row-major order, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from vitrail.model.architecture import ConvLayer

CONV_STEM_NORMS: dict[str, Callable[[int], nn.Module] | None] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(32, channels),
    "none": None,
}
CONV_STEM_ACTIVATIONS: dict[str, Callable[[], nn.Module] | None] = {"relu": nn.ReLU, "gelu": nn.GELU, "none": None}


class PatchEmbed(nn.Module):
    """One trainable linear map E from flattened patches to width D.

    The rows of E flatten a patch as (channel, row, column), so the weight is a view of the equivalent
    convolution's. A linear layer, because it is the paper's map and runs faster than that convolution.
    """

    def __init__(self, in_channels: int, patch_size: int, width: int, bias: bool = True) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.patch_size = patch_size
        self.projection = nn.Linear(in_channels * patch_size**2, width, bias=bias)

    def patches(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, N, C·P·P): the image cut into a row-major sequence of flattened patches."""
        side = self.patch_size
        images = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))  # B, C, rows, P, columns, P
        return images.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, N, D)."""
        tokens: Tensor = self.projection(self.patches(images))
        return tokens


class ConvStem(nn.Module):
    """Strided convolutions and a last 1×1 one in place of the patch projection (arXiv 2106.14881)."""

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
    """One layer of the stem; the convolution has a bias only where no norm follows."""
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
