"""Events: how a function that takes long tells its caller what happens.

Every such function takes `on_event`, which is called with the kind of an event and its values:

    def on_event(kind, values):
        if kind == "evaluation":
            print(values["step"], values["accuracy"])

    vitrail.finetune("photos/", on_event=on_event)

Values are plain data: numbers, strings, lists and dictionaries. Kinds that several functions send:

    progress      task, done, total: images that a pass over data has done, and all of them
    message       text: a sentence for a person
    training      folder, model, parameters, image_size, training_images, validation_images, can_hold_out, classes,
                  class_names, task, outputs, steps, start_step, is_finished, batch_size, devices, device, precision,
                  computed_by, unused_holdout, fewshot, repeats: training begins, goes on from start_step, or is
                  finished already
    step          step, steps: a training step is done
    train         a training record of metrics.jsonl
    evaluation    an evaluation record of metrics.jsonl
    fewshot       a record of few-shot accuracy of metrics.jsonl
    checkpoint    step: a checkpoint is being saved
    trained       folder, step, steps, why_early: training has ended, finished or not; why before the last step, or None

An exception from `on_event` ends the call; a KeyboardInterrupt during training saves a checkpoint first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vitrail.system.worker_start import leave_worker

OnEvent = Callable[[str, dict[str, Any]], None]
"""Called with the kind of an event and its values."""
Progress = Callable[[int, int], None]
"""Called with the number of images that are done and the number of all images."""


def ignore_event(kind: str, values: dict[str, Any]) -> None:
    """Do nothing: the listener of a caller that wants to hear nothing."""


@contextmanager
def open_listener(on_event: OnEvent | None) -> Iterator[OnEvent]:
    """Yield `on_event`; if it is None, a listener that shows a bar on a terminal or in a notebook, and else nothing.

    An exception from `on_event` leaves the block as it is, even if the block turns errors into others or goes on. A
    worker process that only runs its parent's script again ends here (see vitrail/system/worker_start.py).
    """
    leave_worker()
    if on_event is None:
        from vitrail.system.event_display import EventDisplay

        with EventDisplay() as display:
            yield display
        return
    failures: list[Exception] = []

    def listen(kind: str, values: dict[str, Any]) -> None:
        if failures:
            raise failures[0]
        try:
            on_event(kind, values)
        except Exception as error:
            failures.append(error)
            raise

    try:
        yield listen
    except Exception:
        if failures:
            raise failures[0]  # noqa: B904 (it came first)
        raise


def send_progress(on_event: OnEvent, task: str) -> Progress:
    """Return a function of (done, total) that sends them as `progress` events of a task, such as "features"."""
    return lambda done, total: on_event("progress", {"task": task, "done": done, "total": total})


def send_messages(on_event: OnEvent) -> Callable[[str], None]:
    """Return a function of a text that sends it as a `message` event."""
    return lambda text: on_event("message", {"text": text})
