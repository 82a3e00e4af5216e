"""`optimize`: from a model, something that computes the same function faster, and says how closely.

The unit is an embedder, images → y; the head stays plain. On an NVIDIA GPU it is made of fused kernels, on a CPU of
packed layers or whole numbers; where neither fits a model, it is the model itself in the precision that was asked for.
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
from vitrail.fast.cpu.candidates import cpu_embedder
from vitrail.fast.cpu.search import best_on_cpu
from vitrail.fast.gpu.cuda_graph import Captured
from vitrail.fast.measure import relative_distance
from vitrail.model.base import ImageModel
from vitrail.model.timm_model import TimmModel

Both = tuple[Tensor, Tensor]
"""Representations (B, D) and logits (B, K)."""
Target = Literal["throughput", "latency"]
PRECISIONS = ("auto", "fp32", "bf16", "fp8", "int8")
PROBED = 4
"""Images that the distance is measured on, where none are given."""
STRIDE, MOST_RECORDED = 32, 12
"""Sizes of batches that are kept as CUDA graphs, each with its memory; of more, the one not used for longest goes."""
HOPPER = (9, 0)
"""The kernels use this generation's copy engine."""


class FastModel(nn.Module):
    """A model for use: `fast(images)` gives logits and `fast.embed(images)` representations, in float32.

    It takes normalised images of the model's own size. It can be used and no more: not trained, saved, moved, copied or
    resized. Do that to the model it is made of, which it shares nothing with.
    """

    def __init__(self, model: ImageModel, embedder: nn.Module, precision: str, way: str, recorded: bool) -> None:
        super().__init__()
        self.embedder = embedder
        self.head = copy.deepcopy(model.head).float().eval().requires_grad_(False)
        self.precision, self.way = precision, way
        self.distance = float("nan")
        """‖Δy‖/‖y‖ from the plain model in float32, as measured on some images."""
        self.measured_on = "random images"
        self.logits: Callable[[Tensor], Tensor] = lambda y: self.head(y)
        """The head's, of representations."""
        self._function: Callable[[Tensor], Both] = Recordings(self._computed) if recorded else self._computed
        self.eval()

    def embed(self, images: Tensor) -> Tensor:
        """(B, C, H, W), normalised → (B, D)."""
        return self.both(images)[0]

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W), normalised → (B, K)."""
        return self.both(images)[1]

    def both(self, images: Tensor) -> Both:
        """Representations and logits, of one pass."""
        is_here = not images.is_cuda or images.get_device() == torch.cuda.current_device()
        if is_here and torch.is_inference_mode_enabled():  # one image has no time for what need not be said
            return self._function(images)
        # Kernels are started, and graphs recorded, on the current GPU.
        with torch.inference_mode(), nullcontext() if is_here else torch.cuda.device(images.device):
            return self._function(images)

    def train(self, mode: bool = True) -> Self:
        """It is for use: nothing in it is ever trained."""
        return super().train(False)

    def _computed(self, images: Tensor) -> Both:
        if not len(images):  # nothing is computed, but what comes of it has its shape
            y, logits = self._computed(images.new_zeros(1, *images.shape[1:]))
            return y[:0], logits[:0]
        y = self.embedder(images).float()
        return y, self.logits(y)

    def describe(self) -> str:
        """What it is, in words."""
        return (
            f"{self.precision} by {self.way}, ‖Δ‖/‖y‖ = {self.distance:.1e} from the plain model on {self.measured_on}"
        )

    def extra_repr(self) -> str:
        """What it is, where it is printed."""
        return f"{self.precision}, {self.way}, distance {self.distance:.1e}"


class Recordings:
    """A function of images as CUDA graphs, one for each size of batch: 1, 2, 4, 8, 16, 32, and then multiples of 32.

    Batches between are filled up with zeros.
    """

    def __init__(self, function: Callable[[Tensor], Both]) -> None:
        self._function = function
        self._graphs: OrderedDict[tuple[torch.Size, torch.dtype], Captured[Both]] = OrderedDict()

    def __call__(self, images: Tensor) -> Both:
        """The result is the caller's to keep."""
        key = images.shape, images.dtype
        if (graph := self._graphs.get(key)) is None:
            filled, count = _filled_up(images), len(images)
            if len(filled) > count:
                y, logits = self(filled)
                return y[:count], logits[:count]
            while len(self._graphs) >= MOST_RECORDED:
                self._graphs.popitem(last=False)
            graph = self._graphs[key] = Captured(self._function)
        self._graphs.move_to_end(key)
        y, logits = torch._foreach_mul(graph(images), 1.0)  # both copied by one kernel
        return y, logits


def _filled_up(images: Tensor) -> Tensor:
    count = len(images)
    wanted = 1 << (count - 1).bit_length() if count <= STRIDE else -(-count // STRIDE) * STRIDE
    return images if count == wanted else torch.cat([images, images.new_zeros(wanted - count, *images.shape[1:])])


def optimize(
    model: ImageModel,
    target: Target = "throughput",
    precision: str = "auto",
    *,
    batch: int = 1,
    images: Tensor | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> FastModel:
    """Make a model fast where it lies: on its GPU, or on the CPU.

    Args:
        model: float32; it stays as it is.
        target: "latency" records each size of batch as a CUDA graph when it first comes: a pause then, and the least
            time for every one after. "throughput" starts kernels one by one. On a CPU they are the same.
        precision: fp32; bf16; fp8 on a GPU; int8 on a CPU. auto: bf16 on a GPU; on a CPU what is fastest there and near
            enough, as a short search finds, whose result is kept.
        batch: how many images are to come at a time, for that search.
        images: some of those that are to come, normalised: FP8 is calibrated on them, which makes it faster, and the
            distance is measured on them; on random ones if not given.
        tell: is told in words what is tried.
    """
    if precision not in PRECISIONS:
        hint = did_you_mean(precision, PRECISIONS) or ":"
        raise ConfigError(f"precision {precision!r}{hint} give one of {', '.join(PRECISIONS)}")
    if target not in ("throughput", "latency"):
        raise ConfigError(f"target = {target!r}: give throughput or latency")
    if isinstance(model, TimmModel):
        raise NotApplicableError("there is no fast way for timm's networks: leave the precision at fp32")
    weight = next(model.parameters())
    if weight.dtype != torch.float32:
        raise ConfigError(f"a model is made fast from its float32 weights, not from {weight.dtype}: give model.float()")
    on_gpu = weight.device.type == "cuda"
    fast = _on_gpu(model, target, precision, images) if on_gpu else _on_cpu(model, precision, batch, tell)
    fast.distance = fidelity(fast, model, images)
    if not math.isfinite(fast.distance):
        raise WeightsError("the model computes what is no number: its weights are damaged")
    fast.measured_on = "random images" if images is None else "the images given"
    tell(fast.describe())
    return fast


@torch.no_grad()
def fidelity(fast: FastModel, model: ImageModel, images: Tensor | None = None) -> float:
    """‖Δy‖/‖y‖ of a fast model from the plain one in float32."""
    weight, was_training = next(model.parameters()), model.training
    if images is None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(PROBED, model.in_channels, *model.image_size, generator=generator)
    images = images.to(weight.device, torch.float32)
    reference = model.eval().embed(images)
    model.train(was_training)
    return relative_distance(fast.embed(images), reference)


def why_no_kernels(device: torch.device) -> str | None:
    """Why the fused kernels cannot run on a device; None where they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "they are for NVIDIA GPUs"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if torch.cuda.get_device_capability(device) < HOPPER:
        return "they are for GPUs of the Hopper kind (H100, H200) and newer"
    return None


def _on_gpu(model: ImageModel, target: Target, precision: str, images: Tensor | None) -> FastModel:
    device, recorded = next(model.parameters()).device, target == "latency"
    if precision == "int8":
        raise NotApplicableError("int8 is for CPUs: on a GPU give bf16 or fp8")
    if precision == "fp32":
        return FastModel(model, PlainEmbedder(model, torch.float32), precision, "the plain model", recorded)
    wanted, why = "bf16" if precision == "auto" else precision, why_no_kernels(device)
    if why is None:
        try:
            from vitrail.fast.gpu.fused import FusedEmbedder
            from vitrail.fast.gpu.logits import Logits

            embedder = FusedEmbedder(model, fp8=wanted == "fp8", joins=recorded)
            if images is not None:
                with torch.cuda.device(device):
                    embedder.calibrate(images.to(device))
            fast = FastModel(model, embedder, wanted, "fused kernels", recorded)
            if type(fast.head) is nn.Linear:
                fast.logits = Logits(fast.head)
            return fast
        except NotApplicableError as error:
            why = str(error)
    if wanted == "fp8":
        raise NotApplicableError(f"fp8 is computed by fused kernels alone, and {why}: give bf16")
    return FastModel(model, PlainEmbedder(model, torch.bfloat16), wanted, f"the plain model, for {why}", recorded)


def _on_cpu(model: ImageModel, precision: str, batch: int, tell: Callable[[str], None]) -> FastModel:
    if precision == "fp8":
        raise NotApplicableError("fp8 is for GPUs: on a CPU give int8, or auto")
    if precision == "auto":
        precision = best_on_cpu(model, batch, tell).precision
    way = "integer products" if precision == "int8" else "packed layers"
    return FastModel(model, cpu_embedder(model, precision), precision, way, recorded=False)


class PlainEmbedder(nn.Module):
    """The model itself, in a precision."""

    def __init__(self, model: ImageModel, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).to(dtype).eval().requires_grad_(False)
        self.dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, D)."""
        return self.model.embed(images.to(self.dtype))
