"""What the system refuses (a full disk, a closed pipe, too little memory) is one line and an exit code."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from commands import runner
from vitrail.errors import ConfigError, Stopped, WeightsError


def run(words: str) -> subprocess.CompletedProcess[str]:
    """Run vitrail in a shell of its own; `words` may redirect."""
    return subprocess.run(
        ["/bin/sh", "-c", f'"{sys.executable}" -m vitrail {words}'], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("a wrong word"), 2, "a wrong word"),
        (WeightsError("a bad file"), 1, "a bad file"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), 1, "runs/x: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", b"photos"), 1, "photos: Permission denied"),
        (OSError("no reason"), 1, "no reason"),
        (SafetensorError("Error while serializing: I/O error: No space left\nmore"), 1, "No space left"),
        (MemoryError(), 1, "not enough memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), 1, "CUDA out of memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't"), 1, "enough memory"),
        (RuntimeError("PytorchStreamWriter failed writing file data/1: file write failed"), 1, "failed writing"),
    ],
)
def test_an_error_of_the_system_is_one_line(error, code, words, monkeypatch, capsys):
    def app(**_):
        raise error

    monkeypatch.setattr("vitrail.cli.app", app)
    ended, out, err = runner(monkeypatch, capsys)()
    assert (ended, out) == (code, "")
    assert words in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_stopped_run_is_no_error(monkeypatch, capsys):
    def app(**_):
        raise Stopped("stopped: saved")

    monkeypatch.setattr("vitrail.cli.app", app)
    assert runner(monkeypatch, capsys)() == (3, "", "stopped: saved\n")


def test_a_bug_keeps_its_traceback(monkeypatch, capsys):
    def app(**_):
        raise RuntimeError("something of ours")

    monkeypatch.setattr("vitrail.cli.app", app)
    with pytest.raises(RuntimeError, match="something of ours"):
        runner(monkeypatch, capsys)()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output():
    for words in ("--version >/dev/full", "models B/16 >/dev/full"):
        ended = run(words)
        assert ended.returncode == 1
        assert "No space left" in ended.stderr
        assert ended.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs a Unix shell")
def test_standard_streams_that_are_closed():
    ended = run("--version >&-")
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "standard output is closed" in ended.stderr
    assert run("--version <&- 2>&-").returncode == 0
    ended = run("predict - <&-")
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    ended = run("--nonsense 2>&-")
    assert ended.returncode == 2


def test_a_reader_that_went_away_ends_it_quietly():
    end, start = os.pipe()
    os.close(end)
    with os.fdopen(start, "w") as out:
        ended = subprocess.run(
            [sys.executable, "-m", "vitrail", "models", "B/16"], stdout=out, stderr=subprocess.PIPE, timeout=60
        )
    assert (ended.returncode, ended.stderr) == (1, b"")
