"""Events: the caller's function gets them; without one a screen shows a bar, and a log stays empty."""

from __future__ import annotations

import io
import itertools
import sys
import types

import pytest

from vitrail.system.event_display import EventDisplay, describe_training
from vitrail.system.events import open_listener, send_progress

TRAINING = {
    "folder": "runs/x",
    "model": "S/8",
    "parameters": 1234,
    "image_size": [96, 160],
    "training_images": 90,
    "validation_images": None,
    "can_hold_out": True,
    "classes": 2,
    "class_names": "ants, bees",
    "steps": 10,
    "start_step": 4,
    "is_finished": False,
    "batch_size": 8,
    "devices": 1,
    "device": "CPU",
    "precision": "float32",
    "computed_by": "PyTorch; not vitrail's kernels: they are for NVIDIA GPUs",
    "unused_holdout": None,
}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def notebook(monkeypatch):
    """Stands in for a notebook: keeps what is displayed, and what replaced it."""
    shown: list[str] = []

    class Handle:
        def update(self, content):
            shown.append(content.data)

    class HTML:
        def __init__(self, data):
            self.data = data

    def display(content, display_id):
        assert display_id is True
        shown.append(content.data)
        return Handle()

    shell = types.SimpleNamespace(kernel=object())
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    module = types.ModuleType("IPython.display")
    module.HTML, module.display = HTML, display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return shown


def train(listener):
    listener("training", TRAINING)
    for step in range(5, 11):
        listener("step", {"step": step, "steps": 10})
    listener("evaluation", {"kind": "evaluation", "step": 10, "part": "val", "loss": 0.5, "accuracy": 0.75})
    listener("trained", {"folder": "runs/x", "step": 10, "steps": 10})


def test_the_callers_function_gets_every_event():
    events = []
    with open_listener(lambda kind, values: events.append((kind, values))) as listener:
        send_progress(listener, "features")(3, 7)
    assert events == [("progress", {"task": "features", "done": 3, "total": 7})]


def test_without_a_screen_nothing_is_shown(capsys):
    with open_listener(None) as listener:
        train(listener)
        send_progress(listener, "features")(3, 7)
    assert capsys.readouterr() == ("", "")


def test_a_command_writes_lines_into_a_log(capsys):
    with EventDisplay(plain_lines=True) as display:
        train(display)
    out, err = capsys.readouterr()
    assert out == ""
    assert "ants, bees" in err
    assert "96×160" in err
    assert "accuracy 75.0%" in err


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_pass_is_never_silent_for_ten_seconds_in_a_log(capsys):
    clock, printed_at, lines = Clock(), [], []
    with EventDisplay(plain_lines=True, clock=clock) as display:
        progress = send_progress(display, "features")
        for done in range(0, 10_001, 100):
            progress(done, 10_000)
            new = capsys.readouterr().err.splitlines()
            lines += new
            printed_at += [clock.now] * len(new)
            clock.now += 1.3
    assert printed_at[0] - 1000 <= 4
    assert all(2 < after - before <= 10 for before, after in itertools.pairwise(printed_at[:-1]))
    assert lines[0] == "features: 200 of 10,000, 2m07s left"  # 98 batches of 1.3 s
    assert lines[-1] == "features: 10,000 of 10,000, took 2m10s"


def test_a_short_pass_leaves_no_line_in_a_log(capsys):
    clock = Clock()
    with EventDisplay(plain_lines=True, clock=clock) as display:
        for done in (0, 1, 2):
            clock.now += 0.5
            send_progress(display, "features")(done, 2)
    assert capsys.readouterr() == ("", "")


def test_an_evaluation_while_training_is_shown(capsys, notebook, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("vitrail.system.display.NOTEBOOK_SECONDS", 0)

    def evaluate(display):
        display("training", TRAINING)
        for done in range(0, 5):
            send_progress(display, "evaluating")(100 * done, 400)
            clock.now += 3

    with EventDisplay(plain_lines=True, clock=clock) as display:
        evaluate(display)
    assert any("evaluating 0/400" in content for content in notebook)
    assert capsys.readouterr() == ("", "")
    monkeypatch.delitem(sys.modules, "IPython")
    with EventDisplay(plain_lines=True, clock=clock) as display:
        evaluate(display)
    assert "evaluating: 100 of 400, 9s left" in capsys.readouterr().err


def test_a_log_that_nobody_reads_does_not_end_the_work(monkeypatch):
    clock, stream = Clock(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with EventDisplay(plain_lines=True, clock=clock) as display:
        stream.close()
        for done in range(5):
            clock.now += 3
            send_progress(display, "features")(done, 5)


def test_a_terminal_gets_a_bar_that_disappears(monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with open_listener(None) as listener:
        progress = send_progress(listener, "features [a]")
        progress(3, 7)
        progress(7, 7)
    assert "features [a]" in stderr.getvalue()
    assert stderr.getvalue().rstrip().endswith("\x1b[2K")


def test_a_notebook_gets_html(notebook, capsys):
    with open_listener(None) as listener:
        train(listener)
        send_progress(listener, "<i>features</i>")(3, 7)
    assert any('<progress value="10" max="10"' in content for content in notebook)
    assert any("accuracy 75.0%" in content for content in notebook)
    assert any("&lt;i&gt;features" in content for content in notebook)
    assert notebook[-1] == ""  # the bar of a pass does not stay
    assert capsys.readouterr() == ("", "")


def test_an_error_in_the_middle_leaves_no_bar(monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")

    def fail():
        with open_listener(None) as listener:
            listener("training", TRAINING)
            assert sys.stderr is not stderr  # what is written goes above the bar
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert sys.stderr is stderr


def test_what_is_about_to_be_trained():
    text = "\n".join(describe_training(TRAINING))
    assert "data.holdout" in text
    assert "step 4" in text
    assert "computed by: PyTorch; not vitrail's kernels" in text
    assert "has its own val" not in text
    rare = "\n".join(describe_training({**TRAINING, "training_images": 182, "repeats": 58}))
    assert "data: 182 images to train on (58 of them repeats of rare classes), " in rare
    split = "\n".join(describe_training({**TRAINING, "validation_images": 10, "unused_holdout": 0.1}))
    assert "has its own val" in split
    assert "data.holdout=0.1" in split
    assert "finished already" in "\n".join(describe_training({**TRAINING, "is_finished": True}))
