"""A model over every image of a data set, once: what scores and features are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.data.loader import BROKEN_LEAST, BROKEN_SHARE, Batch, EvaluationLoader
from vitrail.data.sources.source import Source
from vitrail.data.transforms.evaluation import normalise
from vitrail.errors import ConfigError, DataError
from vitrail.model.base import ImageModel
from vitrail.system.device import choose_device
from vitrail.system.precision import PRECISIONS, choose_precision
from vitrail.system.ranks import Ranks

Progress = Callable[[int, int], None]
"""Told how many images of how many are done."""


@dataclass(frozen=True)
class How:
    """Where and how a model is run. None of it changes what is measured by more than rounding."""

    batch_size: int = 64
    """Images at a time, on all ranks together."""
    workers: int = 0
    """Processes that read images; 0 reads in this one."""
    device: str = "auto"
    """cpu, cuda, …; a GPU where there is one if auto."""
    precision: str = "fp32"
    """Of products: fp32, bf16, fp16; auto takes what suits the device."""

    def __post_init__(self) -> None:
        if self.precision not in (*PRECISIONS, "auto"):
            raise ConfigError(f"precision = {self.precision!r}: give {', '.join(PRECISIONS)} or auto")
        if self.batch_size < 1 or self.workers < 0:
            raise ConfigError(f"batch_size = {self.batch_size}, workers = {self.workers}: give 1, and 0, or more")


def alone(how: How) -> Ranks:
    """This process as the only one, on the device that was asked for."""
    return Ranks(0, 1, choose_device(how.device))


def in_full_precision(model: ImageModel) -> torch.dtype:
    """From half precision to float32, in place; what it computes in then."""
    if next(model.parameters()).dtype in (torch.float16, torch.bfloat16):
        model.float()
    return next(model.parameters()).dtype


def passes(
    model: ImageModel,
    source: Source,
    compute: Callable[[Tensor], Tensor],
    how: How,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[Batch, Tensor]]:
    """Each batch, on the CPU, with `compute(images)` for it, on the device: `model`, `model.embed`, …

    On several ranks each gets its share of every batch; `batch.indices` are numbers in the source, and where
    `batch.mask` is False an image only fills up, or could not be read. The model is moved to the device, from half
    precision to float32, and to evaluation mode. More broken images than training allows are a DataError at the end.
    """
    ranks = ranks or alone(how)
    precision = choose_precision(how.precision, ranks.device)
    dtype = in_full_precision(model)
    model.to(ranks.device).eval()
    batch_size = -(-how.batch_size // ranks.size) * ranks.size
    loader = EvaluationLoader(
        source,
        model.preprocessing,
        batch_size,
        workers=how.workers,
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
    broken, most = len(ranks.unite(set(loader.broken))), max(int(len(source) * BROKEN_SHARE), BROKEN_LEAST)
    if broken > most:
        raise DataError(
            f"{broken} of {len(source)} images cannot be used, more than the {most} allowed; `vitrail data check` "
            "finds them all"
        )
