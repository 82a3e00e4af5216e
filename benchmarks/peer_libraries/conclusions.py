"""Sentences about our best candidate and the best one of the other libraries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vitrail.benchmark.case import OURS
from vitrail.benchmark.report import SpeedRow, describe_case, describe_precision, group_by_case


def compare_libraries(rows: Iterable[SpeedRow], precision: str) -> list[str]:
    """Compare the libraries in each case: at the plain precision, and at any precision if there are several."""
    lines = []
    for group in group_by_case(rows):
        plain, case = [row for row in group if row.precision == precision], describe_case(group[0])
        lines.append(_compare_best(plain, f"{case}, {precision}: "))
        if len(plain) < len(group):
            lines.append(_compare_best(group, f"{case}, any precision: ", names_precision=True))
    return [line for line in lines if line is not None]


def _compare_best(rows: Sequence[SpeedRow], start: str, names_precision: bool = False) -> str | None:
    ours = [row for row in rows if row.library == OURS]
    theirs = [row for row in rows if row.library != OURS]
    if not ours or not theirs:
        return None
    best, peer = (min(group, key=lambda row: row.median_seconds) for group in (ours, theirs))
    ratio = peer.median_seconds / best.median_seconds
    first, second = (f"{row} ({describe_precision(row)})" if names_precision else str(row) for row in (best, peer))
    return f"{start}{first} is {ratio:.2f}× as fast as the best peer, {second}"


def note_parameters(rows: Sequence[SpeedRow]) -> list[str]:
    """Return notes on peers with a few parameters more or fewer than ours."""
    ours: dict[Any, int] = {row.case: row.parameters for row in rows if row.library == OURS}
    pairs = [(row, ours.get(row.case, row.parameters)) for row in rows]
    notes = [
        f"{row.name}: the model of {row.library} has {row.parameters:,} parameters and ours {own:,}"
        for row, own in pairs
        if row.parameters != own
    ]
    return list(dict.fromkeys(notes))
