"""All tasks by their kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.errors import ConfigError, did_you_mean
from vitrail.tasks.labels import Labels
from vitrail.tasks.numbers import Numbers
from vitrail.tasks.tags import Tags
from vitrail.tasks.task import Task

TASKS: dict[str, type[Task]] = {"labels": Labels, "tags": Tags, "numbers": Numbers}
"""Add a new task here; its file says all else."""


def find_task(kind: str) -> type[Task]:
    """Return the class of a kind of task; raise a ConfigError that names the nearest if there is none."""
    if kind not in TASKS:
        raise ConfigError(f"task = {kind!r}{did_you_mean(kind, TASKS) or ':'} there are {', '.join(TASKS)}")
    return TASKS[kind]


def read_task(record: Mapping[str, Any]) -> Task:
    """Return the task that `task.model_dump(mode="json")` described; raise a ConfigError if it describes none."""
    kind = record.get("kind")
    if not isinstance(kind, str):
        raise ConfigError(f"a task has no kind: {sorted(record)}")
    return find_task(kind)(**record)
