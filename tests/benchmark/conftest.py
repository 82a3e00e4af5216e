from __future__ import annotations

import pytest

from vitrail.benchmark import loading, measure
from vitrail.fast import timing


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setitem(timing.SIDES, "cpu", 32)
    monkeypatch.setattr(measure, "TURN_SECONDS", 0.001)
    monkeypatch.setattr(loading, "SUPPLY_SECONDS", 0.001)
    monkeypatch.setattr(measure.gc, "collect", lambda: 0)  # takes longer than the rest, with all those libraries loaded
