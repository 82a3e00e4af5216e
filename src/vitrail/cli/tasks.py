"""What `vitrail finetune` prints of any task but labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vitrail.cli.train import describe_files, describe_report

if TYPE_CHECKING:
    from vitrail.workflows.finetune_result import TaskResult

MOST_NAMES = 5
"""Names of outputs, and rows of a table, that are printed."""


def describe_task(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a `task` event: what is learned, and from which columns, and what else its values tell."""
    yield f"task: {values['kind']}, {_describe_outputs(values)}; --task and --labels choose others"
    if values["remark"]:
        yield values["remark"]


def _describe_outputs(values: Mapping[str, Any]) -> str:
    names, columns, counts = values["outputs"], values["columns"], values["counts"]
    if not counts:
        answers = ""
        if values["values"] != columns:  # numbers are called as their columns are
            answers = (
                f": {_join(values['values'])}" if len(columns) == 1 else f", {len(values['values'])} values in all"
            )
        return f"{_join(columns)} of {values['images']:,} images{answers}"
    where = f" in the column {columns[0]}" if len(columns) == 1 else ""
    rarest = min(counts, key=counts.__getitem__)
    mean = sum(counts.values()) / max(values["images"], 1)
    return (
        f"{len(names)}{where}: {_join(names)}; {mean:.2g} an image on average, the rarest is {rarest} "
        f"({counts[rarest]:,} of {values['images']:,})"
    )


def _join(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (", …" if len(names) > MOST_NAMES else "")


def describe_task_result(result: TaskResult, report: dict[str, Any], next_step: str) -> Iterator[str]:
    """Yield the measures, the first rows of the tables, the files, and after --quick the line about the next step."""
    from vitrail.workflows.task_measures import describe_estimate

    judged = result.judgement
    if judged is None:
        yield "no images were left to measure the model on"
    else:
        for measure in judged.measures.measures:
            yield f"{measure.name}: {describe_estimate(measure)}"
        yield judged.remark
        for title, rows in result.tables().items():
            yield from _describe_rows(title, [[str(cell) for cell in row] for row in rows])
    if result.config is not None:
        yield from describe_files(result, report)
        return
    yield from describe_report(report)
    yield f"model: {result.weights}"
    yield next_step


def _describe_rows(title: str, rows: list[list[str]]) -> Iterator[str]:
    """Yield a table, a line for each of its first rows."""
    head, *body = rows
    yield f"{title}:"
    for row in body[:MOST_NAMES]:
        yield f"  {row[0]}: " + ", ".join(f"{name} {cell}" for name, cell in zip(head[1:], row[1:], strict=True))
    if len(body) > MOST_NAMES:
        yield f"  and {len(body) - MOST_NAMES:,} more, see measures.json"
