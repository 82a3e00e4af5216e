"""Learn the targets of a task: whatever the task, its outputs come from the model's head and its loss from the task."""

from __future__ import annotations

from torch import Tensor, nn

from vitrail.data.loader import Batch
from vitrail.errors import ConfigError
from vitrail.model.base import ImageModel
from vitrail.objectives.base import Objective, Outcome, evaluation_outcome
from vitrail.objectives.metrics import Sums, sum_and_count
from vitrail.system.precision import widen
from vitrail.tasks.task import Task


class Supervised(Objective):
    """Trains a model on the targets of a task; measures the loss and what the task counts.

    A count that is NaN, such as an error where the true number is not known, is left out.
    """

    def __init__(self, model: ImageModel, task: Task) -> None:
        """Take a model whose head has the outputs of the task.

        Raises:
            ConfigError: the head has another number of outputs.
        """
        super().__init__(model)
        if model.num_classes != len(task.output_names):
            raise ConfigError(
                f"the model's head has {model.num_classes} outputs and the task {len(task.output_names)}: call "
                "model.give_task(task)"
            )
        self.task = task

    def forward(self, batch: Batch, key: int) -> Outcome:
        """Return the mean loss, and sums of "loss" and of what the task counts. `key` decides what is random."""
        return self.learn(*self.inputs(batch, key)) if self.training else self.evaluate(batch)

    def parts_to_compile(self) -> list[nn.Module]:
        """Return the model, which is called as a whole."""
        return [self.model]

    def inputs(self, batch: Batch, key: int) -> tuple[Tensor, ...]:
        """Return normalised images, then the targets in the order of their names in the batch."""
        self._names = tuple(batch.targets)
        return self.images(batch), *batch.targets.values()

    def learn(self, images: Tensor, *targets: Tensor) -> Outcome:
        """Compute the outcome of a training step from `inputs`."""
        outputs = widen(self.model(images))
        named = dict(zip(self._names, targets, strict=True))
        losses = self.task.compute_losses(outputs, named)
        sums: Sums = {"loss": sum_and_count(losses)}
        for name, values in self.task.count(outputs, named).items():
            sums[name] = sum_and_count(values, ~values.isnan())
        return Outcome(losses.mean(), sums)

    def evaluate(self, batch: Batch) -> Outcome:
        """Compute the outcome of an evaluation batch."""
        outputs = widen(self.model(self.images(batch)))
        sums: Sums = {"loss": sum_and_count(self.task.compute_losses(outputs, batch.targets), batch.mask)}
        for name, values in self.task.count(outputs, batch.targets).items():
            sums[name] = sum_and_count(values, ~values.isnan() & batch.mask.to(values.device))
        return evaluation_outcome(sums)
