"""What is exported: a model as one function of tensors, of normalised images or of the pixels of a decoded file.

Shapes: B images, C channels, height × width pixels, K classes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitrail import __version__
from vitrail.config import Preprocessing
from vitrail.data.transforms.preprocess import MAX_ASPECT_RATIO, halve_margin
from vitrail.errors import ConfigError, ExportError
from vitrail.exporting.runtimes import first_line, silence_exporters
from vitrail.inference.class_names import get_display_labels
from vitrail.model.base import ImageModel
from vitrail.model.bit import BitResNet
from vitrail.model.create import share_model
from vitrail.model.positions import compute_cubic_kernel
from vitrail.model.vit import VisionTransformer

EMBEDDING = "embedding"
"""The name of the output that holds the representation."""
MOST_WEIGHT = 2**15 - 0.5
"""The largest weight of a resize, in units of its last bit."""


class LogitsGraph(nn.Module):
    """Compute logits from normalised images; for a model without classes, its embedding."""

    def __init__(self, model: ImageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, height, width) float32 → (B, K)."""
        logits: Tensor = self.model(images)
        return logits


class LogitsAndEmbeddingGraph(nn.Module):
    """Compute logits and the embedding from normalised images, in one pass."""

    def __init__(self, model: ImageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, height, width) float32 → (B, K) and (B, D)."""
        features = self.model.forward_features(images)
        return self.model.forward_head(features), self.model.pool_features(features)


class PixelsGraph(nn.Module):
    """Compute probabilities from decoded images of any size; for a model without classes, its embedding.

    The resize is two matrix products whose weights are computed in the graph from the size of the input, so that one
    graph takes any size, on runtimes that have no antialiased resize of their own. The numbers are those of
    `vitrail.data.transforms.preprocess.resize_and_crop`, up to the rounding of a pixel.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: ImageModel) -> None:
        super().__init__()
        self.model = model
        self.preprocessing, self.task = model.preprocessing, model.task
        self.register_buffer("mean", torch.tensor(model.preprocessing.mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(model.preprocessing.std)[:, None, None], persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, height, width, C) uint8 → (B, K)."""
        images = resize_in_graph(pixels.permute(0, 3, 1, 2).float(), self.preprocessing)
        outputs: Tensor = self.model((images / 255 - self.mean) / self.std)
        return self.task.activate(outputs) if self.model.num_classes else outputs


@dataclass(frozen=True)
class ExportGraph:
    """What is exported, and the names of its input and output."""

    module: LogitsGraph | LogitsAndEmbeddingGraph | PixelsGraph
    input: str
    """`images`, or `pixels` if preprocessing is inside the graph."""
    output: str
    """`logits`, `probabilities`, `embedding`, or `values` of another task than labels."""
    example: Tensor
    """An input to trace with. Its batch size is 2, because torch treats 1 as a constant."""
    dynamic: dict[int, Any]
    """The dimensions of the input that may change."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of all outputs: after the first one, the embedding if the file needs it to tell unknown images."""
        return (self.output, EMBEDDING) if isinstance(self.module, LogitsAndEmbeddingGraph) else (self.output,)

    @property
    def any_size(self) -> bool:
        """Whether normalised images may have any size, so that positions are interpolated."""
        return self.input == "images" and len(self.dynamic) > 1

    @property
    def gives_values(self) -> bool:
        """Whether the outputs are the values of the task, and not logits or an embedding."""
        return self.output in ("probabilities", "values")

    @property
    def model(self) -> ImageModel:
        """The model that the graph computes."""
        return self.module.model


def build_graph(
    model: ImageModel,
    with_preprocessing: bool = False,
    dynamic_size: bool = False,
    image_size: int | tuple[int, int] | None = None,
    gives_embedding: bool = False,
) -> ExportGraph:
    """Return the graph of a copy of a model. The batch size may always change.

    Args:
        model: it is not changed.
        with_preprocessing: take the pixels of decoded images, of any size.
        dynamic_size: take normalised images of any size that the model can take; positions are interpolated.
        image_size: resize the copy.
        gives_embedding: give the embedding too, where the model needs it to tell unknown images.
    """
    if with_preprocessing and dynamic_size:
        raise ConfigError(
            "preprocessing inside (--with-preprocessing) takes images of any size already and brings them to the "
            "model's own: leave dynamic_size (--dynamic-size) out"
        )
    model = copy_in_float32(model)
    if image_size is not None:
        model.resize(image_size)
    batch, size = Dim("batch", min=1), model.preprocessing.image_size
    if with_preprocessing:
        example = torch.zeros(2, size[0] + 3, size[1] + 5, model.in_channels, dtype=torch.uint8)
        dynamic = {0: batch, 1: Dim("height", min=1), 2: Dim("width", min=1)}
        values = "probabilities" if model.stored_task is None else "values"
        output = values if model.num_classes else "embedding"
        return ExportGraph(PixelsGraph(model).eval(), "pixels", output, example, dynamic)
    if dynamic_size:
        size, changing = _choose_tracing_size(model)
        dynamic = {0: batch, **changing}
    else:
        dynamic = {0: batch}
    output, example = "logits" if model.num_classes else EMBEDDING, torch.zeros(2, model.in_channels, *size)
    is_wanted = gives_embedding and bool(model.num_classes) and _compares_embeddings(model)
    module = LogitsAndEmbeddingGraph(model) if is_wanted else LogitsGraph(model)
    return ExportGraph(module.eval(), "images", output, example, dynamic)


def _compares_embeddings(model: ImageModel) -> bool:
    """Return whether unknown images are told by their embedding."""
    unknown = None if model.reliability is None else model.reliability.unknown
    return unknown is not None and unknown.needs_embeddings


def copy_in_float32(model: ImageModel) -> ImageModel:
    """Return a copy in float32 on the CPU, in evaluation mode. It shares the weights that are in float32 there."""
    return share_model(model).to(device="cpu", dtype=torch.float32).eval()


def collect_metadata(model: ImageModel) -> dict[str, str]:
    """Return what travels with an export: architecture, preprocessing, and labels and licence if they are known."""
    facts = {
        "vitrail": __version__,
        "architecture": model.architecture.model_dump_json(exclude_defaults=True),
        "preprocessing": model.preprocessing.model_dump_json(),
    }
    if model.labels is not None:
        facts["labels"] = json.dumps(get_display_labels(model), ensure_ascii=False)
        if get_display_labels(model) != tuple(model.labels):
            facts["classes"] = json.dumps(model.labels, ensure_ascii=False)
    if model.stored_task is not None:
        facts["task"] = json.dumps(model.stored_task.model_dump(mode="json"), ensure_ascii=False)
    if model.reliability is not None:
        facts["reliability"] = model.reliability.model_dump_json()
    if model.origin is not None and model.origin.licence is not None:
        facts["licence"] = model.origin.licence
    return facts


def trace_graph(graph: ExportGraph) -> ExportedProgram:
    """Return the graph as torch.export captures it, or raise an ExportError."""
    try:
        with silence_exporters():
            return torch.export.export(graph.module, (graph.example,), dynamic_shapes=(graph.dynamic,))
    except Exception as error:  # whatever a network does that cannot be traced
        raise ExportError(f"torch.export cannot trace this model: {first_line(error)}") from error


def _choose_tracing_size(model: ImageModel) -> tuple[tuple[int, int], dict[int, Any]]:
    """Return a size to trace with that is not the model's own, and the allowed range of sizes."""
    if isinstance(model, BitResNet):
        least, (height, width) = model.stride + 1, model.image_size  # one pixel at the end would be a constant
        return (height + 1, width + 2), {2: Dim("height", min=least), 3: Dim("width", min=least)}
    if not isinstance(model, VisionTransformer):
        raise ConfigError(
            "a network of timm's is exported at one size: leave dynamic_size (--dynamic-size) out, or give a size"
        )
    if model.position == "relative":
        raise ConfigError(
            "relative position embeddings are made for one grid of patches and cannot be interpolated: leave "
            "dynamic_size (--dynamic-size) out"
        )
    (rows, columns), stride = model.grid, model.stride
    sizes = {2: stride * Dim("rows", min=2), 3: stride * Dim("columns", min=2)}  # torch takes one for a constant
    return ((rows + 1) * stride, (columns + 2) * stride), sizes


def resize_in_graph(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Resize and crop (B, C, height, width) whole numbers from 0 to 255 to the size that the model sees.

    Columns first, and whole pixels after each product, as torch does with bytes.
    """
    # Sizes are tensors: numbers of the graph, not of the example that it is traced with.
    height, width = (torch.full((), side, dtype=torch.int64, device=pixels.device) for side in pixels.shape[2:])
    seen_height, seen_width = height, width
    target_height, target_width = (torch.full_like(height, side) for side in preprocessing.resized)
    if preprocessing.resize == "cover":
        seen_height, seen_width = height.minimum(MAX_ASPECT_RATIO * width), width.minimum(MAX_ASPECT_RATIO * height)
        target_height, target_width = _covering_size(seen_height, seen_width, *preprocessing.resized)
    rows, columns = preprocessing.image_size
    across = _resize_weights(pixels[0, 0, 0], seen_width, target_width, columns, preprocessing)
    down = _resize_weights(pixels[0, 0, :, 0], seen_height, target_height, rows, preprocessing)
    return _round_half_up(down @ _round_half_up(pixels @ across.T))


def _covering_size(height: Tensor, width: Tensor, least_height: int, least_width: int) -> tuple[Tensor, Tensor]:
    """Return the smallest whole size with the same aspect ratio that covers the least height and width."""
    tall = (least_width * height // width).clamp(min=least_height)
    wide = (least_height * width // height).clamp(min=least_width)
    by_height = least_height * width >= least_width * height
    return torch.where(by_height, least_height, tall), torch.where(by_height, wide, least_width)


def _resize_weights(line: Tensor, seen: Tensor, target: Tensor, kept: int, preprocessing: Preprocessing) -> Tensor:
    """Return (kept, points): the weights that make the `kept` middle points of `target` from the `seen` middle points.

    Antialiased: shrinking widens the kernel.
    """
    points = torch.ones_like(line).cumsum(0) - 0.5 - (line.shape[0] - seen) // 2
    scale = seen.float() / target.float()
    middle = torch.arange(kept, device=line.device) + halve_margin(target - kept, preprocessing)
    places = torch.cat([middle, torch.zeros_like(target)[None], target[None] - 1])
    centres = (places + 0.5) * scale
    x = (points - centres[:, None]).abs() / scale.clamp(min=1.0)
    weights = compute_cubic_kernel(x) if preprocessing.interpolation == "bicubic" else (1 - x).clamp(min=0.0)
    weights = torch.where((points > 0) & (points < seen), weights, 0.0)
    weights = weights / weights.sum(dim=1, keepdim=True)
    # In 16 bits, as torch holds them for bytes: what lies half-way between two pixels then mostly goes the same way.
    # The largest says how fine, and lies at one of the ends as a rule: so they are there, and left out now.
    step = torch.exp2((MOST_WEIGHT / weights.amax(dim=(0, 1))).log2().floor())
    return (weights[:kept] * step).round() / step


def _round_half_up(pixels: Tensor) -> Tensor:
    """Round half a pixel up, as torch's integer arithmetic does; `round` would go to the even neighbour."""
    return (pixels + 0.5).floor().clamp(0.0, 255.0)
