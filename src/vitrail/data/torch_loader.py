"""Run a torch DataLoader so that the death of a worker does not end the training.

When the system kills a worker, for example because memory ran out, new workers continue with the next step.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from vitrail.data.parallel import exit_with_parent
from vitrail.errors import DataError
from vitrail.system.worker_start import NO_WORKERS, NOT_RECEIVED, UNGUARDED, start_workers

log = logging.getLogger("vitrail")

WORKER_DEATHS = 3
"""How often in a row workers may die before the error is raised."""
_WORKER_DIED = re.compile(r"DataLoader worker .*(exited unexpectedly|is killed)")

Item = TypeVar("Item")


def stream_batches(
    samples: Dataset[Item], steps: Callable[[int], Sampler[list[int]]], options: dict[str, Any]
) -> Iterator[Item]:
    """Yield what `samples` makes of each step in `steps(0)`; after a worker's death, continue with `steps(done)`."""
    done = deaths = 0
    while True:
        with warnings.catch_warnings():
            # The user chose the number of workers; torch would warn again for every loader.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader = DataLoader(samples, batch_sampler=steps(done), **options)
        with start_workers() if options["num_workers"] else nullcontext():
            batches = _iterate_without_handler(loader)
        try:
            for batch in batches:
                done, deaths = done + 1, 0
                yield batch
            return
        except (RuntimeError, EOFError, OSError) as error:
            codes = {worker.exitcode for worker in getattr(batches, "_workers", ())}
            if UNGUARDED in codes:
                raise DataError(NO_WORKERS) from None
            if not done and 1 in codes:  # Python ended it: an error in a worker that has started comes as a batch
                raise DataError(NOT_RECEIVED) from None
            # torch raises a RuntimeError; a connection that breaks while a batch is sent raises one of the others.
            died = _WORKER_DIED.search(str(error)) if isinstance(error, RuntimeError) else options["num_workers"]
            deaths += 1
            if not died or deaths > WORKER_DEATHS:
                raise
            log.warning("a worker died (%s); new workers go on from there", error or type(error).__name__)


def _iterate_without_handler(loader: DataLoader[Any]) -> Iterator[Any]:
    """Iterate without torch's signal handler, which raises the death of a worker in the middle of a training step.

    Without the handler, the death is raised here, when the next batch is requested.
    """
    if not loader.num_workers or threading.current_thread() is not threading.main_thread():
        return iter(loader)
    before = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        warnings.filterwarnings("ignore", message="Got pickle error")  # it is raised as well
        batches = iter(loader)
    if before is not None:
        signal.signal(signal.SIGCHLD, before)
    return batches


def make_loader_options(workers: int, pin_memory: bool | None, start_method: str | None) -> dict[str, Any]:
    """Return the keyword arguments for DataLoader; memory is pinned where there is a GPU if `pin_memory` is None."""
    return {
        "num_workers": workers,
        "collate_fn": _return_batch,
        "worker_init_fn": exit_with_parent,
        "generator": torch.Generator(),  # its own, so that the program's random state does not move
        "pin_memory": torch.cuda.is_available() if pin_memory is None else pin_memory,
        "multiprocessing_context": start_method if workers else None,
    }


def _return_batch(batch: Item) -> Item:
    """Samples arrive as a whole batch, so there is nothing to collate."""
    return batch


@dataclass
class EndlessSteps(Sampler[list[int]]):
    """For each step, the positions that belong to one rank; it never ends."""

    position: int
    """Samples used before the first step, on all ranks together."""
    batch_size: int
    """Samples of a step on all ranks together."""
    rank: int
    ranks: int
    first: int
    """The step to start with."""

    def __iter__(self) -> Iterator[list[int]]:
        share = self.batch_size // self.ranks
        start = self.position + self.first * self.batch_size + self.rank * share
        while True:
            yield list(range(start, start + share))
            start += self.batch_size


@dataclass
class EpochSteps(Sampler[list[int]]):
    """For each step of one epoch, the samples that belong to one rank; −1 fills up the last step."""

    count: int
    batch_size: int
    rank: int
    ranks: int
    first: int

    def __iter__(self) -> Iterator[list[int]]:
        share = self.batch_size // self.ranks
        for step in range(self.first, -(-self.count // self.batch_size)):
            start = step * self.batch_size + self.rank * share
            yield [index if index < self.count else -1 for index in range(start, start + share)]
