"""Run a model once over every image of a data set, in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.data.loader import BROKEN_LEAST, BROKEN_SHARE, Batch, EvaluationLoader
from vitrail.data.sources.source import Source
from vitrail.data.transforms.preprocess import normalise
from vitrail.errors import ConfigError, DataError
from vitrail.model.base import ImageModel
from vitrail.system.device import choose_device
from vitrail.system.precision import PRECISIONS, choose_precision
from vitrail.system.ranks import Ranks

Progress = Callable[[int, int], None]
"""Called with the number of images that are done and the number of all images."""


@dataclass(frozen=True)
class InferenceOptions:
    """Where and how a model runs. These options change results by rounding errors only."""

    batch_size: int = 64
    """Images in a batch, over all ranks together."""
    workers: int = 0
    """Processes that read images; 0 reads them in this process."""
    device: str = "auto"
    """cpu, cuda, …; auto takes a GPU if the machine has one."""
    precision: str = "fp32"
    """Number format of matrix products: fp32, bf16 or fp16; auto takes the one that suits the device."""

    def __post_init__(self) -> None:
        if self.precision not in (*PRECISIONS, "auto"):
            raise ConfigError(f"precision = {self.precision!r}: give {', '.join(PRECISIONS)} or auto")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size = {self.batch_size}: give 1 or more")
        if self.workers < 0:
            raise ConfigError(f"workers = {self.workers}: give 0 or more")


def single_rank(options: InferenceOptions) -> Ranks:
    """Return the ranks of a run in this process alone, on the chosen device."""
    return Ranks(0, 1, choose_device(options.device))


def cast_half_to_float32(model: ImageModel) -> torch.dtype:
    """Cast a half-precision model to float32, in place, and return the dtype that any model then has."""
    if next(model.parameters()).dtype in (torch.float16, torch.bfloat16):
        model.float()
    return next(model.parameters()).dtype


def run_batches(
    model: ImageModel,
    source: Source,
    compute: Callable[[Tensor], Tensor],
    options: InferenceOptions,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield each batch of a data set together with what `compute` returns for its images.

    The model is moved to the device, cast from half precision to float32, and put into evaluation mode.

    Args:
        model: gives the preprocessing of the images.
        source: every image of it is used once, in order.
        compute: (B, C, height, width) normalised images → (B, …); `model`, `model.embed`, …
        options: batch size, worker processes, device and precision.
        ranks: the processes that share each batch; this process alone by default.
        progress: called after each batch.

    Yields:
        The batch, on the CPU, and the computed tensor, on the device. `batch.indices` are numbers in the source.
        `batch.mask` is False where an image cannot be read or only fills up the batch.

    Raises:
        DataError: at the end, if more images are broken than training allows.
    """
    ranks = ranks or single_rank(options)
    precision = choose_precision(options.precision, ranks.device)
    dtype = cast_half_to_float32(model)
    model.to(ranks.device).eval()
    batch_size = -(-options.batch_size // ranks.size) * ranks.size
    loader = EvaluationLoader(
        source,
        model.preprocessing,
        batch_size,
        workers=options.workers,
        rank=ranks.rank,
        ranks=ranks.size,
        pin_memory=ranks.device.type == "cuda",
        most_broken=len(source),  # counted below, over all ranks
    )
    fp32 = precision == torch.float32
    for number, batch in enumerate(loader, start=1):
        images = normalise(batch.images.to(ranks.device, non_blocking=True), model.preprocessing, dtype)
        with torch.inference_mode(), nullcontext() if fp32 else torch.autocast(ranks.device.type, precision):
            computed = compute(images)
        yield batch, computed.float() if computed.dtype != torch.float64 else computed
        if progress is not None:
            progress(min(number * batch_size, len(source)), len(source))
    broken, most = len(ranks.union(set(loader.broken))), max(int(len(source) * BROKEN_SHARE), BROKEN_LEAST)
    if broken > most:
        raise DataError(
            f"{broken} of {len(source)} images cannot be used, more than the {most} allowed; `vitrail data check` "
            "lists them all"
        )
