"""What the task of some data is, in a few numbers: the event `task` of `finetune`."""

from __future__ import annotations

from typing import Any

import numpy as np

from vitrail.data.open import Data, open_training_images
from vitrail.system.results import to_plain
from vitrail.tasks.task import Targets, Task

MOST_COUNTED = 1000
"""Columns of yes and no that are counted."""


def summarise_task(data: Data) -> dict[str, Any]:
    """Return the values of a `task` event: kind, columns, outputs (their names), images, counts and a remark.

    `counts` says for each output how many images of the training data have it, where targets are yes or no; else it is
    empty. `remark` says what else the values tell, such as tags that exclude each other; it may be empty.
    """
    source = open_training_images(data)
    task, targets = source.task, source.targets(0, len(source))
    return {
        "kind": task.kind,
        "columns": list(task.columns),
        "outputs": list(task.output_names),
        "values": list(task.value_names),
        "images": len(source),
        "counts": to_plain(count_outputs(task, targets)),
        "remark": task.describe_values(),
    }


def count_outputs(task: Task, targets: Targets) -> dict[str, int]:
    """Return the number of images with each output, if each is said to be there or not; nothing otherwise."""
    names = task.output_names
    if len(targets) != 1 or len(names) > MOST_COUNTED:
        return {}
    (array,) = targets.values()
    if array.ndim != 2 or array.shape[1] != len(names) or not np.isin(array, (0, 1)).all():
        return {}
    return dict(zip(names, (array > 0).sum(axis=0).tolist(), strict=True))
