"""The command line, run in this process."""

from __future__ import annotations

import pytest

from vitrail import cli


@pytest.fixture
def run(monkeypatch, capsys):
    """Words of a command → exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["vitrail", *arguments])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        told = capsys.readouterr()
        return code, told.out, told.err

    return run
