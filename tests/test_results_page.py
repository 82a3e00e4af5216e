"""The tables and figures of the results pages are made from the raw results."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import results_page as page  # noqa: E402
from results_raw import RESULTS  # noqa: E402

from vitrail.recipes import find_recipe  # noqa: E402

RAW = page.Raw()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The raw results, to be changed."""
    shutil.copytree(RESULTS, tmp_path / "results")
    return tmp_path / "results"


def test_building_again_changes_nothing():
    assert page.find_stale(RAW) == [], "run python benchmarks/results_page.py"


def test_every_table_stands_on_a_page_and_every_figure_is_shown():
    pages = "".join((ROOT / name).read_text() for name in page.PAGES)
    assert sorted(name for _, name, _ in page.MARKED.findall(pages)) == sorted(page.TABLES)
    assert sorted(re.findall(r"\(images/(.*?)\)", pages)) == sorted(page.make_figures(RAW))


@pytest.mark.parametrize(
    ("file", "old", "new", "pages"),
    [
        (
            "small_h200.jsonl",
            '"accuracy": 0.5375',
            '"accuracy": 0.5475',
            ["docs/small-data.md", "docs/images/small-data-changes.svg"],
        ),
        ("pane_h200.jsonl", '"accuracy": 0.6041', '"accuracy": 0.6141', ["docs/results.md", "docs/small-data.md"]),
        ("pane_evaluation.json", "0.6037", "0.6137", ["docs/results.md"]),
        ("pane_fewshot_flowers102.json", "0.7484737484737485", "0.75", ["docs/results.md"]),
        ("literature.json", "91.38", "91.48", ["docs/results.md"]),
    ],
)
def test_another_number_in_the_raw_results_is_found(copy, file, old, new, pages):
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    assert set(pages) <= set(page.find_stale(page.Raw(copy)))


def test_another_table_on_the_page_is_found(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks/RESULTS.md", tmp_path / "benchmarks")
    text = (tmp_path / "docs/results.md").read_text()
    (tmp_path / "docs/results.md").write_text(text.replace("93.99", "94.99"))
    assert page.find_stale(RAW, tmp_path) == ["docs/results.md"]


def test_weights_are_counted_as_they_were_measured():
    lines = (RESULTS / "cifar10_on_device_h200.jsonl").read_text().splitlines()
    params = {record["name"]: record["params"] for record in map(json.loads, lines) if record["kind"] == "speed"}
    assert page.SCRATCH["lite4"][1].weights == params["lite4"]
    assert page.SCRATCH["stem4"][1].weights == params["stem2"]  # strides and patches make no weights


def test_recipes_expect_what_was_measured():
    runs = {
        "cifar10-scratch": "cifar10-scratch",
        "cifar10-stem": "cifar10-stem",
        "tiny-imagenet": "pane",
        "tiny-imagenet-stem": "tiny-imagenet-stem",
        "tiny-imagenet-wide": "tiny-imagenet-wide",
        "transfer-small": "pane-to-cifar10",
        "transfer-wide": "wide-to-cifar10",
    }
    for recipe, name in runs.items():
        run = RAW.runs[name]
        assert find_recipe(recipe).expected.startswith(f"{run.top1:.2f} ")
        assert find_recipe(recipe).time.startswith(f"{run.seconds:.0f} s ")
        assert find_recipe(recipe).steps == run.step
    assert f"{RAW.runs['pane-again'].top1:.2f}" in find_recipe("tiny-imagenet").expected


def test_a_recipe_run_again_from_its_seed_lands_where_it_did():
    first, again = RAW.runs["pane"], RAW.runs["pane-again"]
    assert (first.about["seed"], first.step, first.about["command"]) == (
        again.about["seed"],
        again.step,
        again.about["command"],
    )
    assert abs(first.top1 - again.top1) <= 0.5


def test_pane_is_as_good_on_a_gpu():
    """The page shows the evaluation on a CPU."""
    here, there = RAW.read("pane_evaluation.json"), RAW.read("pane_evaluation_h200.json")
    for name in ("top1", "top5", "negative_log_likelihood", "calibration_error"):  # "the same to the digits shown"
        assert round(here[name]["value"], 4) == there[name]
