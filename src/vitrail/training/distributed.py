"""How a model is spread over the ranks of a run: copied (DDP) or sharded (FSDP2), by torch's own engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from vitrail.errors import ConfigError
from vitrail.objectives.base import Objective
from vitrail.system.ranks import Ranks
from vitrail.training.optim import find_layers


def distribute(objective: Objective, ranks: Ranks, parallel: str, precision: torch.dtype) -> nn.Module:
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
    for layer in find_layers(objective).values():
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
def skip_gradient_sync(module: nn.Module, skip: bool) -> Iterator[None]:
    """Gradients of a part of a batch stay on their rank while the block runs (`skip`), until the last part."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(not skip)
    with module.no_sync() if skip and isinstance(module, DistributedDataParallel) else nullcontext():
        yield


def gather_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded; every rank must ask."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found
