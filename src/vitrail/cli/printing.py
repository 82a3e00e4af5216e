"""Tables for a person at a terminal, lines for a program behind a pipe."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

REDRAWN = 0.1
"""Seconds between two states of a progress bar."""


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """A table; off a terminal, a heading and one line for each row with tabs between, plain numbers, never wrapped.

    `left`: how many columns at the front are words, set flush left; the others are numbers, set flush right. Of several
    ranks the first speaks for all.
    """
    if not _speaks():
        return
    console = Console()
    if not console.is_terminal:
        print("\t".join(columns))
        for row in rows:
            print("\t".join([*row[:left], *(number.replace(",", "") for number in row[left:])]))
        return
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # as it is: rich would read "[docs]" as markup
    console.print(table)


def print_lines(lines: Iterable[str]) -> None:
    """Each as soon as it is there; of several ranks the first speaks for all."""
    for line in lines:
        if _speaks():
            print(line, flush=True)


def tell_of_pane(otherwise: str) -> None:
    """That no model was named, so that it is the one inside the package. On stderr, for stdout may be data.

    `otherwise`: what names another.
    """
    from vitrail.weights.source import PANE, locate

    told = locate(PANE).beside.json("config.json")["architecture"]
    if _speaks():
        facts = f"{told['num_classes']} classes, {told['image_size'][0]} pixels"
        print(f"no model named: using {PANE}, the small one inside vitrail ({facts}); {otherwise}", file=sys.stderr)


def _speaks() -> bool:
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def interruptible(kept: str = "nothing was written") -> Iterator[None]:
    """Ctrl-C ends the command with a word on what there is."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped: {kept}", file=sys.stderr)
        raise typer.Exit(130) from None


@contextmanager
def progress_bar(verb: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr where that is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn(verb), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # It draws itself when it is told something: a thread of its own would be in the way of starting processes.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task, drawn = bar.add_task(verb, total=None), 0.0

        def show(done: int, total: int) -> None:
            nonlocal drawn
            bar.update(task, completed=done, total=total)
            if time.monotonic() - drawn > REDRAWN:
                bar.refresh()
                drawn = time.monotonic()

        yield show
