"""`optimize`: make from a model a `FastModel`, which computes the same function faster and says how closely.

A `FastModel` has two parts: a fast embedder (images → y) and the model's plain head (y → logits). On an NVIDIA GPU the
embedder consists of fused kernels, on a CPU of packed layers or int8 products. A model that neither fits is run as it
is, in the requested precision.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal, Self

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError, NotApplicableError, WeightsError, did_you_mean
from vitrail.fast.cpu.embedders import create_cpu_embedder
from vitrail.fast.cpu.precision_search import find_fastest_precision
from vitrail.fast.gpu.cuda_graph import CudaGraph
from vitrail.fast.timing import relative_distance
from vitrail.model.base import ImageModel
from vitrail.model.create import share_model
from vitrail.model.timm_model import TimmModel
from vitrail.system.precision import choose_precision

EmbeddingAndLogits = tuple[Tensor, Tensor]
"""Representations y (B, D) and logits (B, K)."""
Target = Literal["throughput", "latency"]
PRECISIONS = ("auto", "fp32", "bf16", "fp8", "int8")
PROBE_IMAGES = 4
"""Number of random images for measuring the distance, when the caller gives no images."""
BATCH_STEP, MOST_GRAPHS = 32, 12
"""Batches of more than 32 images are padded to a multiple of 32. So many CUDA graphs are kept, each with its memory;
the least recently used one makes room for a new one."""
HOPPER = (9, 0)
"""Compute capability that the kernels need: they use the copy engine of this GPU generation."""


class FastModel(nn.Module):
    """A model for inference: `fast(images)` returns logits and `fast.embed(images)` representations, in float32.

    It takes normalised images of the model's own size. It cannot be trained, saved, moved, copied or resized. Do that
    to the model it was made from; the two share no memory.
    """

    def __init__(self, model: ImageModel, embedder: nn.Module, precision: str, method: str, uses_graphs: bool) -> None:
        super().__init__()
        self.embedder = embedder
        self.head = copy.deepcopy(model.head).float().eval().requires_grad_(False)
        self.precision, self.method = precision, method
        self.distance = float("nan")
        """‖Δy‖/‖y‖ from the plain model in float32, measured on some images."""
        self.measured_on = "random images"
        self.logits: Callable[[Tensor], Tensor] = lambda y: self.head(y)
        """Computes logits (B, K) from representations (B, D)."""
        self._function: Callable[[Tensor], EmbeddingAndLogits] = (
            CudaGraphCache(self._compute) if uses_graphs else self._compute
        )
        self.eval()

    def embed(self, images: Tensor) -> Tensor:
        """(B, C, H, W), normalised → (B, D)."""
        return self.embed_and_classify(images)[0]

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W), normalised → (B, K)."""
        return self.embed_and_classify(images)[1]

    def embed_and_classify(self, images: Tensor) -> EmbeddingAndLogits:
        """Return representations (B, D) and logits (B, K) of normalised images (B, C, H, W), from one forward pass."""
        is_on_current_device = not images.is_cuda or images.get_device() == torch.cuda.current_device()
        if is_on_current_device and torch.is_inference_mode_enabled():  # the short way: for one image it matters
            return self._function(images)
        # Kernels are started, and graphs recorded, on the current GPU.
        with torch.inference_mode(), nullcontext() if is_on_current_device else torch.cuda.device(images.device):
            return self._function(images)

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode, whatever `mode` says: a fast model cannot be trained."""
        return super().train(False)

    def _compute(self, images: Tensor) -> EmbeddingAndLogits:
        if not len(images):  # compute one image for the shapes, and return none
            y, logits = self._compute(images.new_zeros(1, *images.shape[1:]))
            return y[:0], logits[:0]
        y = self.embedder(images).float()
        return y, self.logits(y)

    def describe(self) -> str:
        """Return a line with the precision, the method and the distance from the plain model."""
        return (
            f"{self.precision} by {self.method}, ‖Δ‖/‖y‖ = {self.distance:.1e} from the plain model on "
            f"{self.measured_on}"
        )

    def __repr__(self) -> str:
        return f"FastModel({self.describe()})"


class CudaGraphCache:
    """Runs a function of images as CUDA graphs, one for each batch size: 1, 2, 4, 8, 16, 32, then multiples of 32.

    Other batches are padded with zero images up to the next size.
    """

    def __init__(self, function: Callable[[Tensor], EmbeddingAndLogits]) -> None:
        self._function = function
        self._graphs: OrderedDict[tuple[torch.Size, torch.dtype], CudaGraph[EmbeddingAndLogits]] = OrderedDict()

    def __call__(self, images: Tensor) -> EmbeddingAndLogits:
        """Return the function of the images, in memory that later calls do not overwrite."""
        key = images.shape, images.dtype
        if (graph := self._graphs.get(key)) is None:
            padded, count = _pad_batch(images), len(images)
            if len(padded) > count:
                y, logits = self(padded)
                return y[:count], logits[:count]
            while len(self._graphs) >= MOST_GRAPHS:
                self._graphs.popitem(last=False)
            graph = self._graphs[key] = CudaGraph(self._function)
        self._graphs.move_to_end(key)
        y, logits = torch._foreach_mul(graph(images), 1.0)  # copies both by one kernel
        return y, logits


def _pad_batch(images: Tensor) -> Tensor:
    count = len(images)
    size = 1 << (count - 1).bit_length() if count <= BATCH_STEP else -(-count // BATCH_STEP) * BATCH_STEP
    return images if count == size else torch.cat([images, images.new_zeros(size - count, *images.shape[1:])])


def optimize(
    model: ImageModel,
    target: Target = "throughput",
    precision: str = "auto",
    *,
    batch: int = 1,
    images: Tensor | None = None,
    on_message: Callable[[str], None] = lambda line: None,
) -> FastModel:
    """Make a fast copy of a model, for inference on the device that holds its weights: a GPU or the CPU.

    Example:
        fast = optimize(vitrail.load("pane"))
        logits = fast(images)          # (B, C, H, W), normalised → (B, K)
        print(fast.describe())         # precision, method, distance from the plain model

    Args:
        model: The model, with float32 weights. It is not changed.
        target: "latency" records a CUDA graph for each batch size when that size first comes: one pause, and the least
            time for every call after it. "throughput" starts the kernels one by one. On a CPU both are the same.
        precision: "fp32"; "bf16"; "fp8" on a GPU; "int8" on a CPU; or "auto". "auto" means bf16 on a GPU. On a CPU it
            means the fastest precision whose representations are close enough (`MOST_DISTANCE` in
            fast/cpu/precision_search.py); a short search finds it, and its result is cached.
        batch: Usual number of images per call; the search on a CPU measures with so many.
        images: Some normalised images (B, C, H, W) of the kind that will come. FP8 is calibrated on them, which makes
            it faster, and the distance is measured on them. Without them, the distance is measured on random images.
        on_message: Gets a line of text about every precision that is tried, and about the result.

    Returns:
        The fast model. Its `distance` says how far its representations are from the plain model's.

    Raises:
        ConfigError: `precision` or `target` is unknown, or the weights are not float32.
        NotApplicableError: This model or this device cannot compute in the requested precision.
        WeightsError: The model returns NaN or infinity.
    """
    if precision not in PRECISIONS:
        hint = did_you_mean(precision, PRECISIONS) or ":"
        raise ConfigError(f"precision {precision!r}{hint} give one of {', '.join(PRECISIONS)}")
    if target not in ("throughput", "latency"):
        raise ConfigError(f"target = {target!r}: give throughput or latency")
    if isinstance(model, TimmModel):
        raise NotApplicableError("timm's networks have no fast version: leave the precision at fp32")
    weight = next(model.parameters())
    if weight.dtype != torch.float32:
        raise ConfigError(f"optimize needs float32 weights, not {weight.dtype}: give model.float()")
    if weight.device.type == "cuda":
        fast = _optimize_on_gpu(model, target, precision, images)
    elif weight.device.type == "mps":
        fast = _optimize_on_apple_gpu(model, precision)
    else:
        fast = _optimize_on_cpu(model, precision, batch, on_message)
    fast.distance = measure_distance(fast, model, images)
    if not math.isfinite(fast.distance):
        raise WeightsError("the model returns NaN or infinity: its weights are damaged")
    fast.measured_on = "random images" if images is None else "the images given"
    on_message(fast.describe())
    return fast


@torch.no_grad()
def measure_distance(fast: FastModel, model: ImageModel, images: Tensor | None = None) -> float:
    """Return ‖Δy‖/‖y‖ between a fast model and the plain one in float32, on `images` or on random ones."""
    weight = next(model.parameters())
    if images is None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(PROBE_IMAGES, model.in_channels, *model.image_size, generator=generator)
    images = images.to(weight.device, torch.float32)
    return relative_distance(fast.embed(images), share_model(model).eval().embed(images))


def explain_missing_kernels(device: torch.device) -> str | None:
    """Return why the fused kernels cannot run on a device; None if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "they are for NVIDIA GPUs"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if torch.cuda.get_device_capability(device) < HOPPER:
        return "they are for GPUs of the Hopper kind (H100, H200) and newer"
    return None


def _optimize_on_gpu(model: ImageModel, target: Target, precision: str, images: Tensor | None) -> FastModel:
    device, uses_graphs = next(model.parameters()).device, target == "latency"
    if precision == "int8":
        raise NotApplicableError("int8 is for CPUs: on a GPU give bf16 or fp8")
    if precision == "fp32":
        return FastModel(model, PlainEmbedder(model, torch.float32), precision, "the plain model", uses_graphs)
    precision = "bf16" if precision == "auto" else precision
    obstacle = explain_missing_kernels(device)
    if obstacle is None:
        try:
            return _fuse(model, precision, uses_graphs, images)
        except NotApplicableError as error:
            obstacle = str(error)
    if precision == "fp8":
        raise NotApplicableError(f"only the fused kernels compute in fp8, and {obstacle}: give bf16")
    method = f"the plain model (no fused kernels: {obstacle})"
    return FastModel(model, PlainEmbedder(model, torch.bfloat16), precision, method, uses_graphs)


def _fuse(model: ImageModel, precision: str, uses_graphs: bool, images: Tensor | None) -> FastModel:
    from vitrail.fast.gpu.fused_embedder import FusedEmbedder
    from vitrail.fast.gpu.fused_layers import FusedHead

    device = next(model.parameters()).device
    embedder = FusedEmbedder(model, fp8=precision == "fp8", tries_merging=uses_graphs)
    if images is not None:
        with torch.cuda.device(device):
            embedder.calibrate(images.to(device))
    fast = FastModel(model, embedder, precision, "fused kernels", uses_graphs)
    if type(fast.head) is nn.Linear:
        fast.logits = FusedHead(fast.head)
    return fast


def _optimize_on_apple_gpu(model: ImageModel, precision: str) -> FastModel:
    if precision in ("fp8", "int8"):
        kind = "NVIDIA's GPUs" if precision == "fp8" else "CPUs"
        raise NotApplicableError(f"{precision} is for {kind}: on Apple's GPU give fp32 or bf16")
    precision = "fp32" if precision == "auto" else precision
    dtype = choose_precision(precision, next(model.parameters()).device)
    return FastModel(model, PlainEmbedder(model, dtype), precision, "the plain model", uses_graphs=False)


def _optimize_on_cpu(model: ImageModel, precision: str, batch: int, on_message: Callable[[str], None]) -> FastModel:
    if precision == "fp8":
        raise NotApplicableError("fp8 is for GPUs: on a CPU give int8, or auto")
    if precision == "auto":
        precision = find_fastest_precision(model, batch, on_message).precision
    method = "integer products" if precision == "int8" else "packed layers"
    return FastModel(model, create_cpu_embedder(model, precision), precision, method, uses_graphs=False)


class PlainEmbedder(nn.Module):
    """Images → y by a copy of the model itself, in one precision."""

    def __init__(self, model: ImageModel, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).to(dtype).eval().requires_grad_(False)
        self.dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, D)."""
        return self.model.embed(images.to(self.dtype))
