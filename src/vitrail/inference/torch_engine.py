"""The engine of a PyTorch model: plain in fp32, by `vitrail.fast` in other precisions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from vitrail.data.transforms.preprocess import normalise
from vitrail.errors import ConfigError, did_you_mean
from vitrail.fast.cpu.packed import pack_layers
from vitrail.fast.optimize import FastModel, optimize
from vitrail.inference.engine import Engine, EngineOutput
from vitrail.model.base import ImageModel
from vitrail.model.timm_model import TimmModel
from vitrail.system.device import can_copy_asynchronously
from vitrail.system.precision import INFERENCE_PRECISIONS, choose_precision
from vitrail.weights.digest import compute_weights_digest


class TorchEngine(Engine):
    """Computes with a model, which it moves to the device; the other arguments are those of `open_engine`.

    Attributes:
        model: the model, on the device. In other precisions than fp32 it is kept for its attention and its layers.
        fast: the faster version that computes; None for fp32, and for models that have no such version.
    """

    runtime = "PyTorch"

    def __init__(
        self,
        model: ImageModel,
        device: torch.device,
        precision: str = "fp32",
        *,
        target: Literal["throughput", "latency"] = "throughput",
        batch: int = 1,
        threads: int | None = None,
        packs: bool = False,
        on_message: Callable[[str], None] = lambda line: None,
    ) -> None:
        if precision not in INFERENCE_PRECISIONS:
            hint = did_you_mean(precision, INFERENCE_PRECISIONS) or ":"
            raise ConfigError(f"precision {precision!r}{hint} give one of {', '.join(INFERENCE_PRECISIONS)}")
        if precision == "fp8" and device.type == "cpu":
            raise ConfigError("precision fp8 is for GPUs: on a CPU give int8, bf16, fp32 or auto")
        if precision == "fp8" and device.type == "mps":
            raise ConfigError("precision fp8 needs an NVIDIA GPU: give fp32, bf16 or auto")
        if precision == "int8" and device.type == "mps":
            raise ConfigError("precision int8 is for CPUs: give fp32, bf16 or auto, or the device cpu")
        if precision == "auto" and device.type == "mps":
            precision = "fp32"
        if precision == "int8" and device.type != "cpu":
            raise ConfigError("precision int8 is for CPUs: on a GPU give bf16, fp16, fp8, fp32 or auto")
        cast_half_to_float32(model)
        self.model = model.to(device).eval()
        self.device, self.threads = device, threads
        self.fast: FastModel | None = None
        self.preprocessing, self.class_names, self.task = model.preprocessing, model.labels, model.task
        self.num_classes, self.precision, self.reliability = model.num_classes, precision, model.reliability
        self._autocast: torch.dtype | None = None
        if precision in ("fp16", "bf16", "auto") and (precision == "fp16" or isinstance(model, TimmModel)):
            self._use_autocast(precision)
        elif precision != "fp32":
            self._make_fast(precision, target, batch, on_message)
        elif packs and device.type == "cpu":
            pack_layers(self.model)

    @cached_property
    def embedding_size(self) -> int:
        """D. Not every architecture states it, so a blank image is computed."""
        return len(self.embed(self.make_blank())[0])

    def compute(self, pixels: Tensor, *, logits: bool = True, embeddings: bool = False) -> EngineOutput:
        with torch.inference_mode():
            moved = pixels.to(self.device, non_blocking=can_copy_asynchronously(self.device))
            images = normalise(moved, self.preprocessing, self._dtype)
            scores = y = None
            if self.fast is not None:
                y, scores = self.fast.embed_and_classify(images)
            else:
                with nullcontext() if self._autocast is None else torch.autocast(self.device.type, self._autocast):
                    scores, y = self._run_plain(images, logits, embeddings)
        return EngineOutput(_to_float(scores) if logits else None, _to_float(y) if embeddings else None)

    def compute_digest(self) -> str:
        # The device and the batch size change the rounding alone, so they are not a part of it.
        crop = self.preprocessing.crop_rounding
        content = f"{compute_weights_digest(self.model)} {crop} {self.precision} {self._autocast}"
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def enter_thread(self) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32 if self.fast is not None else next(self.model.parameters()).dtype

    def _run_plain(self, images: Tensor, logits: bool, embeddings: bool) -> tuple[Tensor | None, Tensor | None]:
        if logits and embeddings:
            features = self.model.forward_features(images)
            return self.model.forward_head(features), self.model.pool_features(features)
        return (self.model(images), None) if logits else (None, self.model.embed(images))

    def _use_autocast(self, precision: str) -> None:
        dtype = choose_precision(precision, self.device)
        self._autocast = None if dtype == torch.float32 else dtype
        self.precision = "fp32" if self._autocast is None else "fp16" if dtype == torch.float16 else "bf16"

    def _make_fast(
        self, precision: str, target: Literal["throughput", "latency"], batch: int, on_message: Callable[[str], None]
    ) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or before)  # the fastest precision depends on the number of threads
        try:
            self.fast = optimize(self.model.float(), target, precision, batch=batch, on_message=on_message)
        finally:
            torch.set_num_threads(before)
        self.precision = self.fast.precision


def cast_half_to_float32(model: ImageModel) -> None:
    """Cast a half-precision model to float32, in place; leave any other as it is."""
    if next(model.parameters()).dtype in (torch.float16, torch.bfloat16):
        model.float()


def _to_float(rows: Tensor | None) -> Tensor | None:
    return rows if rows is None or rows.dtype == torch.float64 else rows.float()
