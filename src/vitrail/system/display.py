"""Show a run while it trains: as a bar on a terminal or in a notebook, as plain lines on stderr elsewhere.

A display never ends a run: if nothing can be written any more, because a terminal was closed or a pipe has lost its
reader, it falls silent.
"""

from __future__ import annotations

import html
import io
import logging
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal, Self, TextIO

NOTEBOOK_SECONDS = 0.3
"""Shortest time between two states of a bar in a notebook."""
EVERY = 2.0
"""Least number of seconds from one plain line to the next."""
FIRST_SECONDS, SILENT_SECONDS = 2.0, 5.0
"""A plain line without a new record comes after the first, or follows another line after the second. So a log is not
silent for ten seconds, unless a single step or batch takes as long."""
Screen = Literal["terminal", "notebook", "none"]
SHOWN = ("loss", "accuracy", "images_per_second", "flops_per_second")
"""The values that are shown, in their order."""


def find_screen() -> Screen:
    """Return where a person can see a bar: on a terminal, in a notebook, or nowhere."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and hasattr(shell, "kernel"):
        return "notebook"
    is_terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return "terminal" if is_terminal else "none"


class Display:
    """A run on the screen, from `with` to the end of its block.

    Args:
        total_steps: Steps of the whole run.
        start_step: The step that it starts from.
        title: The name of the run.
        screen: Where it is shown; found out if left out.
        clock: Returns seconds since any moment.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int,
        title: str,
        screen: Screen | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps, self.start_step, self.title = total_steps, start_step, title
        self._screen, self._clock = screen, clock
        self._pace = Pace(total_steps, start_step, clock)
        self._style: DisplayStyle | None = None
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        self._pace = Pace(self.total_steps, self.start_step, self._clock)
        if sys.stderr is not None:
            self._attempt(self._open)
        return self

    def __exit__(self, *error: object) -> None:
        self._attempt(self._opened.close)
        self._style = None

    def update(self, step: int, values: Mapping[str, float] | None = None) -> None:
        """Move on to a step that is done. `values` are those of a record; only SHOWN are shown."""
        if self._style is None:
            return
        self._pace.update(step, values)
        self._attempt(self._style.update if values else self._style.show_step)

    def print_line(self, text: str) -> None:
        """Print a message above the bar."""
        style = self._style
        if style is not None:
            self._attempt(lambda: style.print_line(text))

    def show_pass(self, task: str, done: int, total: int) -> None:
        """Show how far a pass over images has come, such as an evaluation, while no step is computed."""
        if self._style is None:
            return
        self._pace.note = "" if done >= total else f"{task} {done:,}/{total:,}"
        self._attempt(self._style.show_step)

    def show_record(self, record: Mapping[str, Any]) -> None:
        """Show a record of metrics.jsonl: a training record moves the bar, any other is printed as a line."""
        clock = record.get("clock", {})
        if record["kind"] == "train":
            self.update(record["step"], {**record, **clock})
            return
        took = [f"in {format_duration(clock['seconds'])}"] if "seconds" in clock else []
        self.print_line(
            "  ".join([f"step {record['step']}/{self.total_steps}", record["part"], *describe_values(record), *took])
        )

    def _open(self) -> None:
        screen = self._screen or find_screen()
        if screen == "notebook":
            self._style = NotebookDisplay(self._pace, self.title)
        elif screen == "terminal":
            self._style = ProgressDisplay(self._pace, self.title)
        else:
            self._style = PlainLines(self._pace, self.title, sys.stderr)
        self._opened.callback(self._style.close)
        if screen == "terminal":
            self._opened.enter_context(print_above_bar(self.print_line))

    def _attempt(self, action: Callable[[], None]) -> None:
        """Run an action, and stop displaying if it fails. A closed stream raises a ValueError."""
        try:
            action()
        except (OSError, ValueError):
            self._style = None
            with suppress(OSError, ValueError):
                self._opened.close()


class Pace:
    """How far a run has come, and how long the rest takes at the speed since this start."""

    def __init__(self, total_steps: int, start_step: int, clock: Callable[[], float]) -> None:
        self.total_steps, self.step = total_steps, start_step
        self.values: dict[str, float] = {}
        self.note = ""
        """What happens between two steps."""
        self._clock, self._started = clock, clock()
        self._first: tuple[int, float] | None = None

    def update(self, step: int, values: Mapping[str, float] | None) -> None:
        self.step = step
        if self._first is None:
            self._first = step, self._clock()  # timed from here, because the first step may also compile
        if values:
            self.values = {**self.values, **values}  # a new dictionary: another thread may be reading the old one

    @property
    def elapsed(self) -> float:
        """Seconds since this start."""
        return self._clock() - self._started

    @property
    def left(self) -> float | None:
        """Seconds to the end, or None while they are not known."""
        if self._first is None or self.step <= self._first[0] or self.step >= self.total_steps:
            return None
        step, then = self._first
        return (self.total_steps - self.step) * (self._clock() - then) / (self.step - step)

    def describe_time(self) -> list[str]:
        """Return `1m20s left`, if that is known, or `took 1m20s` at the end."""
        if self.step >= self.total_steps:
            return [f"took {format_duration(self.elapsed)}"]
        return [f"{format_duration(left)} left"] if (left := self.left) is not None else []


class DisplayStyle(ABC):
    """A way to show a run."""

    @abstractmethod
    def update(self) -> None:
        """Show the new values of the pace."""

    @abstractmethod
    def show_step(self) -> None:
        """Show the step or the note of the pace, whose values are those of an earlier step."""

    @abstractmethod
    def print_line(self, text: str) -> None:
        """Print a message on lines of its own."""

    @abstractmethod
    def close(self) -> None:
        """End the display, whether the run has finished or failed."""


class PlainLines(DisplayStyle):
    """Plain lines, one for each record, but not so many that they flood a log; and one every few seconds between."""

    def __init__(self, pace: Pace, title: str, stream: TextIO) -> None:
        self._pace, self._stream = pace, stream
        self._record_at, self._line_at = -math.inf, FIRST_SECONDS - SILENT_SECONDS
        self._pending = False
        self._last_record = self._next_record = 0
        self.print_line(title)

    def update(self) -> None:
        """Print the first record, the last, and between them one every two seconds."""
        self._pending, step = True, self._pace.step
        self._last_record, self._next_record = step, 2 * step - self._last_record
        if self._pace.elapsed - self._record_at >= EVERY or self._pace.step >= self._pace.total_steps:
            self._print_record()

    def show_step(self) -> None:
        """Print the step if no step has been printed for some seconds, and none of the regular records will follow."""
        if self._pace.elapsed - self._line_at >= SILENT_SECONDS and self._pace.step != self._next_record:
            self._print([])

    def print_line(self, text: str) -> None:
        """Write the line in one piece, because other processes may be writing too."""
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Print how far a run came that was stopped."""
        if self._pending:
            self._print_record()

    def _print_record(self) -> None:
        self._record_at, self._pending = self._pace.elapsed, False
        self._print(describe_values(self._pace.values))

    def _print(self, values: Sequence[str]) -> None:
        pace = self._pace
        self._line_at = pace.elapsed
        self.print_line("  ".join([f"step {pace.step}/{pace.total_steps}", *values, *pace.describe_time()]))


class ProgressDisplay(DisplayStyle):
    """Two lines at the bottom of a terminal, which a thread of rich redraws a few times a second."""

    def __init__(self, pace: Pace, title: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self._pace, self._title = pace, title
        self._console = Console(file=sys.stderr, force_terminal=True, force_jupyter=False)
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            # Rich's own redirection would send results from stdout to stderr. And a forked worker that prints would
            # wait forever for a lock that the drawing thread held: see print_above_bar.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)

    def update(self) -> None:
        """Do nothing: rich's thread reads the pace itself."""

    def show_step(self) -> None:
        """Do nothing: rich's thread reads the pace itself."""

    def print_line(self, text: str) -> None:
        """Print the text as it is: brackets are not markup, and the terminal breaks lines."""
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        """Stop redrawing. The bar stays on the screen."""
        self._live.stop()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        pace, bold = self._pace, Text(self._title, style="bold", no_wrap=True, overflow="ellipsis")
        numbers = [f"{pace.step:,}/{pace.total_steps:,}"]
        if pace.step < pace.total_steps:
            numbers.append(format_duration(pace.elapsed))
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        grid.add_column(max_width=max(8, self._console.width // 4))
        grid.add_column(ratio=1)
        grid.add_column()
        bar = ProgressBar(total=pace.total_steps, completed=pace.step)
        grid.add_row(bold, bar, Text("  ".join([*numbers, *pace.describe_time()]), no_wrap=True))
        values = [*describe_values(pace.values), *([pace.note] if pace.note else ())]
        return Group(grid, Text("  ".join(values), no_wrap=True, overflow="ellipsis")) if values else grid


class NotebookArea:
    """A place in a notebook's output whose content can be replaced."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown_at = -math.inf

    def show_bar(self, title: str, done: int, total: int, text: str, lines: Sequence[str] = ()) -> None:
        """Show a bar with a text beside it and lines above it, a few times a second at most."""
        if time.monotonic() - self._shown_at < NOTEBOOK_SECONDS and done < total:
            return
        self._shown_at = time.monotonic()
        above = "".join(f"<div>{html.escape(line)}</div>" for line in lines)
        bar = f'<progress value="{done}" max="{total}" style="width: 18em; vertical-align: middle"></progress>'
        self._show(f"{above}<div>{html.escape(title)} {bar} {done:,}/{total:,} {html.escape(text)}</div>")

    def clear(self) -> None:
        """Leave the place empty."""
        if self._handle is not None:
            self._show("")

    def _show(self, content: str) -> None:
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(content), display_id=True)
        else:
            self._handle.update(HTML(content))


class NotebookDisplay(DisplayStyle):
    """A bar in a notebook's output, with the messages above it."""

    def __init__(self, pace: Pace, title: str) -> None:
        self._pace, self._title, self._area = pace, title, NotebookArea()
        self._lines: list[str] = []

    def update(self) -> None:
        pace = self._pace
        text = "  ".join([*pace.describe_time(), *describe_values(pace.values), *([pace.note] if pace.note else ())])
        self._area.show_bar(self._title, pace.step, pace.total_steps, text, self._lines)

    def show_step(self) -> None:
        self.update()

    def print_line(self, text: str) -> None:
        self._lines.append(text)
        self.update()

    def close(self) -> None:
        """Leave the last state in the output."""
        self.update()


@contextmanager
def print_above_bar(line: Callable[[str], None]) -> Iterator[None]:
    """Send all output of this process through `line` while the block runs, whole lines at a time.

    That is stderr, stdout if it is a terminal too, and handlers of loggers that hold one of these streams.
    """
    before = {"stderr": sys.stderr}
    if sys.stdout is not None and sys.stdout.isatty():
        before["stdout"] = sys.stdout
    above = {name: StreamAboveBar(stream, line) for name, stream in before.items()}
    moved = []
    for handler in [*logging.getLogger().handlers, *logging.getLogger("vitrail").handlers]:
        for name, stream in before.items():
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                moved.append((handler, stream))
                handler.setStream(above[name])
    for name, stream in above.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in above.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])
            stream.finish()
        for handler, stream in moved:
            handler.setStream(stream)


class StreamAboveBar(io.TextIOBase):
    """A stream whose lines appear above the bar. In a forked process, which has no bar, it is the stream itself."""

    def __init__(self, stream: TextIO, line: Callable[[str], None]) -> None:
        self._stream, self._line, self._process = stream, line, os.getpid()
        self._rest = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Print whole lines; an incomplete one waits for its end."""
        if os.getpid() != self._process:
            return self._stream.write(text)
        *whole, self._rest = (self._rest + text).split("\n")
        if whole:
            self._line("\n".join(whole))
        return len(text)

    def finish(self) -> None:
        """Print an incomplete last line."""
        if self._rest:
            self.write("\n")

    def flush(self) -> None:
        """Flush in a forked process only: here, the bar would tear half a line."""
        if os.getpid() != self._process:
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def describe_values(values: Mapping[str, Any]) -> list[str]:
    """Return the known values as text: `loss 1.2345`, `accuracy 56.1%`, `1,234 images/s`, `1.2 TFLOP/s`."""
    forms = {"loss": _loss, "accuracy": _accuracy, "images_per_second": _images, "flops_per_second": format_flops}
    return [forms[name](values[name]) for name in SHOWN if values.get(name) is not None]


def format_flops(flops: float) -> str:
    """Return operations per second with two or three digits: `1.2 TFLOP/s`, `850 GFLOP/s`."""
    if not math.isfinite(flops):
        return f"{flops} FLOP/s"
    for unit in ("", "k", "M", "G", "T", "P"):
        if abs(flops) < 999.5:
            return f"{_short(flops)} {unit}FLOP/s"
        flops /= 1000
    return f"{_short(flops)} EFLOP/s"


def format_duration(seconds: float) -> str:
    """Return a duration as `45s`, `1m20s`, `2h05m` or `3d04h`."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def _loss(value: float) -> str:
    plain = not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e5
    return f"loss {value:.4f}" if plain else f"loss {value:.3e}"


def _accuracy(value: float) -> str:
    return f"accuracy {value:.1%}"


def _images(value: float) -> str:
    return f"{_short(value)} images/s"


def _short(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 9.95 else f"{value:,.0f}"
