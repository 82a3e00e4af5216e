"""The runs that exist, for a person who named one that does not."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from pathlib import Path

RUNS_FOLDER = Path("runs")
"""Where runs go unless a folder is named."""
MOST_LISTED = 10
NEAR = 0.6
"""The similarity of names from which one may have been meant for the other."""


def list_runs(wrong: Path) -> tuple[list[Path], bool]:
    """Return the runs beside a path that does not exist, or else in runs/, and whether the first may be meant.

    Those with similar names come first, then the newest.
    """
    folder = wrong.parent if wrong.parent != Path() and wrong.parent.is_dir() else RUNS_FOLDER
    nearness = {run: _compare_names(wrong.name, run.name) for run in _find_runs(folder)}
    runs = sorted(nearness, key=lambda run: (nearness[run] if nearness[run] >= NEAR else 0, _read_time(run)))
    return runs[::-1], bool(runs) and nearness[runs[-1]] >= NEAR


def describe_runs(wrong: Path) -> str:
    """Return a part of a sentence that lists the runs which exist, such as "; these runs exist: runs/a"; or nothing."""
    runs, _ = list_runs(wrong)
    more = f" and {len(runs) - MOST_LISTED} more" if len(runs) > MOST_LISTED else ""
    return f"; these runs exist: {', '.join(map(str, runs[:MOST_LISTED]))}{more}" if runs else ""


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run, finished or not."""
    return (folder / "model" / "config.json").is_file() or (folder / "checkpoints").is_dir()


def _find_runs(folder: Path) -> Iterator[Path]:
    """Yield the runs in a folder, and in its folders that are no runs, such as a suite's."""
    with contextlib.suppress(OSError):
        for child in folder.iterdir():
            if is_run(child):
                yield child
            elif child.is_dir():
                with contextlib.suppress(OSError):
                    yield from (inner for inner in child.iterdir() if is_run(inner))


def _compare_names(wrong: str, name: str) -> float:
    """Return the similarity of two names, or of one and a word of the other, from 0 to 1."""
    wrong, name = wrong.casefold(), name.casefold()
    return max(difflib.SequenceMatcher(None, wrong, part).ratio() for part in (name, *name.split("-")))


def _read_time(run: Path) -> float:
    try:
        return run.stat().st_mtime
    except OSError:
        return 0.0
