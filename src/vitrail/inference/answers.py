"""The answer for one image, the same for predict, serve and the page: plain data, lines for people, cells of a table.

Shapes: V values of a task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitrail.inference.engine import FloatArray
from vitrail.tasks.task import AnswerLine, Task


@dataclass(frozen=True)
class Answer:
    """What a model says of one image, whatever its task is."""

    task: str
    """The kind of the task: labels, tags, …"""
    content: dict[str, Any]
    """The answer as plain data; see `Task.answer`."""
    lines: tuple[AnswerLine, ...]
    """The answer as people see it, the most important line first."""
    cells: dict[str, str | float]
    """The answer as columns of a table, the same for all images."""

    def to_dict(self) -> dict[str, Any]:
        """Return the kind of the task, the answer and its lines as plain data for JSON."""
        return {"task": self.task, "answer": self.content, "lines": [line._asdict() for line in self.lines]}

    def to_words(self) -> str:
        """Return the chosen parts in one line, such as "indoor 93.1%, cat 80.4%"; "none" if nothing was chosen."""
        return ", ".join(f"{line.name} {line.text}" for line in self.lines if line.is_chosen) or "none"


def make_answer(task: Task, values: FloatArray, top: int) -> Answer:
    """Return the answer for the values (V,) of one image, with at most about `top` of many possible lines.

    Numbers have the digits of a float32.
    """
    lines = tuple(line._replace(share=_round(line.share)) for line in task.describe(values, top))
    return Answer(task.kind, _round(task.answer(values, top)), lines, _round(task.flatten(values)))


def list_cell_names(task: Task) -> tuple[str, ...]:
    """Return the names of `Answer.cells`, which do not depend on the image."""
    return tuple(task.flatten(task.make_example()))


def _round(data: Any) -> Any:
    """Return plain data whose numbers have nine digits, which tell two float32 apart."""
    if isinstance(data, float):
        return float(f"{data:.9g}")
    if isinstance(data, Mapping):
        return {name: _round(each) for name, each in data.items()}
    return [_round(each) for each in data] if isinstance(data, list | tuple) else data
