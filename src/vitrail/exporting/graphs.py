"""What is exported: a model as one function of tensors, from normalised images or from the pixels of a decoded file.

Shapes: B images, C channels, height × width pixels, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitrail.config import Preprocessing
from vitrail.data.transforms.preprocess import MAX_ASPECT_RATIO
from vitrail.errors import ConfigError, ExportError
from vitrail.exporting.runtimes import first_line, quiet
from vitrail.model.base import ImageModel
from vitrail.model.bit import BitResNet
from vitrail.model.positions import compute_cubic_kernel
from vitrail.model.vit import VisionTransformer

MOST_WEIGHT = 2**15 - 0.5
"""Of a resize, in units of its last bit."""


class Logits(nn.Module):
    """Normalised images → logits; a model without classes gives its embedding."""

    def __init__(self, model: ImageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, height, width) float32 → (B, K)."""
        logits: Tensor = self.model(images)
        return logits


class FromPixels(nn.Module):
    """Images as they were decoded, of any size → probabilities; a model without classes gives its embedding.

    The resize is two matrix products whose weights are computed in the graph from the size of the input, so that one
    graph takes any size, on runtimes that have no antialiased resize of their own. The numbers are those of
    `vitrail.data.transforms.preprocess.resize_and_crop`, up to the rounding of a pixel.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: ImageModel) -> None:
        super().__init__()
        self.model = model
        self.preprocessing = model.preprocessing
        self.register_buffer("mean", torch.tensor(model.preprocessing.mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(model.preprocessing.std)[:, None, None], persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, height, width, C) uint8 → (B, K)."""
        images = fitted_in_graph(pixels.permute(0, 3, 1, 2).float(), self.preprocessing)
        outputs: Tensor = self.model((images / 255 - self.mean) / self.std)
        return outputs.softmax(dim=-1) if self.model.num_classes else outputs


@dataclass(frozen=True)
class Graph:
    """What is exported, and under which names."""

    module: Logits | FromPixels
    input: str
    """images, or pixels where preprocessing is inside."""
    output: str
    """logits, probabilities or embedding."""
    example: Tensor
    """An input to trace with; its batch is of two, for torch takes one for a constant."""
    dynamic: dict[int, Any]
    """Dimensions of the input that may change."""

    @property
    def any_size(self) -> bool:
        """Whether positions must fit images of any size."""
        return self.input == "images" and len(self.dynamic) > 1

    @property
    def model(self) -> ImageModel:
        """What it computes."""
        return self.module.model


def graph_of(model: ImageModel, with_preprocessing: bool = False, dynamic_size: bool = False) -> Graph:
    """The graph of a model, in float32 on the CPU, where the model is moved. The batch may always change.

    Args:
        with_preprocessing: take the pixels of decoded images, of any size.
        dynamic_size: take normalised images of any size that the model can take; positions are interpolated.
    """
    if with_preprocessing and dynamic_size:
        raise ConfigError(
            "--with-preprocessing takes images of any size already and brings them to the model's own: leave "
            "--dynamic-size out"
        )
    model = model.float().cpu().eval()
    batch, size = Dim("batch", min=1), model.preprocessing.image_size
    if with_preprocessing:
        example = torch.zeros(2, size[0] + 3, size[1] + 5, model.in_channels, dtype=torch.uint8)
        dynamic = {0: batch, 1: Dim("height", min=1), 2: Dim("width", min=1)}
        output = "probabilities" if model.num_classes else "embedding"
        return Graph(FromPixels(model).eval(), "pixels", output, example, dynamic)
    if dynamic_size:
        size, changing = _another_size(model)
        dynamic = {0: batch, **changing}
    else:
        dynamic = {0: batch}
    output = "logits" if model.num_classes else "embedding"
    return Graph(Logits(model).eval(), "images", output, torch.zeros(2, model.in_channels, *size), dynamic)


def traced(graph: Graph) -> ExportedProgram:
    """The graph as torch.export captures it."""
    try:
        with quiet():
            return torch.export.export(graph.module, (graph.example,), dynamic_shapes=(graph.dynamic,))
    except Exception as error:  # whatever a network does that cannot be traced
        raise ExportError(f"torch.export cannot trace this model: {first_line(error)}") from error


def _another_size(model: ImageModel) -> tuple[tuple[int, int], dict[int, Any]]:
    """A size that is not the model's own, to trace with, and which sizes there may be."""
    if isinstance(model, BitResNet):
        least, (height, width) = model.stride + 1, model.image_size  # one pixel at the end would be a constant
        return (height + 1, width + 2), {2: Dim("height", min=least), 3: Dim("width", min=least)}
    if not isinstance(model, VisionTransformer):
        raise ConfigError("a network of timm's is exported at one size: leave --dynamic-size out, or give --size")
    if model.position == "relative":
        raise ConfigError(
            "relative position embeddings are made for one grid of patches and cannot be interpolated: leave "
            "--dynamic-size out"
        )
    (rows, columns), stride = model.grid, model.stride
    sizes = {2: stride * Dim("rows", min=2), 3: stride * Dim("columns", min=2)}  # torch takes one for a constant
    return ((rows + 1) * stride, (columns + 2) * stride), sizes


def fitted_in_graph(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """(B, C, height, width) of whole numbers from 0 to 255 → resized and cropped to the size that the model sees.

    Columns first, and whole pixels after each product, as torch does with bytes.
    """
    # Sizes are tensors: numbers of the graph, not of the example that it is traced with.
    height, width = (torch.full((), side, dtype=torch.int64, device=pixels.device) for side in pixels.shape[2:])
    seen_height, seen_width = height, width
    target_height, target_width = (torch.full_like(height, side) for side in preprocessing.resized)
    if preprocessing.resize == "cover":
        seen_height, seen_width = height.minimum(MAX_ASPECT_RATIO * width), width.minimum(MAX_ASPECT_RATIO * height)
        target_height, target_width = _covering(seen_height, seen_width, *preprocessing.resized)
    kind, (rows, columns) = preprocessing.interpolation, preprocessing.image_size
    across = _weights(pixels[0, 0, 0], seen_width, target_width, columns, kind)
    down = _weights(pixels[0, 0, :, 0], seen_height, target_height, rows, kind)
    return _whole(down @ _whole(pixels @ across.T))


def _covering(height: Tensor, width: Tensor, least_height: int, least_width: int) -> tuple[Tensor, Tensor]:
    """The smallest size of the same shape that covers another, as whole numbers."""
    tall = (least_width * height // width).clamp(min=least_height)
    wide = (least_height * width // height).clamp(min=least_width)
    by_height = least_height * width >= least_width * height
    return torch.where(by_height, least_height, tall), torch.where(by_height, wide, least_width)


def _weights(line: Tensor, seen: Tensor, target: Tensor, kept: int, kind: str) -> Tensor:
    """(kept, points): how the `kept` middle points of `target` are made of the `seen` middle ones of a line.

    Antialiased: shrinking widens the kernel.
    """
    points = torch.ones_like(line).cumsum(0) - 0.5 - (line.shape[0] - seen) // 2
    scale = seen.float() / target.float()
    middle = torch.arange(kept, device=line.device) + (target - kept) // 2
    places = torch.cat([middle, torch.zeros_like(target)[None], target[None] - 1])
    centres = (places + 0.5) * scale
    x = (points - centres[:, None]).abs() / scale.clamp(min=1.0)
    weights = compute_cubic_kernel(x) if kind == "bicubic" else (1 - x).clamp(min=0.0)
    weights = torch.where((points > 0) & (points < seen), weights, 0.0)
    weights = weights / weights.sum(dim=1, keepdim=True)
    # In 16 bits, as torch holds them for bytes: what lies half-way between two pixels then mostly goes the same way.
    # The largest says how fine, and lies at one of the ends as a rule: so they are there, and left out now.
    step = torch.exp2((MOST_WEIGHT / weights.amax(dim=(0, 1))).log2().floor())
    return (weights[:kept] * step).round() / step


def _whole(pixels: Tensor) -> Tensor:
    """Half a pixel goes up, as in torch's whole-number arithmetic; `round` would take it to the even neighbour."""
    return (pixels + 0.5).floor().clamp(0.0, 255.0)
