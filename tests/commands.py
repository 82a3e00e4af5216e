"""The command line, run in this process."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from vitrail import cli

Command = Callable[..., tuple[int, str, str]]


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *first: str) -> Command:
    """Words of a command, after `first` → exit code, stdout, stderr.

    Lines about the progress of a pass are not printed: whether there are any depends on the speed of the machine.
    """
    monkeypatch.setattr("vitrail.system.event_display.FIRST_SECONDS", math.inf)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["vitrail", *first, *arguments])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        told = capsys.readouterr()
        return code, told.out, told.err

    return run
