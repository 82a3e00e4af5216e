"""Tables for a person at a terminal, lines for a program behind a pipe."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """A table; off a terminal, a heading and one line for each row with tabs between, plain numbers, never wrapped.

    `left`: how many columns at the front are words, set flush left; the others are numbers, set flush right.
    """
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
    speaks = os.environ.get("RANK", "0") == "0"
    for line in lines:
        if speaks:
            print(line, flush=True)
