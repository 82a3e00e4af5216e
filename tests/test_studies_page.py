"""The pages of the studies are made from the raw results, and the example on them is the one that runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import studies_page as page  # noqa: E402

from vitrail.studies.catalogue import NAMES, list_studies  # noqa: E402
from vitrail.studies.results import StudyResults  # noqa: E402
from vitrail.studies.scales import SMALL  # noqa: E402
from vitrail.studies.workbench import Workbench  # noqa: E402

RESULTS = page.read_results()


def test_building_again_changes_nothing():
    assert page.find_stale(RESULTS) == [], "run python benchmarks/studies_page.py"


def test_another_number_changes_the_page():
    measured = [results for results in RESULTS if results.rows]
    for results in measured[:1]:
        row = results.rows[0]
        row["measured"][results.study.metric] += 3.0
        try:
            assert f"{results.study.name}.md" in page.find_stale(RESULTS)
        finally:
            row["measured"][results.study.metric] -= 3.0


def test_every_claim_stands_on_the_page():
    index = page.make_index(RESULTS)
    import html

    for study in list_studies():
        assert html.escape(study.claim) in index
    assert index.count('class="claim"') == len(NAMES)


def test_every_study_has_three_seeds_and_a_row_in_the_table():
    table = page.make_summary(RESULTS)
    for results in RESULTS:
        assert results.seeds >= 3
        assert f'href="#{results.study.name}"' in table
        held = [check.outcome for check in results.make_checks()].count("holds")
        assert f"<td>{held} of {len(results.make_checks())}</td>" in table


@pytest.mark.parametrize(
    ("verdicts", "sentence"),
    [
        (["holds here"], "Of 1 claims, 1 holds here."),
        (["holds here"] * 2 + ["does not hold here"], "Of 3 claims, 2 hold here and 1 does not hold."),
        (
            ["not decided", "does not hold here", page.ONE_SEED, "does not hold here"],
            "Of 4 claims, 2 do not hold, 1 is not decided and 1 has one seed so far.",
        ),
    ],
)
def test_verdicts_are_counted_in_a_sentence(verdicts, sentence, monkeypatch):
    waiting = iter(verdicts)
    monkeypatch.setattr(page, "name_verdict", lambda _: next(waiting))
    assert page.count_verdicts(RESULTS[: len(verdicts)]) == sentence


def test_the_page_for_authors_names_what_exists():
    text = (ROOT / "docs/studies/own.md").read_text()
    for owner, kind in (("results", StudyResults), ("workbench", Workbench)):
        names = set(re.findall(rf"`[^`\n]*\b{owner}\.(\w+)\(", text))
        assert names
        assert not {name for name in names if not hasattr(kind, name)}


def test_pages_with_results_are_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for results in RESULTS:
        if results.rows:
            assert f"studies/{results.study.name}.md" in navigation


def test_rows_are_of_the_scale_of_today():
    for path in page.RAW.glob("studies_*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            assert row["scale_digest"] == SMALL.compute_digest()
            assert row["commit"]
            assert row["machine"]["device"]


class TestOwnStudy:
    def test_the_example_on_the_page_is_the_file(self):
        code = re.search(r"```python\n(.*?)```", (ROOT / "docs/studies/own.md").read_text(), re.DOTALL)
        assert code is not None
        assert code.group(1) == (ROOT / "examples/own_study.py").read_text()

    def test_it_is_short(self):
        assert len((ROOT / "examples/own_study.py").read_text().splitlines()) < 60

    @pytest.mark.slow
    def test_it_runs(self, tmp_path, monkeypatch, capsys):
        import runpy

        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(ROOT / "examples/own_study.py"), run_name="__main__")
        assert re.search(
            r"verdict +(holds here|does not hold here|not decided) \(tiny scale, 2 seeds\)", capsys.readouterr().out
        )
        assert len((tmp_path / "runs/studies/tiny/heads/results.jsonl").read_text().splitlines()) == 4
