"""The display: the right words at the right time, a bar that nothing runs through, and silence instead of a failure."""

from __future__ import annotations

import io
import itertools
import logging
import os
import re
import sys
import time

import pytest

from vitrail.system.display import Display, describe_values, format_duration, format_flops

VALUES = {"loss": 1.23456, "accuracy": 0.561, "images_per_second": 1234.4, "flops_per_second": 1.2e11, "epoch": 3.0}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


# Words.


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-3, "0s"),
        (45, "45s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (80, "1m20s"),
        (3599, "59m59s"),
        (3599.7, "1h00m"),
        (7530, "2h05m"),
        (86399, "23h59m"),
        (86400 * 3 + 4 * 3600 + 3599, "3d04h"),
        (float("inf"), "?"),
        (float("nan"), "?"),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (0, "0.0 FLOP/s"),
        (12, "12 FLOP/s"),
        (1234, "1.2 kFLOP/s"),
        (9.94e6, "9.9 MFLOP/s"),
        (9.96e6, "10 MFLOP/s"),
        (8.5e11, "850 GFLOP/s"),
        (9.996e11, "1.0 TFLOP/s"),
        (1.2e12, "1.2 TFLOP/s"),
        (6.54e14, "654 TFLOP/s"),
        (2.5e15, "2.5 PFLOP/s"),
        (1.5e21, "1,500 EFLOP/s"),
        (float("nan"), "nan FLOP/s"),
    ],
)
def test_operations(flops, text):
    assert format_flops(flops) == text


def test_values_in_words():
    assert describe_values(VALUES) == ["loss 1.2346", "accuracy 56.1%", "1,234 images/s", "120 GFLOP/s"]
    assert describe_values({"accuracy": None, "loss": 2.0}) == ["loss 2.0000"]
    losses = [float("nan"), float("inf"), 0.0, 0.00012, 15141.25, 1e9]
    assert [describe_values({"loss": loss})[0].split()[1] for loss in losses] == [
        "nan",
        "inf",
        "0.0000",
        "1.200e-04",
        "15141.2500",
        "1.000e+09",
    ]
    assert describe_values({"images_per_second": 1.26}) == ["1.3 images/s"]


# Plain lines.


def test_a_line_for_a_record_and_nothing_on_stdout(capsys, clock):
    with Display(1000, 100, "runs/digits", clock=clock) as display:
        clock.now += 60  # compiling
        display.update(101)
        for step in range(102, 151):
            clock.now += 2
            display.update(step)
        display.update(150, VALUES)
    printed, told = capsys.readouterr()
    assert printed == ""
    title, *between, last = told.splitlines()
    assert title == "runs/digits"
    assert last == "step 150/1000  loss 1.2346  accuracy 56.1%  1,234 images/s  120 GFLOP/s  28m20s left"  # 2 s a step
    assert all(re.fullmatch(r"step \d+/1000(  \d+m\d+s left)?", line) for line in between)


def test_without_records_a_log_is_never_silent_for_ten_seconds(capsys, clock):
    printed_at = []
    with Display(1000, 0, "x", clock=clock) as display:
        capsys.readouterr()
        began = clock.now
        for step in range(1, 101):
            clock.now += 1.7
            display.update(step)
            printed_at += [clock.now] * len(capsys.readouterr().err.splitlines())
    assert printed_at[0] - began <= 4
    assert all(2 < after - before <= 10 for before, after in itertools.pairwise(printed_at))


def test_a_record_is_printed_though_a_step_was_just_before(capsys, clock):
    with Display(1000, 0, "x", clock=clock) as display:
        clock.now += 10
        display.update(49)
        clock.now += 0.5
        display.update(50)
        display.update(50, {"loss": 1.0})
    lines = capsys.readouterr().err.splitlines()[1:]
    assert [line.split("/")[0] for line in lines] == ["step 49", "step 50"]
    assert "loss 1.0000" in lines[1]


def test_a_step_that_a_record_follows_is_printed_once(capsys, clock):
    """With the first record it may be twice: until then, it is unknown when records come."""
    with Display(1000, 0, "x", clock=clock) as display:
        for step in range(1, 7):
            clock.now += 7
            display.update(step)
            if step % 2 == 0:
                display.update(step, {"loss": 1.0})
    steps = [line.split("/")[0] for line in capsys.readouterr().err.splitlines()[1:]]
    assert steps == ["step 1", "step 2", "step 2", "step 3", "step 4", "step 5", "step 6"]


def test_the_rest_of_a_resumed_run_is_reckoned_from_its_own_pace(capsys, clock):
    with Display(1000, 900, "x", clock=clock) as display:
        display.update(901, {"loss": 1.0})  # one step has no pace yet
        clock.now += 30
        display.update(911, {"loss": 1.0})
        clock.now += 267
        display.update(1000, {"loss": 1.0})
    assert [line.split("  ")[2:] for line in capsys.readouterr().err.splitlines()[1:]] == [
        [],
        ["4m27s left"],
        ["took 4m57s"],
    ]


def test_many_records_do_not_flood_a_log(capsys, clock):
    with Display(10_000, 0, "x", clock=clock) as display:
        for step in range(1, 10_001):
            clock.now += 0.01
            display.update(step, {"loss": 1.0})
            if step == 5055:
                display.show_record({"kind": "evaluation", "step": step, "part": "val", "loss": 2.0})
    lines = capsys.readouterr().err.splitlines()
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in lines[1:] if "val" not in line]
    assert (steps[0], steps[-1]) == (1, 10_000)
    assert "step 5055/10000  val  loss 2.0000" in lines
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert min(gaps[:-1]) >= 199
    assert 50 <= len(steps) <= 52


def test_what_a_stopped_run_reached_is_shown(capsys, clock):
    def stopped() -> None:
        with Display(100, 0, "x", clock=clock) as display:
            display.update(1, {"loss": 2.0})
            display.update(2, {"loss": 1.0})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert [line.split("  ")[:2] for line in capsys.readouterr().err.splitlines()[1:]] == [
        ["step 1/100", "loss 2.0000"],
        ["step 2/100", "loss 1.0000"],
    ]


def test_long_lines_are_never_wrapped(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    with Display(10, 0, "x") as display:
        display.print_line("checkpoint [saved] " + "y" * 500)
        display.update(10, VALUES)
    assert [len(line) > 50 for line in capsys.readouterr().err.splitlines()] == [False, True, True]


def test_records_are_shown(capsys, clock):
    with Display(10, 0, "x", clock=clock) as display:
        display.show_record(
            {"kind": "train", "step": 5, "loss": 1.0, "clock": {"seconds": 3.0, "images_per_second": 20.0}}
        )
        clock_of = {"seconds": 63.2, "images_per_second": 500.0}
        display.show_record(
            {"kind": "evaluation", "step": 5, "part": "test", "loss": 1.5, "accuracy": 0.9, "clock": clock_of}
        )
    assert capsys.readouterr().err.splitlines()[1:] == [
        "step 5/10  loss 1.0000  20 images/s",
        "step 5/10  test  loss 1.5000  accuracy 90.0%  in 1m03s",
    ]


def test_every_step_is_cheap():
    with Display(10**6, 0, "x") as display:
        started = time.perf_counter()
        for step in range(100_000):
            display.update(step)
        assert (time.perf_counter() - started) / 100_000 < 20e-6


# A terminal.


def screen(text: str) -> list[str]:
    """What a terminal shows after these bytes: the few controls that a bar needs, one after the other."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\].*?(?:\x1b\\|\x07)|[\s\S]", text):
        if token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token.endswith("A") and token[0] == "\x1b":
            row = max(0, row - int(token[2:-1] or 1))
        elif token == "\x1b[2K":
            lines[row] = ""
        elif token[0] != "\x1b":
            line = lines[row].ljust(column)
            lines[row], column = line[:column] + token + line[column + 1 :], column + 1
        else:
            assert token[-1] in "mhl", f"{token!r} is not understood"
    return [line.rstrip() for line in lines]


@pytest.fixture
def terminal(monkeypatch):
    """Makes stderr a terminal of 100 columns. To be called in a test, because pytest sets its own stream before it."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")

    def begin() -> io.StringIO:
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return begin


def test_the_bar(terminal, clock):
    stderr = terminal()
    with Display(10_000, 0, "runs/digits", screen="terminal", clock=clock) as display:
        for step in range(1, 2502):
            clock.now += 1
            display.update(step)
        display.update(2501, VALUES)
        display.print_line("a [bold]message[/bold] :smile:")
        display._style._live.refresh()
        message, first, second, *_ = screen(stderr.getvalue())
        assert message == "a [bold]message[/bold] :smile:"
        assert re.fullmatch(r"runs/digits  ━+[╸╺]?━+  2,501/10,000  41m41s  2h04m left", first)
        assert len(first) <= 100
        assert second == "loss 1.2346  accuracy 56.1%  1,234 images/s  120 GFLOP/s"
        display.update(10_000)
    shown = screen(stderr.getvalue())
    assert re.fullmatch(r"runs/digits  ━+  10,000/10,000  took 41m41s", shown[1])
    assert shown[3:] == [""]  # what is printed next begins below
    assert stderr.getvalue().count("\x1b[?25l") == stderr.getvalue().count("\x1b[?25h") == 1  # the cursor is back


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
def test_the_bar_fits(terminal, clock, monkeypatch, columns):
    stderr = terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    with Display(300_000, 0, "runs/a-name-that-goes-on-and-on", screen="terminal", clock=clock) as display:
        display.update(1, VALUES)
        clock.now += 100
        display.update(200)
    shown = screen(stderr.getvalue())
    assert len(shown) == 3
    assert max(map(len, shown)) <= columns
    assert ("loss 1.2346" in shown[1]) == (columns >= 12)


def test_the_bar_starts_where_the_run_goes_on(terminal):
    stderr = terminal()
    with Display(1000, 400, "x", screen="terminal"):
        pass
    assert "  400/1,000  0s" in screen(stderr.getvalue())[0]


def test_whatever_is_written_goes_above_the_bar(terminal):
    stderr = terminal()
    handler = logging.StreamHandler()  # holds the stream that was there before the bar
    logger = logging.getLogger("vitrail")
    logger.addHandler(handler)
    try:
        with Display(10, 0, "bar", screen="terminal") as display:
            display.update(3, {"loss": 1.0})
            for number in range(3):
                logger.warning("beware %d", number)
            sys.stderr.write("torch says ")
            sys.stderr.write("something\nand ")
            display._style._live.refresh()
        assert handler.stream is stderr is sys.stderr
        logger.warning("afterwards")
    finally:
        logger.removeHandler(handler)
    *above, bar, values, last, end = screen(stderr.getvalue())
    assert above == ["beware 0", "beware 1", "beware 2", "torch says something", "and"]
    assert bar.startswith("bar  ")
    assert (values, last, end) == ("loss 1.0000", "afterwards", "")


def test_warnings_without_any_handler_too(terminal, monkeypatch):
    stderr = terminal()
    logger = logging.getLogger("vitrail")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [])
    with Display(10, 0, "bar", screen="terminal"):
        logger.warning("beware")
    assert screen(stderr.getvalue())[0] == "beware"


def test_stdout_is_left_alone_unless_it_is_the_same_terminal(terminal, monkeypatch):
    stderr = terminal()

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, through in ((io.StringIO(), True), (Terminal(), False)):
        monkeypatch.setattr(sys, "stdout", stream)
        with Display(10, 0, "bar", screen="terminal"):
            print("a result")
        assert sys.stdout is stream
        assert (stream.getvalue() == "a result\n") == through
        assert ("a result" in screen(stderr.getvalue())) != through


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # newer Pythons warn of what is tested here
def test_a_forked_process_writes_past_the_bar(tmp_path, monkeypatch):
    """Even if it was forked while the bar was being drawn, and all of the bar's locks are taken for ever."""
    with (tmp_path / "stderr").open("w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with Display(10, 0, "bar", screen="terminal") as display:
            live = display._style._live
            with live._lock, live.console._lock:
                child = os.fork()
                if not child:
                    sys.stderr.write("from the child\n")
                    sys.stderr.flush()
                    os._exit(0)
                deadline = time.monotonic() + 20
                while os.waitpid(child, os.WNOHANG) == (0, 0):
                    assert time.monotonic() < deadline, "the child hangs"
                    time.sleep(0.01)
    assert "from the child" in (tmp_path / "stderr").read_text(encoding="utf-8")


def test_what_is_a_terminal(terminal, monkeypatch):
    for term, bar in (("xterm", True), ("dumb", False)):
        stderr = terminal()
        stderr.isatty = lambda: True
        monkeypatch.setenv("TERM", term)
        with Display(10, 0, "x"):
            pass
        assert ("\x1b[" in stderr.getvalue()) == bar


# Streams that fail.


@pytest.mark.parametrize("screen", ["terminal", "none"])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("I/O operation on closed file")])
def test_a_stream_that_is_gone_does_not_end_the_run(monkeypatch, screen, error):
    class Gone(io.StringIO):
        gone = False

        def write(self, text):
            if self.gone:
                raise error
            return super().write(text)

    stream = Gone()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("threading.excepthook", lambda _: None)  # of the thread that draws
    with Display(10, 0, "x", screen) as display:
        display.update(1, {"loss": 1.0})
        stream.gone = True
        display.print_line("lost")
        assert sys.stderr is stream
        stream.gone = False
        display.print_line("too late")
        display.update(10, {"loss": 1.0})
    assert "lost" not in stream.getvalue()
    assert "too late" not in stream.getvalue()


@pytest.mark.parametrize("screen", ["terminal", "none"])
def test_a_stream_that_was_never_there(monkeypatch, screen):
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        with Display(10, 0, "x", screen) as display:
            display.update(1, {"loss": 1.0})
            display.print_line("y")
        assert sys.stderr is stream
