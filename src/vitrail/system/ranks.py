"""Ranks: who this process is among those of a run, and what the ranks tell each other.

`torchrun` starts the processes and numbers them; a single process needs nothing.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
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
_JOINS = itertools.count()
"""How often this process has joined: every rank joins equally often, so all ranks agree on a name."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    """On the CPU, for what the ranks agree on: whether to stop, whether a checkpoint is whole."""
    saving: dist.ProcessGroup | None = None
    """On the CPU, for the thread that writes checkpoints: two threads must not talk over one line."""

    @property
    def first(self) -> bool:
        """The one that writes and speaks."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether it holds on any rank."""
        if self.size == 1:
            return flag
        told = torch.tensor([int(flag)])
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.control)
        return bool(told.item())

    def wait(self) -> None:
        """For all others to come here too."""
        if self.size > 1:
            dist.barrier(group=self.control)

    def broadcast_from_first(self, value: Any) -> Any:
        """What the first rank has, on all of them."""
        if self.size == 1:
            return value
        carrier = [value]
        dist.broadcast_object_list(carrier, src=0, group=self.control)
        return carrier[0]

    def gather(self, value: T) -> list[T]:
        """What each rank has, in their order, on all of them."""
        if self.size == 1:
            return [value]
        everyone = [value] * self.size
        dist.all_gather_object(everyone, value, group=self.control)
        return everyone

    def unite(self, found: set[int]) -> set[int]:
        """What any rank has found."""
        return set().union(*self.gather(found))

    def add_up(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Added up over all ranks; names and their order are the same on all."""
        if self.size == 1 or not sums:
            return sums
        stacked = torch.stack(list(sums.values())).cpu()
        dist.all_reduce(stacked, group=self.control)
        return dict(zip(sums, stacked.unbind(), strict=True))


@contextmanager
def join_ranks(device: str, timeout: float) -> Iterator[Ranks]:
    """The ranks of this run while the block runs. One where nothing says otherwise."""
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    chosen = choose_device(device)
    if size == 1:
        yield Ranks(0, 1, chosen)
        return
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(chosen)
    limit = timedelta(seconds=timeout)
    try:
        store = PrefixStore(f"join-{next(_JOINS)}", _meeting_point(limit))
        dist.init_process_group(
            "nccl" if chosen.type == "cuda" else "gloo", store=store, rank=rank, world_size=size, timeout=limit
        )
        control, saving = (dist.new_group(backend="gloo", timeout=limit) for _ in range(2))
    except (RuntimeError, ValueError) as error:
        raise TrainingError(f"rank {rank} of {size} cannot reach the others: {_first_line(error)}") from None
    together = False
    try:
        yield Ranks(rank, size, chosen, control, saving)
        together = True
    except (Stopped, ConfigError):  # which all ranks raise
        together = True
        raise
    finally:
        # After another error the others may be gone: taking leave of them would wait for an answer.
        if together:
            dist.destroy_process_group()


_MEETING_POINTS: list[Store] = []


def _meeting_point(limit: timedelta) -> Store:
    """Where ranks find each other. One for a process: a sweep joins several times, and its address is taken then."""
    if not _MEETING_POINTS:
        _MEETING_POINTS.append(next(rendezvous("env://", timeout=limit))[0])
    _MEETING_POINTS[0].set_timeout(limit)
    return _MEETING_POINTS[0]


def require_one_process(what: str) -> None:
    """For what does not share its work: several processes would all do the same, in each other's way."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError(f"{what} runs in one process: start it without torchrun")


def explain_lost_rank(error: BaseException) -> str | None:
    """A sentence, where an error means that another rank is gone."""
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
        return f"another rank was lost ({_first_line(error)})"
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
