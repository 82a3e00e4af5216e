"""What a model with another task than one label answers for all images of a data set.

Shapes: N images, B images of a batch, K outputs, V values of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.data.loader import BrokenSample
from vitrail.data.sources.source import Source
from vitrail.errors import WeightsError
from vitrail.inference.batches import InferenceOptions, run_batches
from vitrail.inference.engine import Engine
from vitrail.system.events import Progress
from vitrail.system.ranks import Ranks
from vitrail.tasks.task import Array, Targets, Task, to_tensors


@dataclass(frozen=True)
class AnsweredImages:
    """The model's values and the targets of all images that could be used, in the order of the source."""

    indices: Array
    """(N,) int64: the images' numbers in the source."""
    values: Array
    """(N, V) float64."""
    targets: Targets
    losses: Array
    """(N,) float64."""
    broken: tuple[BrokenSample, ...]
    """Images that could not be used."""

    def __len__(self) -> int:
        return len(self.indices)


def answer_all(
    engine: Engine, source: Source, options: InferenceOptions, ranks: Ranks, progress: Progress | None = None
) -> AnsweredImages:
    """Run the model over all images. Every rank gets all values; they depend on batches and ranks by rounding only."""
    task = engine.task
    # An empty batch first: a rank may get no image at all.
    outputs = [torch.empty(0, len(task.output_names))]
    indices, targets, broken = [torch.empty(0, dtype=torch.int64)], [to_tensors(task.allocate(0))], list[BrokenSample]()
    for batch, output in run_batches(engine, source, options, ranks, progress):
        assert output.logits is not None
        outputs.append(output.logits.cpu()[batch.mask])
        indices.append(batch.indices[batch.mask])
        targets.append({name: each[batch.mask] for name, each in batch.targets.items()})
        broken += batch.broken
    known = {name: torch.cat([each[name] for each in targets]) for name in targets[0]}
    return _merge(ranks.gather(read_outputs(task, torch.cat(outputs), known, torch.cat(indices), tuple(broken))))


def read_outputs(
    task: Task, outputs: Tensor, targets: dict[str, Tensor], indices: Tensor, broken: tuple[BrokenSample, ...] = ()
) -> AnsweredImages:
    """Return what (N, K) outputs answer for images with these targets and numbers.

    Raises:
        WeightsError: the outputs are not finite.
    """
    if not torch.isfinite(outputs).all():
        raise WeightsError("the model's outputs are not finite: its weights are damaged, or the precision is too low")
    return AnsweredImages(
        indices.numpy(),
        task.activate(outputs.double()).numpy(),
        {name: values.numpy() for name, values in targets.items()},
        task.compute_losses(outputs.float(), targets).double().numpy(),
        broken,
    )


def _merge(parts: Sequence[AnsweredImages]) -> AnsweredImages:
    """Return the images of all ranks in the order of the source."""
    indices = np.concatenate([part.indices for part in parts])
    order = np.argsort(indices, kind="stable")
    targets = _concatenate([part.targets for part in parts])
    broken = {each.index: each for part in parts for each in part.broken}
    return AnsweredImages(
        indices[order],
        np.concatenate([part.values for part in parts])[order],
        {name: each[order] for name, each in targets.items()},
        np.concatenate([part.losses for part in parts])[order],
        tuple(broken[index] for index in sorted(broken)),
    )


def _concatenate(parts: Sequence[Targets]) -> Targets:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
