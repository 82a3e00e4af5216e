"""A step's gradients as one CUDA graph (`run.graphs`): the same kernels, started all at once."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.data.loader import Batch
from vitrail.errors import ConfigError
from vitrail.fast.captured import Captured
from vitrail.metrics import Sums
from vitrail.objectives.classification import Classification
from vitrail.train.config import RunConfig
from vitrail.train.distributed import Ranks


class RecordedLearning:
    """Gradients of whole batches, one like the other. What is random about a batch is decided before."""

    def __init__(self, objective: Classification, precision: torch.dtype) -> None:
        self._objective, self._precision = objective, precision
        self._learning = [parameter for parameter in objective.parameters() if parameter.requires_grad]
        self._captured = Captured(self._compute, kept=list(objective.buffers()))
        self._gradients: list[Tensor | None] | None = None

    def __call__(self, batch: Batch, key: int) -> Sums:
        """Put a batch's gradients in their places."""
        sums = self._captured(*self._objective.inputs(batch, key))
        if self._gradients is None:  # where the recording has put them, and every replay puts them again
            self._gradients = [parameter.grad for parameter in self._learning]
        for parameter, gradient in zip(self._learning, self._gradients, strict=True):
            parameter.grad = gradient
        return {name: pair.clone() for name, pair in sums.items()}

    def _compute(self, *inputs: Tensor) -> Sums:
        for parameter in self._learning:
            parameter.grad = None
        # Casts are not kept from one product to the next: they would be kept beyond the recording.
        with torch.autocast("cuda", self._precision, self._precision != torch.float32, cache_enabled=False):
            outcome = self._objective.learn(*inputs)
        outcome.loss.backward()
        return outcome.sums


def check_graphs(config: RunConfig, ranks: Ranks, precision: torch.dtype) -> None:
    """Refuse what cannot be recorded."""
    for wrong, why in (
        (ranks.device.type != "cuda" or ranks.size > 1, "one GPU"),
        (config.objective.kind != "classification", 'objective.kind = "classification"'),
        (config.optimizer.accumulate > 1, "optimizer.accumulate = 1"),
        (precision == torch.float16, "run.precision bf16 or fp32"),
        (config.run.gradient_checkpointing, "run.gradient_checkpointing = false"),
    ):
        if wrong:
            raise ConfigError(f"run.graphs needs {why}: leave it out, or change that")
