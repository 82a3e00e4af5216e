"""Run an engine once over every image of a data set, in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vitrail.data.loader import BROKEN_LEAST, BROKEN_SHARE, Batch, EvaluationLoader
from vitrail.data.sources.source import Source
from vitrail.errors import ConfigError, DataError
from vitrail.inference.engine import Engine, EngineOutput, Model, open_engine
from vitrail.system.device import choose_device
from vitrail.system.events import Progress
from vitrail.system.precision import INFERENCE_PRECISIONS
from vitrail.system.ranks import Ranks


@dataclass(frozen=True)
class InferenceOptions:
    """Where and how a model runs. These options change results by rounding errors only."""

    batch_size: int = 64
    """Images in a batch, over all ranks together."""
    workers: int = 0
    """Processes that read images; 0 reads them in this process."""
    device: str = "auto"
    """cpu, cuda, mps, …; auto takes a GPU if the machine has one."""
    precision: str = "fp32"
    """fp32, the exact one; or a faster one: bf16, fp16 and fp8 (GPU), int8 (CPU); auto takes the fastest here."""

    def __post_init__(self) -> None:
        if self.precision not in INFERENCE_PRECISIONS:
            raise ConfigError(f"precision = {self.precision!r}: give one of {', '.join(INFERENCE_PRECISIONS)}")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size = {self.batch_size}: give 1 or more")
        if self.workers < 0:
            raise ConfigError(f"workers = {self.workers}: give 0 or more")


def open_model(
    model: Model | Engine,
    options: InferenceOptions,
    ranks: Ranks | None = None,
    on_message: Callable[[str], None] = lambda line: None,
) -> Engine:
    """Make a model ready to compute as the options say, on the device of the rank; an engine stays as it is."""
    if isinstance(model, Engine):
        return model
    device = options.device if ranks is None else ranks.device
    return open_engine(
        model, device=device, precision=options.precision, batch=options.batch_size, on_message=on_message
    )


def single_rank(options: InferenceOptions) -> Ranks:
    """Return the ranks of a run in this process alone, on the chosen device."""
    return Ranks(0, 1, choose_device(options.device))


def run_batches(
    engine: Engine,
    source: Source,
    options: InferenceOptions,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
    *,
    logits: bool = True,
    embeddings: bool = False,
) -> Iterator[tuple[Batch, EngineOutput]]:
    """Yield each batch of a data set together with what the engine computes for its images.

    Args:
        engine: computes, and says how images are prepared.
        source: every image of it is used once, in order.
        options: batch size and worker processes.
        ranks: the processes that share each batch; this process alone by default.
        progress: called at the start and after each batch.
        logits: whether to compute logits.
        embeddings: whether to compute representations.

    Yields:
        The batch, on the CPU, and the computed tensors, on the device. `batch.indices` are numbers in the source.
        `batch.mask` is False where an image cannot be read or only fills up the batch.

    Raises:
        ConfigError: if logits or representations are requested that the engine does not give.
        DataError: at the end, if more images are broken than training allows.
    """
    engine.check_request(logits, embeddings)
    ranks = ranks or Ranks(0, 1, engine.device)
    batch_size = -(-options.batch_size // ranks.size) * ranks.size
    loader = EvaluationLoader(
        source,
        engine.preprocessing,
        batch_size,
        workers=options.workers,
        rank=ranks.rank,
        ranks=ranks.size,
        pin_memory=engine.device.type == "cuda",
        most_broken=len(source),  # counted below, over all ranks
    )
    if progress is not None:
        progress(0, len(source))  # so that something is shown while the first batch is read and computed
    for number, batch in enumerate(loader, start=1):
        yield batch, engine.compute(batch.images, logits=logits, embeddings=embeddings)
        if progress is not None:
            progress(min(number * batch_size, len(source)), len(source))
    require_few_broken(len(ranks.union(set(loader.broken))), len(source))


def require_few_broken(broken: int, count: int) -> None:
    """Raise a DataError if more of `count` images cannot be used than training allows."""
    most = max(int(count * BROKEN_SHARE), BROKEN_LEAST)
    if broken > most:
        raise DataError(
            f"{broken} of {count} images cannot be used, more than the {most} allowed; `vitrail data check` "
            "lists them all"
        )
