"""Distribute a model over the ranks of a run: copied (DDP) or sharded (FSDP2), by torch's own engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from vitrail.errors import ConfigError
from vitrail.model.rotary import LearnedRotaryPositions
from vitrail.objectives.base import Objective
from vitrail.system.ranks import Ranks
from vitrail.training.optim import find_layers


def distribute(objective: Objective, ranks: Ranks, parallel: str, precision: torch.dtype) -> nn.Module:
    """Move the objective to its device and distribute it over all ranks. Its parameters keep their names.

    Args:
        parallel: `ddp`: each rank has the whole model, and gradients are averaged. `fsdp`: every layer's parameters are
            sharded over all ranks, and gathered when the layer is computed. `hybrid`: sharded over the ranks of a
            node, copied from node to node.

    Returns:
        The module to call in a training step.
    """
    if ranks.size == 1:
        return objective.to(ranks.device)
    if any(isinstance(part, nn.BatchNorm2d) for part in objective.modules()):
        if ranks.device.type != "cuda":
            raise ConfigError(
                "batch norm in a stem needs GPUs to be trained on several ranks: give its layers norm group"
            )
        nn.SyncBatchNorm.convert_sync_batchnorm(objective)  # statistics of one rank alone are not those of the batch
    if parallel == "ddp":
        objective.to(ranks.device)
        return DistributedDataParallel(objective, gradient_as_bucket_view=True)
    check_shardable(objective, precision)
    mesh = _mesh(ranks, parallel)
    options: dict[str, Any] = {"mesh": mesh}
    if precision != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for layer in find_layers(objective).values():
        fully_shard(layer, **options)
    # The root is resharded after a forward pass too. Otherwise the next pass would compute with tensors gathered before
    # the average and the weights changed places.
    fully_shard(objective, reshard_after_forward=True, **options)
    register_fsdp_forward_method(objective, "embed")  # it gathers tensors too
    return objective.to(ranks.device)


def check_shardable(objective: nn.Module, precision: torch.dtype) -> None:
    """Raise a ConfigError if sharding would round what must stay float32.

    Sharded parameters are gathered in the precision of the run. Angles of learned rotary positions that are computed
    from bf16 frequencies are off by degrees.
    """
    if precision != torch.float32 and any(isinstance(part, LearnedRotaryPositions) for part in objective.modules()):
        raise ConfigError(
            "learned rotary positions must be computed in float32, and sharding would round them: give "
            "run.parallel=ddp or run.precision=fp32"
        )


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
    """With `skip`, leave gradients on their rank while the block runs; the last part of a batch exchanges them."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(not skip)
    with module.no_sync() if skip and isinstance(module, DistributedDataParallel) else nullcontext():
        yield


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded. All ranks must call this."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole
