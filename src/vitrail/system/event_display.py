"""Show events on the screen: training as a bar with its values, a pass over images as a bar that disappears.

Where there is no screen, commands print both as plain lines, at least one every ten seconds while events come.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self

from vitrail.system.display import (
    FIRST_SECONDS,
    SILENT_SECONDS,
    Display,
    NotebookArea,
    Screen,
    find_screen,
    format_duration,
)

REDRAW_SECONDS = 0.1
"""Shortest time between two states of a progress bar."""


class EventDisplay:
    """A listener for `on_event`. Use it in a `with` block, which removes what is left of a bar at its end.

    Args:
        plain_lines: print training and passes over images as plain lines to stderr where there is neither a terminal
            nor a notebook. Without them, nothing is shown there.
        has_progress: whether passes over images are shown.
        clock: returns seconds since any moment.
    """

    def __init__(
        self, plain_lines: bool = False, has_progress: bool = True, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._plain_lines, self._has_progress, self._clock = plain_lines, has_progress, clock
        self._screen: Screen = find_screen()
        self._training: Display | None = None
        self._bar: PassBar | None = None
        self._task = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all that is shown. Later events open it again."""
        self._close_bar()
        if self._training is not None:
            self._training.__exit__(None, None, None)
            self._training = None

    def __call__(self, kind: str, values: dict[str, Any]) -> None:
        """Show an event. Kinds that have no place on the screen are ignored."""
        if kind == "progress":
            self._show_progress(values["task"], values["done"], values["total"])
        elif kind == "training":
            self._open_training(values)
        elif kind == "trained":
            if self._training is not None and values.get("why_early"):
                self._training.print_line(values["why_early"])
            self.close()
        elif self._training is not None:
            if kind == "step":
                self._training.update(values["step"])
            elif kind in ("train", "evaluation", "fewshot"):
                self._training.show_record(values)

    def _open_training(self, values: dict[str, Any]) -> None:
        self.close()
        if self._screen == "none" and not self._plain_lines:
            return
        start, folder = values["start_step"], values["folder"]
        self._training = Display(values["steps"], start, folder, self._screen, clock=self._clock)
        self._training.__enter__()
        for line in describe_training(values):
            self._training.print_line(line)

    def _show_progress(self, task: str, done: int, total: int) -> None:
        if not self._has_progress or (self._screen == "none" and not self._plain_lines):
            return
        if self._training is not None and self._screen != "none":
            self._training.show_pass(task, done, total)
            return
        if self._bar is None or self._task != task:
            self._close_bar()
            self._task, self._bar = task, self._open_bar(task)
        self._bar.show(done, total)
        if done >= total:
            self._close_bar()

    def _open_bar(self, task: str) -> PassBar:
        if self._screen == "none":
            return PlainPassLines(task, self._clock)
        return NotebookPassBar(task) if self._screen == "notebook" else TerminalPassBar(task)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class PassBar(Protocol):
    """A bar for one pass over images."""

    def show(self, done: int, total: int) -> None: ...

    def close(self) -> None:
        """Remove the bar."""


class TerminalPassBar:
    def __init__(self, task: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(task, markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # It redraws only on updates: a drawing thread would disturb the start of processes.
        self._progress = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
        self._task, self._drawn_at = self._progress.add_task(task, total=None), 0.0
        self._progress.start()

    def show(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)
        if time.monotonic() - self._drawn_at > REDRAW_SECONDS:
            self._progress.refresh()
            self._drawn_at = time.monotonic()

    def close(self) -> None:
        self._progress.stop()


class NotebookPassBar:
    def __init__(self, task: str) -> None:
        self._area, self._task, self._started = NotebookArea(), task, time.monotonic()

    def show(self, done: int, total: int) -> None:
        seconds = time.monotonic() - self._started
        left = f"{format_duration(seconds / done * (total - done))} left" if done else ""
        self._area.show_bar(self._task, done, total, left)

    def close(self) -> None:
        self._area.clear()


class PlainPassLines:
    """Lines about a pass for a log: the first after a few seconds, so that short passes print nothing."""

    def __init__(self, task: str, clock: Callable[[], float]) -> None:
        self._task, self._clock, self._started = task, clock, clock()
        self._first_done: int | None = None
        """What was done before this pass began: of features, those from an earlier call."""
        self._printed_at: float | None = None

    def show(self, done: int, total: int) -> None:
        now, self._first_done = self._clock(), done if self._first_done is None else self._first_done
        due = self._started + FIRST_SECONDS if self._printed_at is None else self._printed_at + SILENT_SECONDS
        if done >= total:
            if self._printed_at is not None:
                self._print(done, total, f"took {format_duration(now - self._started)}")
        elif now >= due:
            self._printed_at = now
            new = done - self._first_done
            left = f"{format_duration((now - self._started) / new * (total - done))} left" if new else ""
            self._print(done, total, left)

    def close(self) -> None:
        """Do nothing: lines stay."""

    def _print(self, done: int, total: int, time_text: str) -> None:
        parts = [f"{done:,} of {total:,}", *([time_text] if time_text else ())]
        with suppress(OSError, ValueError):  # if nobody reads any more, the work goes on
            if sys.stderr is not None:
                print(f"{self._task}: {', '.join(parts)}", file=sys.stderr, flush=True)


def describe_training(values: dict[str, Any]) -> list[str]:
    """Return what is about to be trained, from the values of a `training` event, in a few lines."""
    validation = values["validation_images"]
    if validation is None:
        hint = " (data.holdout=0.1 would set some aside)" if values["can_hold_out"] else ""
        on = f"none to validate on{hint}"
    else:
        on = f"{validation:,} to validate on"
    repeats = values.get("repeats", 0)
    repeated = f" ({repeats:,} of them repeats of rare classes)" if repeats else ""
    lines = [f"data: {values['training_images']:,} images to train on{repeated}, {on}"]
    if values["unused_holdout"] is not None:
        lines.append(
            f"data.holdout={values['unused_holdout']:g} sets nothing aside, because the data has its own val; "
            "data.validate_on=holdout would hold out a share of train and leave val for a test"
        )
    if (fewshot := values.get("fewshot")) is not None:
        lines.append(
            f"few-shot: {fewshot['shots']} images of each class, {fewshot['drawn']:,} in all draws, and "
            f"{fewshot['scored']:,} to score, every {fewshot['every']:,} steps"
        )
    if values["classes"] is not None:
        names = f", {values['class_names']}" if values["class_names"] else ""
        lines.append(f"classes: {values['classes']}{names}")
    if values.get("task") is not None:
        lines.append(f"task: {values['task']}, {values['outputs']}")
    size = "×".join(map(str, dict.fromkeys(values["image_size"])))  # 224, or 96×160
    lines.append(f"model: {values['model']}, {values['parameters']:,} parameters, images of {size} pixels")
    lines.append(
        f"training: {values['steps']:,} steps of {values['batch_size']} images on {values['devices']} × "
        f"{values['device']}, {values['precision']}, in {values['folder']}"
    )
    lines.append(f"computed by: {values['computed_by']}")
    if values["is_finished"]:
        lines.append("it is finished already: there is nothing left to train")
    elif values["start_step"]:
        lines.append(f"going on from step {values['start_step']:,}")
    return lines
