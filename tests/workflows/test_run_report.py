"""The report of a finished run: written beside it, and never the reason to lose it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import runs

from vitrail.data.open import open_data
from vitrail.errors import DataError
from vitrail.evaluation.evaluate import score_model
from vitrail.inspection import inspect
from vitrail.inspection.scores import DoubtfulImage, ModelScores
from vitrail.training.run_training import run_training
from vitrail.workflows import run_report
from vitrail.workflows.run_report import STOPPED, write_run_report, write_scored_report


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


@pytest.fixture
def without_figures(monkeypatch):
    """Figures are not drawn, for that takes the longest."""
    monkeypatch.setattr(inspect, "draw_findings", lambda *given: {})


@pytest.mark.slow
def test_every_finished_run_has_its_report(finished, events, listen):
    result = write_run_report(finished, on_event=listen)
    assert result.report == result.folder / "report.html"
    assert events[-1] == ("report", {"folder": str(result.folder), "path": str(result.report), "problem": ""})
    assert {kind for kind, _ in events[:-1]} == {"progress"}
    page = result.report.read_text()
    assert "validated on" in page, "its own images"
    assert 'id="curves"' in page
    assert f"{result.accuracy.value:.1%}</b> <span>right" in page
    assert page.index('id="accuracy"') < page.index('id="mistakes"') < page.index('id="attention"')
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


def test_scores_that_are_given_are_shown(finished, listen, without_figures):
    source = open_data("digits", "val")
    report, scored = score_model(finished.model, source)
    scores = ModelScores(report, scored, "Digits that nobody has seen", (DoubtfulImage(3, "quattro", "nove", 0.87),))
    page = write_run_report(finished, scores=scores, on_event=listen).report.read_text()
    assert "Digits that nobody has seen." in page
    assert page.count("quattro") == page.count("nove") == 2, "as text, and for those who do not see the picture"
    assert "87%" in page


def test_a_run_that_cannot_be_scored_has_the_rest_of_its_report(finished, events, listen, monkeypatch, without_figures):
    def fail(*given, **others):
        raise DataError("nothing to score")

    monkeypatch.setattr(run_report, "score_images", fail)
    page = write_run_report(finished, on_event=listen).report.read_text()
    assert 'id="accuracy"' not in page
    assert 'id="attention"' in page
    assert [values["text"] for kind, values in events if kind == "message"] == [
        "the report is without the accuracy: nothing to score"
    ]


def test_a_classifier_without_a_run_has_a_report_too(finished, tmp_path, listen, without_figures):
    report, scored = score_model(finished.model, open_data("digits", "val"), names=("m", "digits", "val"))
    scores = ModelScores(report, scored, f"{report.images} digits, each guessed by a head that was fitted without it")
    path = write_scored_report(finished.model, "<quick>", tmp_path / "quick", scores, on_event=listen)
    assert path == tmp_path / "quick" / "report.html"
    page = path.read_text()
    assert "Inside &lt;quick&gt;" in page
    assert scores.remark in page
    assert 'id="curves"' not in page
    assert str(tmp_path) not in page
