from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vitrail.benchmark import data_path, measure
from vitrail.fast import timing

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # what compares with other libraries is a script


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # where reports without a file go
    monkeypatch.setitem(timing.SIDES, "cpu", 32)
    monkeypatch.setattr(measure, "TURN_SECONDS", 0.001)
    monkeypatch.setattr(data_path, "SUPPLY_SECONDS", 0.001)
    monkeypatch.setattr(measure.gc, "collect", lambda: 0)  # slower than the rest, with all those libraries loaded
