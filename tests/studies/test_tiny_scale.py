"""Every study at the tiny scale, on a CPU. Trainings that several studies need are done once."""

from __future__ import annotations

import pytest

import vitrail
from vitrail.studies.catalogue import NAMES, find_study
from vitrail.studies.scales import TINY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("studies")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_study_runs_and_decides(name, folder):
    result = vitrail.study(name, seeds=1, folder=folder, device="cpu", on_event=lambda *_: None)
    assert result.verdict in ("holds here", "does not hold here", "not decided")
    assert result.results.arms == [arm.name for arm in find_study(name).list_arms(TINY)]
    assert (result.folder / "figure.png").stat().st_size > 5000
    assert find_study(name).claim in (result.folder / "page.md").read_text()


@pytest.mark.slow
def test_a_quick_study_decides(tmp_path):
    """One that trains nothing but two arms, in the tests that always run."""
    result = vitrail.study("attention-focus", seeds=2, folder=tmp_path, device="cpu", on_event=lambda *_: None)
    assert [check.outcome for check in result.checks].count("open") <= 2
    centre = result.results.list_values("centre of the image")
    assert centre[0] == centre[1]
