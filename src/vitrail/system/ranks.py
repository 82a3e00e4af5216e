"""The ranks (processes) of a run, and how they exchange values.

`torchrun` starts and numbers the processes; a run with a single process needs no set-up.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from vitrail.errors import ConfigError, Stopped, TrainingError
from vitrail.system.device import choose_device

T = TypeVar("T")
WAITING_SECONDS = 0.5
HEARTBEAT_SECONDS = 1.0
"""How long a rank is silent, at most, while it does what may take longer than ranks wait for each other."""
_JOINS = itertools.count()
"""Counts the joins of this process. Every rank joins equally often, so all ranks agree on a store prefix."""


@dataclass(frozen=True)
class Ranks:
    """This process and its connections to the other ranks of the run."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    """CPU group for decisions: whether to stop, whether a checkpoint is complete."""
    saving: dist.ProcessGroup | None = None
    """CPU group for the thread that writes checkpoints: two threads must not share a group."""

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes files and prints."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        if self.size == 1:
            return flag
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.control)
        return bool(flags.item())

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait until all ranks have reached this call; call `meanwhile` twice a second until then."""
        if self.size == 1:
            return
        work = dist.barrier(group=self.control, async_op=meanwhile is not None)
        if meanwhile is not None and work is not None:
            while not work.is_completed():
                meanwhile()
                time.sleep(WAITING_SECONDS)
            work.wait()

    def broadcast_from_first(self, value: Any) -> Any:
        """Return the first rank's value on every rank."""
        if self.size == 1:
            return value
        carrier = [value]
        dist.broadcast_object_list(carrier, src=0, group=self.control)
        return carrier[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def run_without_timeout(self, work: Callable[[], T]) -> T:
        """Run `work` on this rank, and return its value once all ranks are done. All ranks must call this.

        Ranks wait for each other for some minutes only, and a copy from a bucket may take hours: `work` runs in a
        thread, and meanwhile the ranks tell each other every second that they are still there. It must not use the
        group of ranks itself.

        Raises:
            TrainingError: The work of another rank has failed; an error of this rank's own work is raised as it is.
        """
        if self.size == 1:
            return work()
        future: Future[T] = Future()
        threading.Thread(target=_run_into, args=(future, work), name="patient", daemon=True).start()
        while self.any(not wait([future], HEARTBEAT_SECONDS).done):
            pass
        failure = future.exception()
        if self.any(failure is not None) and failure is None:
            raise TrainingError(f"rank {self.rank}: another rank has failed, and says why")
        return future.result()

    def union(self, numbers: set[int]) -> set[int]:
        """Return the union of all ranks' sets."""
        return set().union(*self.gather(numbers))

    def sum_over_ranks(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return each sum added up over all ranks, which must have the same names and shapes in the same order."""
        if self.size == 1 or not sums:
            return sums
        flat = torch.cat([each.reshape(-1) for each in sums.values()]).cpu()
        dist.all_reduce(flat, group=self.control)
        parts = flat.split([each.numel() for each in sums.values()])
        return {name: part.view(each.shape) for (name, each), part in zip(sums.items(), parts, strict=True)}


def _run_into(future: Future[T], work: Callable[[], T]) -> None:
    """Run work, and put its value or its error into a future."""
    try:
        future.set_result(work())
    except BaseException as error:  # whoever asks for the value gets it
        future.set_exception(error)


@contextmanager
def join_ranks(device: str, timeout: float) -> Iterator[Ranks]:
    """Join the ranks that torchrun started, and leave them when the block ends. Without torchrun there is one rank.

    Args:
        device: as for `choose_device`; on GPUs each rank takes its own. Ranks do not share Apple's GPU: "auto" is the
            CPU there.
        timeout: seconds to wait for the other ranks.

    Raises:
        ConfigError: several ranks are to share Apple's GPU.
        TrainingError: the other ranks cannot be reached.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    chosen = choose_device(device)
    if size == 1:
        yield Ranks(0, 1, chosen)
        return
    if chosen.type == "mps":
        if device != "auto":
            raise ConfigError("Apple's GPU works for one process: start without torchrun, or give run.device=cpu")
        chosen = torch.device("cpu")
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(chosen)
    limit = timedelta(seconds=timeout)
    try:
        store = PrefixStore(f"join-{next(_JOINS)}", _connect_store(limit))
        dist.init_process_group(
            "nccl" if chosen.type == "cuda" else "gloo", store=store, rank=rank, world_size=size, timeout=limit
        )
        control, saving = (dist.new_group(backend="gloo", timeout=limit) for _ in range(2))
    except (RuntimeError, ValueError) as error:
        raise TrainingError(f"rank {rank} of {size} cannot reach the others: {_first_line(error)}") from None
    leave_cleanly = False
    try:
        yield Ranks(rank, size, chosen, control, saving)
        leave_cleanly = True
    except (Stopped, ConfigError):  # all ranks raise these
        leave_cleanly = True
        raise
    finally:
        # After any other error the other ranks may be gone, and leaving the group would wait for them.
        if leave_cleanly:
            dist.destroy_process_group()


_STORES: list[Store] = []


def _connect_store(limit: timedelta) -> Store:
    """Return the store where ranks find each other. A process keeps one, because a sweep joins several times."""
    if not _STORES:
        _STORES.append(next(rendezvous("env://", timeout=limit))[0])
    _STORES[0].set_timeout(limit)
    return _STORES[0]


def require_one_process(what: str) -> None:
    """Raise a ConfigError under torchrun, for work that several processes cannot share."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError(f"{what} runs in one process: start it without torchrun")


_SOURCE_LINE = re.compile(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\] ")


def explain_lost_rank(error: BaseException) -> str | None:
    """Return a message if the error means that another rank was lost, else None."""
    text = str(error)
    signs = (
        "Connection closed",
        "Connection reset",
        "gloo",
        "NCCL",
        "Broken pipe",
        "Timed out waiting",
        "ProcessGroup",
    )
    if isinstance(error, RuntimeError) and any(sign in text for sign in signs):
        # Gloo begins with a line of its source, and ends with guesses.
        said = _SOURCE_LINE.sub("", _first_line(error)).partition(". This is typically")[0]
        return f"another rank was lost ({said})"
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
