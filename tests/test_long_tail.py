"""The benchmark of rare classes: the tables on pages are those of the raw results, and the profile is exponential."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("long_tail", ROOT / "benchmarks/long_tail.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["long_tail_cpu", "long_tail_heads_cpu"])
def test_the_tables_are_made_of_the_raw_results(benchmark, tmp_path, name):
    page = tmp_path / "training.md"
    page.write_text((ROOT / "docs/training.md").read_text())
    benchmark.table(RESULTS / f"{name}.jsonl", page)
    assert page.read_text() == (ROOT / "docs/training.md").read_text()


def test_the_runs_of_an_arm_differ_in_seed_and_data_alone():
    lines = [json.loads(line) for line in (RESULTS / "long_tail_cpu.jsonl").read_text().splitlines()]
    assert len({json.dumps(line["settings"]) for line in lines}) == 1
    for line in lines:
        assert line["seed"] == line["data"]["seed"]
        assert line["data"]["choosing"] == 0
        assert line["images"] == 10_000
        assert line["worst_recall"] == min(line["recalls"].values())
        assert line["accuracy"] == pytest.approx(sum(line["recalls"].values()) / 10)  # as many images of every class


def test_the_profile_is_exponential(benchmark):
    counts = benchmark.count_long_tail(5000, 10, 100)
    assert counts == [5000, 2997, 1797, 1077, 646, 387, 232, 139, 83, 50]
    assert benchmark.count_long_tail(7, 3, 1) == [7, 7, 7]
