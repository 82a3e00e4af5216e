"""docs/results.md and docs/small-data.md say what the raw results say."""

from __future__ import annotations

import json
import math
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
from vitrail.training.schedule import learning_rate  # noqa: E402

RAW = page.Raw()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The raw results, to be changed."""
    shutil.copytree(RESULTS, tmp_path / "results")
    return tmp_path / "results"


def test_building_again_changes_nothing():
    assert page.stale(RAW) == [], "python benchmarks/results_page.py makes them anew"


def test_every_table_stands_on_a_page_and_every_figure_is_shown():
    pages = "".join((page.DOCS / name).read_text() for name in page.PAGES)
    assert sorted(name for _, name, _ in page.MARKED.findall(pages)) == sorted(page.TABLES)
    assert sorted(re.findall(r"\(images/(.*?)\)", pages)) == sorted(page.figures(RAW))


@pytest.mark.parametrize(
    ("file", "old", "new", "pages"),
    [
        ("small_h200.jsonl", '"accuracy": 0.5375', '"accuracy": 0.5475', ["small-data.md", "small-data-changes.svg"]),
        ("pane_h200.jsonl", '"accuracy": 0.6041', '"accuracy": 0.6141', ["results.md", "small-data.md"]),
        ("pane_evaluation.json", "0.6037", "0.6137", ["results.md"]),
        ("pane_fewshot_flowers102.json", "0.7484737484737485", "0.75", ["results.md"]),
        ("literature.json", "91.38", "91.48", ["results.md"]),
    ],
)
def test_another_number_in_the_raw_results_is_found(copy, file, old, new, pages):
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    assert set(pages) <= set(page.stale(page.Raw(copy)))


def test_another_table_on_the_page_is_found(tmp_path):
    shutil.copytree(page.DOCS, tmp_path / "docs")
    text = (tmp_path / "docs/results.md").read_text()
    (tmp_path / "docs/results.md").write_text(text.replace("93.99", "94.99"))
    assert page.stale(RAW, tmp_path / "docs") == ["results.md"]


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
    """What is documented is of a CPU."""
    here, there = RAW.read("pane_evaluation.json"), RAW.read("pane_evaluation_h200.json")
    for name in ("top1", "top5", "negative_log_likelihood", "calibration_error"):  # "the same to the digits shown"
        assert round(here[name]["value"], 4) == there[name]


def test_a_weight_is_forgotten_as_the_page_says():
    """Σ of rate · decay over the steps of cifar10-stem, at both decays."""
    recipe, small = find_recipe("cifar10-stem"), " ".join((page.DOCS / "small-data.md").read_text().split())
    optimizer, schedule = (recipe.settings[name] for name in ("optimizer", "schedule"))
    options = {"base": optimizer["learning_rate"], "steps": recipe.steps, "warmup_steps": schedule["warmup_steps"]}
    rates = sum(learning_rate(step, decay=schedule["decay"], **options) for step in range(recipe.steps))
    assert optimizer["weight_decay"] == 0.2
    assert f"our {recipe.steps:,} steps at 1.5e-3 make Σ = {0.05 * rates:.1f}" in small
    assert f"At 0.2 it is {0.2 * rates:.1f}" in small
    assert round(math.exp(-0.05 * rates), 2) == 0.33
    assert round(math.exp(0.2 * rates), -1) == 80


def test_a_recorded_step_is_as_fast_as_the_pages_say():
    """Both nearly alone on the GPU."""
    before = 1e3 * 256 / RAW.runs["cifar10-stem-twice"].speed
    after = RAW.read("training_step_h200.json")["steps"][-1]["milliseconds"]
    results, training = (" ".join((page.DOCS / name).read_text().split()) for name in ("results.md", "training.md"))
    assert f"in steps of {before:.1f} ms" in training
    a_second = f"{round(256e3 / before, -2):,.0f} images a second became {round(256e3 / after, -3):,.0f}"
    assert f"one of 256 images takes {after:.1f} ms: {a_second}" in training
    assert f"`cifar10-stem` {before / after:.1f} times as fast" in results


def test_what_the_prose_says_was_measured():
    """Numbers outside the tables."""
    results, small = (" ".join((page.DOCS / name).read_text().split()) for name in page.PAGES)
    runs = RAW.runs
    gain = runs["pane-to-flowers"].top1 - runs["flowers-scratch"].top1
    assert f"starting from `pane` is worth {gain:.1f} points" in results
    assert f"from the same seed: {runs['pane-again'].top1 - runs['pane'].top1:.2f} points apart" in results
    scratch, stem, decayed = (runs[name] for name in ("cifar10-scratch", "cifar10-stem-less-decay", "cifar10-stem"))
    more = runs["pane-to-cifar10"].top1 - scratch.top1
    assert f"60 epochs to {more:.1f} points more" in results
    gains = [stem.at(8_000) - scratch.at(8_000), stem.top1 - scratch.top1]
    assert f"The convolutional stem, worth {gains[1]:.1f} points from scratch" in results
    assert f"twice instead of once was tried and gave {runs['cifar10-stem-twice'].top1:.2f}; a wider model" in results
    assert f"and a decay of 0.1, {runs['cifar10-stem-wide'].top1:.2f}" in results
    assert f"0.2 instead of 0.05 brought {stem.top1:.2f} to {decayed.top1:.2f}" in results
    assert f"`cifar10-stem` from scratch, {decayed.top1:.2f} by now, is above both" in results
    assert decayed.top1 > max(runs[name].top1 for name in ("pane-to-cifar10", "stem-to-cifar10"))
    wide = runs["wide-to-cifar10"].top1
    assert f"is {wide - runs['pane-to-cifar10'].top1:.1f} points above `pane-to-cifar10`" in results
    assert f"with Muon {gains[0]:.1f} and {gains[1]:.1f}" in small
    assert f"still {gains[1]:.1f} with Muon" in small
    on_tiny = [runs[name].top1 for name in ("tiny-imagenet-stem", "pane", "pane-again")]
    assert (
        "it has {:.1f}% after 80 epochs, where the plain one has {:.1f}% and, run again, {:.1f}%".format(*on_tiny)
        in small
    )
    assert f"ends {stem.top1 - runs['cifar10-stem-twice'].top1:.2f} points lower" in small
    assert f"0.2 instead of 0.05 was worth {decayed.top1 - stem.top1:.1f} points" in small
    apart = [decayed.at(20_000) - stem.at(20_000), decayed.top1 - stem.top1]
    assert "{:.1f} points at step 20,000, {:.1f} at the end".format(*apart) in small
    mixed = [page.percent(run.training[-1]) for run in (decayed, stem)]
    assert "({:.1f}% against {:.1f}% of augmented, mixed ones)".format(*mixed) in small
    for run in (decayed, stem):  # "still turns upwards at the same step"
        losses = dict(run.over_steps("loss"))
        assert min(losses, key=losses.__getitem__) == 20_000
    large, little = runs["tiny-imagenet-wide"], runs["pane"]
    gain = large.top1 - little.top1
    ends = f"{large.evaluations[-1]['loss']:.2f} instead of {little.evaluations[-1]['loss']:.2f}"
    assert f"ends at {page.tenths(large.top1)}%, {gain:.1f} points higher, with a validation loss of {ends}" in small
    assert large.at(16_000) < little.at(16_000)
    assert f"Fine-tuned on CIFAR-10 it comes to {wide:.1f}%" in small
    early, late = (runs["stem4"].at(step) - runs["lite4"].at(step) for step in (8_000, 42_969))
    assert f"the stem was {page.tenths(early)} points ahead at step 8,000 and {late:.1f} at the end" in small
    finer, coarser = (page.tenths(runs[name].at(12_000)) for name in ("stem2", "stem4"))
    assert f"had {finer}% at step 12,000 of 15,625" in small
    assert f"it was {coarser}% at that step" in small
    ahead = runs["short-muon1"].top1 - runs["short-base"].top1
    assert f"the optimiser alone differs, Muon was {ahead:.1f} points ahead" in small
    assert runs["cifar10-scratch"].at(12_000) > runs["lite4"].top1
    training = {record["step"]: page.percent(record) for record in runs["longer-lr2"].training}
    assert f"was {training[1500]:.0f}% after 1,500 steps and {training[8000]:.0f}% after 8,000" in small
    large = runs["s-512"]
    steps = f"had {large.at(3554):.1f}% after 3,554 steps, {large.at(7108):.1f}% after 7,108"
    assert f"{steps}, and with the rate coming down ended at {large.top1:.1f}%" in small
    assert f"{runs['s-256-unmixed'].top1:.1f}% without mixing, {runs['s-256'].top1:.1f}% with it" in small
    pair = [runs[name].speed for name in ("pane", "cifar10-scratch")]
    assert all(round(speed, -2) == 25_900 for speed in pair)
    assert "had 25,900 each, 51,800 together" in small
    fastest = max(record["clock"]["images_per_second"] for record in runs["pane"].training)
    assert f"`pane` had up to {round(fastest, -2):,.0f}" in small
    four = sum(runs[name].speed for name in page.TOGETHER[2:])
    assert f"The four with three others add up to {round(four, -3):,.0f}" in small
    first = [runs[name].training[0]["clock"]["seconds"] for name in page.CHANGES]
    assert f"and {min(first):.0f} to {max(first):.0f} of the short ones" in small
    losses = dict(runs["pane"].over_steps("loss"))
    assert f"The validation loss is lowest at step {min(losses, key=losses.__getitem__):,.0f}" in small
    assert f"on the way to {scratch.top1:.2f}%, and with convolutions first to {decayed.top1:.2f}%" in small
