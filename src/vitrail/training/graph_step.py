"""A training step as one CUDA graph (`run.graphs`): gradients, clipping, the optimizer's step and the average.

The kernels are the same, but start all at once: those of a small model are done before Python can start the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitrail.data.loader import Batch
from vitrail.errors import ConfigError
from vitrail.fast.gpu.cuda_graph import CudaGraph
from vitrail.objectives.metrics import Sums
from vitrail.objectives.supervised import Supervised
from vitrail.system.device import send_to_device
from vitrail.system.ranks import Ranks
from vitrail.training.averaging import Average
from vitrail.training.clipping import clip_gradients
from vitrail.training.config import RunConfig

if TYPE_CHECKING:
    from vitrail.fast.gpu.training import FusedTraining


class GraphStep:
    """Makes training steps on whole batches of one shape.

    Mixing is drawn outside the graph; the key of vitrail's own dropout is an input of it. A step without a finite
    gradient changes nothing but running statistics and their average.
    """

    def __init__(
        self,
        objective: Supervised,
        precision: torch.dtype,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None = None,
        average: Average | None = None,
        fused: FusedTraining | None = None,
    ) -> None:
        """Prepare the graph.

        Args:
            objective: What learns.
            precision: Type of the products.
            optimizer: It has its state already, and skips a step if its `found_inf` is 1.
            clip_norm: The longest gradient.
            average: Of the weights.
            fused: The kernels that compute the objective's model, if they do. Their key is set before each step.
        """
        self._fused = fused
        self._objective, self._precision, self._optimizer = objective, precision, optimizer
        self._clip_norm, self._average = clip_norm, average
        self._learning = [parameter for parameter in objective.parameters() if parameter.requires_grad]
        changed = [*self._learning, *objective.buffers(), *(average.tensors.values() if average is not None else ())]
        changed += [tensor for state in optimizer.state.values() for tensor in state.values()]
        self._graph = CudaGraph(self._compute, kept=changed)

    def __call__(self, batch: Batch, key: int, step: int) -> tuple[Sums, Tensor]:
        """Make the step with this number, at the learning rates of the optimizer's groups.

        Returns:
            The sums of the batch, and the gradient's length, which the next step overwrites.
        """
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        share = 0.0 if self._average is None else self._average.blend_weight(step)
        images, *targets = self._objective.inputs(batch, key)
        keys = () if self._fused is None or self._fused.key is None else (self._fused.key,)
        numbers = send_to_device(torch.tensor([*rates, share]), images.device)
        sums, norm = self._graph(images, numbers, *keys, *targets)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate  # capturing the graph replaces it with a tensor
        return {name: pair.clone() for name, pair in sums.items()}, norm

    def _compute(self, images: Tensor, numbers: Tensor, *targets: Tensor) -> tuple[Sums, Tensor]:
        if self._fused is not None and self._fused.key is not None:
            self._fused.key, targets = targets[0], targets[1:]  # the graph's own tensor, which every replay fills anew
        for parameter in self._learning:
            parameter.grad = None
        # No cache for casts: it would outlive the capture of the graph.
        reduced = self._precision != torch.float32
        with torch.autocast(images.device.type, self._precision, reduced, cache_enabled=False):
            outcome = self._objective.learn(images, *targets)
        outcome.loss.backward()
        norm = clip_gradients(self._learning, self._clip_norm)
        optimizer: Any = self._optimizer
        optimizer.found_inf = 1 - norm.isfinite().float()
        *rates, share = numbers.unbind()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
            # Torch refuses to capture a step without this, and warns about it if nothing is captured.
            group["capturable"] = images.is_cuda and torch.cuda.is_current_stream_capturing()
        optimizer.step()
        if self._average is not None:
            self._average.blend(share * (1 - optimizer.found_inf))
        return outcome.sums, norm


def check_graphs(config: RunConfig, ranks: Ranks, precision: torch.dtype) -> None:
    """Raise a ConfigError if the run's steps cannot be CUDA graphs."""
    for wrong, why in (
        (ranks.device.type != "cuda" or ranks.size > 1, "one GPU"),
        (config.objective.kind != "classification", 'objective.kind = "classification"'),
        (config.optimizer.accumulate > 1, "optimizer.accumulate = 1"),
        (precision == torch.float16, "run.precision bf16 or fp32"),
        (config.run.gradient_checkpointing, "run.gradient_checkpointing = false"),
    ):
        if wrong:
            raise ConfigError(f"run.graphs needs {why}: give that, or run.graphs=false")
