"""The command line, run in this process."""

from __future__ import annotations

import pytest

from commands import runner


@pytest.fixture
def run(monkeypatch, capsys):
    """Words of a command → exit code, stdout, stderr."""
    return runner(monkeypatch, capsys)
