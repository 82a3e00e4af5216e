"""Ranks: who we are among the processes of a run, and how a model is spread over them.

The engine is torch's own. `torchrun` starts the processes and says who is who; a single process needs nothing.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from vitrail.errors import ConfigError, Stopped, TrainingError
from vitrail.metrics import Sums
from vitrail.model.create import checked_device
from vitrail.objectives.base import Objective
from vitrail.train.optim import layers

T = TypeVar("T")
_JOINS = itertools.count()
"""How often this process has joined: every rank joins as often, so that they agree on a name."""


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

    def told_by_first(self, value: Any) -> Any:
        """What the first rank has, on all of them."""
        if self.size == 1:
            return value
        carrier = [value]
        dist.broadcast_object_list(carrier, src=0, group=self.control)
        return carrier[0]

    def gathered(self, value: T) -> list[T]:
        """What each rank has, in their order, on all of them."""
        if self.size == 1:
            return [value]
        everyone = [value] * self.size
        dist.all_gather_object(everyone, value, group=self.control)
        return everyone

    def united(self, found: set[int]) -> set[int]:
        """What any rank has found."""
        return set().union(*self.gathered(found))

    def total(self, sums: Sums) -> Sums:
        """Added up over all ranks; names and their order are the same on all."""
        if self.size == 1 or not sums:
            return sums
        stacked = torch.stack(list(sums.values())).cpu()
        dist.all_reduce(stacked, group=self.control)
        return dict(zip(sums, stacked.unbind(), strict=True))


@contextmanager
def joined(device: str, timeout: float) -> Iterator[Ranks]:
    """The ranks of this run while the block runs. One where nothing says otherwise."""
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    chosen = chosen_device(device)
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


def one_process(what: str) -> None:
    """For what does not share its work: several processes would all do the same, in each other's way."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError(f"{what} runs in one process: start it without torchrun")


def chosen_device(device: str) -> torch.device:
    """What a person named; a GPU where there is one, for "auto"."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = checked_device(device)
    if found.type == "meta":
        raise ConfigError("run.device = 'meta' has no memory to train in: give cpu, cuda or auto")
    return found


def spread(objective: Objective, ranks: Ranks, parallel: str, precision: torch.dtype) -> nn.Module:
    """The objective on its device, over all ranks: what to call in a training step. The objective keeps its names.

    `ddp`: whole on each, gradients averaged. `fsdp`: every layer's parameters sharded over all ranks and gathered when
    it is computed. `hybrid`: sharded over the ranks of a node, copied from node to node.
    """
    if ranks.size == 1:
        return objective.to(ranks.device)
    if any(isinstance(part, nn.BatchNorm2d) for part in objective.modules()):
        if ranks.device.type != "cuda":
            raise ConfigError(
                "batch norm in a stem needs GPUs to be trained on several ranks: give its layers norm group"
            )
        nn.SyncBatchNorm.convert_sync_batchnorm(objective)  # a rank's own statistics would not be the batch's
    if parallel == "ddp":
        objective.to(ranks.device)
        return DistributedDataParallel(objective, gradient_as_bucket_view=True)
    mesh = _mesh(ranks, parallel)
    options: dict[str, Any] = {"mesh": mesh}
    if precision != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for layer in layers(objective).values():
        fully_shard(layer, **options)
    # The root too is given back after a forward pass: else the next one would compute with what was gathered before the
    # average and the weights changed places.
    fully_shard(objective, reshard_after_forward=True, **options)
    return objective.to(ranks.device)


def _mesh(ranks: Ranks, parallel: str) -> DeviceMesh:
    kind = ranks.device.type
    if parallel == "fsdp":
        return init_device_mesh(kind, (ranks.size,), mesh_dim_names=("shard",))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    if ranks.size % local:
        raise ConfigError(
            f"run.parallel = 'hybrid' needs nodes of equal size: {ranks.size} ranks are not {local} a node"
        )
    return init_device_mesh(kind, (ranks.size // local, local), mesh_dim_names=("copy", "shard"))


@contextmanager
def without_exchange(module: nn.Module, skip: bool) -> Iterator[None]:
    """Gradients of a part of a batch stay on their rank while the block runs (`skip`), until the last part."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(not skip)
    with module.no_sync() if skip and isinstance(module, DistributedDataParallel) else nullcontext():
        yield


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded; every rank must ask."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def lost(error: BaseException) -> str | None:
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
