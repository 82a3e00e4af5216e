"""The report of a finished run: written beside it, and never the reason to lose it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import runs

from vitrail.inspection import inspect
from vitrail.training.run_training import run_training
from vitrail.workflows.run_report import STOPPED, write_run_report


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on digits."""
    return run_training(runs.config(tmp_path_factory.mktemp("runs") / "digits"))


@pytest.fixture
def events():
    return []


@pytest.fixture
def listen(events):
    return lambda kind, values: events.append((kind, values))


def test_every_finished_run_has_its_report(finished, events, listen):
    result = write_run_report(finished, on_event=listen)
    assert result.report == result.folder / "report.html"
    assert events[-1] == ("report", {"folder": str(result.folder), "path": str(result.report), "problem": ""})
    assert {kind for kind, _ in events[:-1]} == {"progress"}
    page = result.report.read_text()
    assert "validated on" in page, "its own images"
    assert 'id="curves"' in page
    names = {path.name for path in (result.folder / "report_files").iterdir()}
    for name in ("filters-1", "positions", "distance", "rollout", "tokens", "layers", "curves"):
        assert {f"{name}.png", f"{name}.svg"} <= names
        assert {f"{name}.npz", f"{name}.csv"} & names
    assert str(result.folder.parent) not in page, "a report may go to strangers"


def test_a_run_that_wants_none_has_none(finished, events, listen):
    config = finished.config
    without = config.model_copy(update={"run": config.run.model_copy(update={"report": False})})
    assert write_run_report(replace(finished, config=without), on_event=listen).report is None
    assert events == []


def test_of_several_ranks_the_first_reports(finished, events, listen, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert write_run_report(finished, on_event=listen).report is None
    assert events == []


@pytest.mark.parametrize(
    ("error", "problem"), [(RuntimeError("no fonts"), "RuntimeError: no fonts"), (KeyboardInterrupt(), STOPPED)]
)
def test_what_goes_wrong_in_the_report_does_not_spoil_the_run(error, problem, finished, events, listen, monkeypatch):
    def fail(*given, **others):
        raise error

    monkeypatch.setattr(inspect, "draw_findings", fail)
    assert write_run_report(finished, on_event=listen).report is None
    assert events[-1] == ("report", {"folder": str(finished.folder), "path": None, "problem": problem})
