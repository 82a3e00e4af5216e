"""The first sections of the report for a model with another task than one label: measures, worst answers, tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vitrail.evaluation.report import format_estimate
from vitrail.evaluation.task_report import TaskReport, format_cell
from vitrail.inspection.findings import AnsweredPhoto, TaskScores
from vitrail.inspection.page.inline import encode_picture, escape_text
from vitrail.inspection.page.instruments import format_answer
from vitrail.inspection.page.scores import QUALITY, SMALL, draw_bar
from vitrail.system.results import format_count
from vitrail.tasks.task import Measure

MOST_LINES = 3
"""Lines of an answer below a photo; more if more was chosen."""
MOST_ROWS = 20
"""Rows of a table; the rest opens on a click."""
MOST_LEFT_OUT = 10
"""Images that could not be used, with the reasons."""


def show_measures(scores: TaskScores) -> str:
    """Return the HTML of the first measure, large, of the others below it, and of what was measured."""
    report, (first, *rest) = scores.report, scores.report.measured.measures
    warning = ""
    if report.was_trained_on:
        warning = (
            '<p class="warning">The model has learned from these very images. On new ones it will do worse: measure it '
            "on images that it has never seen.</p>"
        )
    value, low, high = format_estimate(first.estimate, first.is_share)
    bar = draw_bar(first.estimate) if first.is_share else ""
    better = "" if first.more_is_better else "; less is better"
    return f"""<p class="figure"><b>{value}</b> <span>{escape_text(first.name)}</span></p>
<p class="interval">{bar}<span>95% interval {low} to {high}{better}</span></p>
<ul class="bars measures">{"".join(map(_show_measure, rest))}</ul>
<p class="told" dir="auto">{_say_remark(scores)}</p>{warning}{_list_left_out(report)}"""


def _show_measure(measure: Measure) -> str:
    value, low, high = format_estimate(measure.estimate, measure.is_share)
    bar = draw_bar(measure.estimate) if measure.is_share else '<span class="bar none" aria-hidden="true"></span>'
    return (
        f'<li><span class="name" dir="auto">{escape_text(measure.name)}</span><span class="number"><b>{value}</b> '
        f'<span class="of">{low} to {high}</span></span>{bar}</li>'
    )


def _say_remark(scores: TaskScores) -> str:
    remark = scores.remark.strip().rstrip(".")
    return escape_text(f"{remark if remark[:1].isupper() else f'Measured on {remark}'}.")


def _list_left_out(report: TaskReport) -> str:
    if not report.left_out:
        return ""
    lines = [f"{each.image.rsplit('/', 1)[-1]}: {each.reason}" for each in report.left_out[:MOST_LEFT_OUT]]
    items = "".join(f'<li dir="auto">{escape_text(line)}</li>' for line in lines)
    summary = f"{format_count(report.broken, 'image')} could not be used"
    return f'<details><summary>{summary}</summary><ul class="told">{items}</ul></details>'


def show_worst(scores: TaskScores) -> str:
    """Return the HTML of a grid of photos, each with what the model answers and what is true, the worst first."""
    report = scores.report
    if not report.worst:
        return '<p class="absent">No answer is wrong on these images.</p>'
    if not scores.photos:
        return '<p class="absent">None of these images can be shown.</p>'
    words = report.worst_words[:1].upper() + report.worst_words[1:]
    return (
        f'<ul class="photos answers">{"".join(map(_show_photo, scores.photos))}</ul>'
        f'<p class="told">{escape_text(words)}, the worst first.</p>'
    )


def _show_photo(photo: AnsweredPhoto) -> str:
    name, truth = escape_text(photo.name), escape_text(photo.truth)
    small = ' class="small"' if max(photo.pixels.shape[:2]) < SMALL else ""
    picture = f'<img src="{encode_picture(photo.pixels, QUALITY)}" alt="{name}" title="{name}"{small}>'
    chosen = [line for line in photo.answer if line.is_chosen]
    lines = (chosen + [line for line in photo.answer if not line.is_chosen])[: max(MOST_LINES, len(chosen))]
    answer = format_answer(lines)
    return (
        f'<li><span class="photo">{picture}</span><ol class="guesses" aria-label="The model\'s answer">{answer}</ol>'
        f'<span class="truth" dir="auto"><span class="of">true:</span> {truth}</span></li>'
    )


def show_tables(scores: TaskScores) -> str:
    """Return the HTML of the task's tables, such as a row for each tag; of many rows, the rest is folded."""
    tables = scores.report.measured.tables
    return "".join(_show_table(title, head, rows) for title, (head, *rows) in tables.items()) or (
        '<p class="absent">This task has no tables.</p>'
    )


def _show_table(title: str, head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    folded = ""
    if len(rows) > MOST_ROWS:
        folded = (
            f"<details><summary>the other {len(rows) - MOST_ROWS:,} rows</summary>"
            f"{_build_table(head, rows[MOST_ROWS:])}</details>"
        )
    heading = f'<h4 dir="auto">{escape_text(title[:1].upper() + title[1:])}</h4>'
    return f'<div class="measured">{heading}{_build_table(head, rows[:MOST_ROWS])}{folded}</div>'


def _build_table(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    numbers = [all(not isinstance(row[k], str) for row in rows) for k in range(len(head))]
    heads = "".join(
        f'<th scope="col"{_mark_number(is_number)}>{escape_text(str(name))}</th>'
        for name, is_number in zip(head, numbers, strict=True)
    )
    lines = "".join(f"<tr>{''.join(map(_build_cell, row, numbers, range(len(row))))}</tr>" for row in rows)
    return f'<div class="wide-table"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>'


def _build_cell(cell: Any, is_number: bool, column: int) -> str:
    words = cell if isinstance(cell, str) else _format_number(cell)
    if column == 0:
        return f'<th scope="row" dir="auto">{escape_text(words)}</th>'
    return f'<td dir="auto"{_mark_number(is_number)}>{escape_text(words)}</td>'


def _format_number(cell: Any) -> str:
    """Return a number of a table; fractions with three digits, so that a column of them lines up."""
    if isinstance(cell, float) and math.isfinite(cell) and abs(cell) <= 1:
        return f"{cell:.3f}"
    return format_cell(cell)


def _mark_number(is_number: bool) -> str:
    return ' class="number"' if is_number else ""
