"""Tables for a person at a terminal, lines for a program behind a pipe."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitrail.errors import Stopped
from vitrail.system.events import OnEvent

PRECISION_HELP = "fp32, or faster and less exact: bf16, fp16 and fp8 (GPU), int8 (CPU); auto: what is fastest here."


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, *, goes_on: bool = False
) -> None:
    """Print a table; off a terminal, tab-separated lines with plain numbers. Only the first of several ranks prints.

    Args:
        left: the number of columns at the front that hold words; the others hold numbers and are right-aligned.
        goes_on: whether rows of the same table were printed before, so that lines need no heading.
    """
    if not _is_first_rank():
        return
    console = Console()
    if not console.is_terminal:
        if not goes_on:
            print("\t".join(columns))
        for row in rows:
            print("\t".join([*row[:left], *(number.replace(",", "") for number in row[left:])]), flush=True)
        return
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # as Text, for rich reads "[docs]" in a string as markup
    console.print(table)


def print_lines(lines: Iterable[str]) -> None:
    """Print each line as soon as it arrives. Only the first of several ranks prints."""
    for line in lines:
        if _is_first_rank():
            print(line, flush=True)


def announce_pane(otherwise: str) -> None:
    """Say on stderr that no model was named and pane is used; `otherwise` says how to name another."""
    from vitrail.weights.source import PANE, locate_weights

    architecture = locate_weights(PANE).folder_files.json("config.json")["architecture"]
    if _is_first_rank():
        facts = f"{architecture['num_classes']} classes, {architecture['image_size'][0]} pixels"
        print(f"no model named: using {PANE}, the small one inside vitrail ({facts}); {otherwise}", file=sys.stderr)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def interruptible(remaining: str | Callable[[], str] = "nothing was written") -> Iterator[None]:
    """End the command on Ctrl-C with exit code 130 and a line that says what remains."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped: {remaining if isinstance(remaining, str) else remaining()}", file=sys.stderr)
        raise typer.Exit(130) from None


@contextmanager
def stop_on_sigterm(
    message: str = "stopped while no step was computed: the same command begins, or goes on from its last checkpoint",
) -> Iterator[None]:
    """End a command on SIGTERM with exit code 3 and a message, also before training begins. Training saves first.

    Under torchrun SIGTERM ends a rank at once, as usual: a rank that waits for others would not hear of it.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or os.environ.get("WORLD_SIZE", "1") != "1":
        yield
        return
    owner, before = os.getpid(), signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked worker ends as usual
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        raise Stopped(message)

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def show_events() -> Iterator[OnEvent]:
    """Yield a listener that shows passes over images as bars and prints messages, all on stderr."""
    from vitrail.system.event_display import EventDisplay

    with EventDisplay(plain_lines=True) as display:

        def listen(kind: str, values: dict[str, Any]) -> None:
            display(kind, values)
            if kind == "message":
                print(values["text"], file=sys.stderr)

        yield listen
