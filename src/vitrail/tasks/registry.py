"""All tasks by their kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from vitrail.errors import ConfigError, did_you_mean
from vitrail.tasks.attributes import Attributes
from vitrail.tasks.labels import Labels
from vitrail.tasks.levels import Levels
from vitrail.tasks.numbers import Numbers
from vitrail.tasks.tags import Tags
from vitrail.tasks.task import Task

OwnTask = TypeVar("OwnTask", bound=Task)

TASKS: dict[str, type[Task]] = {
    "labels": Labels,
    "tags": Tags,
    "numbers": Numbers,
    "levels": Levels,
    "attributes": Attributes,
}
"""Add a new task here; its file says all else. One of your own, outside of the package, calls `register_task`."""


def register_task(task: type[OwnTask]) -> type[OwnTask]:
    """Make a class of tasks known by its kind, so that `load` and the config find it. Use it as a decorator.

    Import its file before you load a model that has it.

    Raises:
        ConfigError: the class has no kind, or the kind is taken.
    """
    kind = getattr(task.model_fields.get("kind"), "default", None)
    if not isinstance(kind, str):
        raise ConfigError(
            f'{task.__name__} has no kind: write kind: Literal["counts"] = "counts" with a name of its own'
        )
    known = TASKS.get(kind)
    # A cell of a notebook that runs again defines the same class anew.
    if known is not None and (known.__module__, known.__qualname__) != (task.__module__, task.__qualname__):
        raise ConfigError(f"the kind {kind!r} of {task.__name__} is taken by {known.__name__}: choose another")
    TASKS[kind] = task
    return task


def find_task(kind: str) -> type[Task]:
    """Return the class of a kind of task; raise a ConfigError that names the nearest if there is none."""
    if kind not in TASKS:
        raise ConfigError(
            f"task = {kind!r}{did_you_mean(kind, TASKS) or ':'} there are {', '.join(TASKS)}; if it is a task of your "
            "own, first import its file, which calls vitrail.tasks.registry.register_task"
        )
    return TASKS[kind]


def read_task(record: Mapping[str, Any]) -> Task:
    """Return the task that `task.model_dump(mode="json")` described; raise a ConfigError if it describes none."""
    kind = record.get("kind")
    if not isinstance(kind, str):
        raise ConfigError(f"a task has no kind: {sorted(record)}")
    return find_task(kind)(**record)
