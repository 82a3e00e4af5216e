"""docs/reliability.md: its tables are those of the raw results, and what it says of them holds."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from scipy.stats import beta

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/reliability.md").read_text()


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("reliability_benchmark", ROOT / "benchmarks/reliability.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(benchmark):
    return json.loads(benchmark.RESULTS.read_text())


def test_the_tables_are_made_of_the_raw_results(benchmark, results):
    assert benchmark.write_page(results, PAGE) == PAGE, "run python benchmarks/reliability.py page"


def test_sets_cover_what_was_asked_for(results):
    shipped = {row["coverage"]: row for row in results["sets"] if "shipped" in row["score"]}
    assert 0.94 <= shipped[0.95]["reached"] <= 0.96
    for row in results["sets"]:
        assert shipped[row["coverage"]]["size"] <= row["size"]


def test_the_chosen_score_is_near_the_best_of_the_known_ones(benchmark, results):
    aurocs = {(row["score"], row["data"]): row["auroc"] for row in results["unknown"]}
    chooser, chosen = results["chosen_on"], results["chosen"]
    assert chooser not in ("flowers", "digits")
    assert chosen == max(benchmark.CHOSEN_FROM, key=lambda kind: aurocs[kind, chooser])
    for data in ("flowers", "digits"):
        published = ("softmax", "energy", "direction")
        assert aurocs[chosen, data] >= max(aurocs[kind, data] for kind in published) - 0.005


@pytest.mark.parametrize(("images", "words"), [(1000, "93.6 and 96.3%"), (10_000, "94.6 and 95.4%")])
def test_how_far_the_coverage_of_one_calibration_strays(images, words):
    left = (images + 1) // 20
    low, high = beta(images + 1 - left, left).interval(0.95)
    assert f"{100 * low:.1f} and {100 * high:.1f}%" == words
    assert words in PAGE
