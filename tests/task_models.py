"""Small models of every task, whose answers differ from image to image."""

from __future__ import annotations

import torch

import vitrail
from vitrail.model.base import ImageModel
from vitrail.tasks.attributes import Attributes
from vitrail.tasks.labels import Labels
from vitrail.tasks.levels import Levels
from vitrail.tasks.numbers import Numbers
from vitrail.tasks.tags import Tags
from vitrail.tasks.task import Task

TASKS: dict[str, Task] = {
    "labels": Labels(names=("cat", "dog", "Größe")),
    "tags": Tags(
        names=("cat", "indoor", "Größe", "night"),
        column="tags",
        thresholds=(0.4, 0.6, 0.5, 0.5),
        groups=(("cat", "indoor"),),
    ),
    "numbers": Numbers(names=("age", "price"), means=(40.0, 1e-3), deviations=(12.5, 2e-4)),
    "levels": Levels(names=("poor", "fair", "good", "great"), column="quality"),
    "attributes": Attributes(names=("colour", "shape"), values=(("blue", "red"), ("flat", "long", "round"))),
}
"""A task of each kind."""
ROWS: dict[str, list[dict[str, object]]] = {
    "tags": [{"tags": "cat|night"}, {"tags": "indoor"}, {"tags": "cat|Größe"}, {"tags": ["indoor", "night"]}],
    "numbers": [{"age": 3, "price": 0.001}, {"age": 91, "price": ""}, {"age": 40.5, "price": 2e-3}, {"age": 17}],
    "levels": [{"quality": "poor"}, {"quality": "great"}, {"quality": ""}, {"quality": "fair"}],
    "attributes": [{"colour": "red", "shape": "flat"}, {"colour": "", "shape": "long"}, {"colour": "blue"}, {}],
}
"""Four rows of a table for each, some with cells that are not known."""
OTHERS = sorted(set(TASKS) - {"labels"})
"""All kinds but labels."""
SMALL = {"image_size": 16, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 32, "seed": 0}


@torch.no_grad()
def make_task_model(kind: str, scale: float = 0.3) -> ImageModel:
    """Return a model of a task with noise on every parameter."""
    model = vitrail.create_model("Ti/4", num_classes=0, **SMALL).give_task(TASKS[kind])
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()
