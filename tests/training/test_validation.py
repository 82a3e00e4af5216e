"""What chooses is not what reports; and when a run ends."""

from __future__ import annotations

import math

import numpy as np
import pytest
import runs
import torch

import vitrail
from vitrail.data.open import open_data
from vitrail.data.sources.source import halve_source
from vitrail.errors import ConfigError
from vitrail.training import loop
from vitrail.training.resolve import resolve
from vitrail.training.run_training import run_training
from vitrail.training.validation import (
    compute_merits,
    estimate_honest_accuracy,
    find_best_evaluation,
    has_stopped_improving,
)


def evaluation(step, first, second, images=10, loss=1.0):
    """A record with the accuracies of both halves."""
    halves = [{"images": images, "accuracy": accuracy, "loss": loss} for accuracy in (first, second)]
    return {"kind": "evaluation", "step": step, "accuracy": (first + second) / 2, "loss": loss, "halves": halves}


RECORDS = [evaluation(1, 0.5, 0.6), evaluation(2, 0.9, 0.4), evaluation(3, 0.6, 0.8)]
"""The first half chooses step 2, the second and both together step 3."""


def config_from(folder, weights, **sections):
    """A run that starts from weights and keeps their head."""
    tree = runs.tree(folder, **sections)
    return resolve({**tree, "model": {"weights": str(weights), "keep_head": True}})


def config(tmp_path, division, **schedule):
    return runs.config(tmp_path, data={"divide_validation": division}, schedule={"result": "best", **schedule})


def test_one_half_chooses_and_the_other_reports(tmp_path):
    honest = estimate_honest_accuracy(RECORDS, config(tmp_path, "halves"))
    assert (honest.accuracy.value, honest.images, honest.is_cross_fitted) == (0.4, 10, False)


def test_few_images_are_cross_fitted(tmp_path):
    """The second half at step 2, which the first chose: 4 of 10; the first at step 3: 6 of 10."""
    honest = estimate_honest_accuracy(RECORDS, config(tmp_path, "cross-fit"))
    assert (honest.accuracy.value, honest.images, honest.is_cross_fitted) == (0.5, 20, True)
    assert max(record["accuracy"] for record in RECORDS) == pytest.approx(0.7), "the chosen value flatters"


def test_without_halves_nothing_is_estimated(tmp_path):
    plain = [{"kind": "evaluation", "step": 1, "accuracy": 0.5, "loss": 1.0}, {"kind": "train", "step": 1}]
    assert estimate_honest_accuracy(plain, config(tmp_path, "no")) is None


def test_the_last_weights_are_chosen_by_nothing(tmp_path):
    assert estimate_honest_accuracy(RECORDS, config(tmp_path, "halves", result="last")) is None


def test_a_half_that_cannot_be_read_is_left_out(tmp_path):
    broken = [evaluation(1, 0.5, math.nan), evaluation(2, 0.75, math.nan)]
    for record in broken:
        record["halves"][1]["images"] = 0
    assert estimate_honest_accuracy(broken, config(tmp_path, "halves")) is None
    assert estimate_honest_accuracy(broken, config(tmp_path, "cross-fit")).images == 10


def test_choosing_by_chance_does_not_flatter(tmp_path):
    """Twenty evaluations that are all coin tosses: the best is far above a half, the estimate is not."""
    rng = np.random.default_rng(0)
    honest, chosen = [], []
    for _ in range(200):
        tosses = rng.binomial(20, 0.5, (20, 2)) / 20
        records = [evaluation(step, *pair, images=20) for step, pair in enumerate(tosses, start=1)]
        chosen.append(max(record["accuracy"] for record in records))
        honest.append(estimate_honest_accuracy(records, config(tmp_path, "cross-fit")).accuracy.value)
    assert np.mean(chosen) > 0.62
    assert np.mean(honest) == pytest.approx(0.5, abs=0.02)


def test_of_equal_accuracies_the_lower_loss_is_better_and_no_number_is_never_the_best():
    pairs = [(math.nan, 0.1), (0.5, 2.0), (0.5, 1.0), (0.5, 1.0), (0.4, 0.1)]
    merits = [compute_merits({"accuracy": a, "loss": loss}, "accuracy")[0] for a, loss in pairs]
    assert find_best_evaluation(merits) == 2
    assert find_best_evaluation(merits[:1]) is None


def test_patience(tmp_path):
    merits = [[0.1], [0.5], [0.4], [0.3], [0.9]]
    patient = config(tmp_path, "cross-fit", patience=2)
    assert find_best_evaluation(merits) == 4
    assert find_best_evaluation(merits, patience=2) == 1
    evaluations = [[merit] for merit in merits]
    assert not has_stopped_improving(evaluations[:3], patient)
    assert has_stopped_improving(evaluations[:4], patient)
    assert not has_stopped_improving(evaluations[:4], config(tmp_path, "cross-fit"))
    # The second half still improves. With cross-fitting its estimate needs the evaluations to come; with halves it may
    # not have a say in when the run ends.
    uneven = [[[0.5], [0.9], [0.1]], [[0.5], [0.8], [0.2]], [[0.5], [0.7], [0.3]]]
    assert not has_stopped_improving(uneven, patient)
    assert has_stopped_improving(uneven, config(tmp_path, "halves", patience=2))


def test_halves_have_every_class_evenly():
    digits = open_data("digits")
    first, second = halve_source(digits)
    assert sorted([*first.indices, *second.indices]) == list(range(len(digits)))
    counts = [np.bincount(half.labels(0, len(half)), minlength=10) for half in (first, second)]
    assert np.abs(counts[0] - counts[1]).max() <= 1
    assert [*halve_source(digits)[0].indices] == [*first.indices]


def test_a_run_measures_both_halves_and_reports_the_second(tmp_path):
    result = run_training(config(tmp_path, "halves", result="best"))
    records = [record for record in runs.records(tmp_path) if record["kind"] == "evaluation"]
    for record in records:
        first, second = record["halves"]
        total = first["images"] + second["images"]
        together = (first["accuracy"] * first["images"] + second["accuracy"] * second["images"]) / total
        assert record["accuracy"] == pytest.approx(together)
    assert result.evaluated == records[0]["halves"][1]["images"]
    best = max(records, key=lambda record: (record["halves"][0]["accuracy"], -record["halves"][0]["loss"]))
    assert result.accuracy.value == pytest.approx(best["halves"][1]["accuracy"])
    assert result.evaluation["accuracy"] == best["accuracy"], "the model is that of the best step"


def test_a_run_ends_when_nothing_improves_and_keeps_the_best(tmp_path, monkeypatch):
    def measure(run, state, loader):
        accuracy = {4: 0.5, 8: 0.75}.get(state.progress.step, 0.25)
        return {"loss": torch.tensor([1.0, 1.0]), "accuracy": torch.tensor([accuracy, 1.0])}

    monkeypatch.setattr(loop, "measure", measure)
    changed = runs.config(tmp_path, schedule={"patience": 2, "result": "best"}, run={"evaluate_every": 4})
    ends = []
    result = run_training(changed, on_event=lambda kind, values: ends.append(values) if kind == "trained" else None)
    assert result.steps == 16, "two evaluations after step 8"
    why = "2 evaluations in a row found nothing better; the weights of step 8 are kept"
    assert ends[0]["why_early"] == f"the training ended after 16 of 20 steps, for {why}"
    assert result.accuracy.value == pytest.approx(0.75, abs=0.005)
    assert vitrail.Run(tmp_path).is_finished
    assert not (tmp_path / "best").exists()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = run_training(changed)
    assert (again.steps, again.accuracy) == (16, result.accuracy), "it is over, and the same command says so"
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_run_ends_when_its_time_is_over(tmp_path):
    ends = []
    config = runs.config(tmp_path, run={"most_seconds": 1e-6})
    result = run_training(config, on_event=lambda kind, values: ends.append(values) if kind == "trained" else None)
    assert ends[0]["why_early"] == "the training ended after 1 of 20 steps, for its time was over"
    assert result.steps == 1
    assert result.accuracy is not None, "it is evaluated and saved all the same"
    assert vitrail.Run(tmp_path).is_finished
    assert run_training(runs.config(tmp_path, run={"most_seconds": 1e-6})).steps == 1


@pytest.mark.slow
def test_the_start_can_be_the_best(tmp_path):
    run_training(runs.config(tmp_path / "first"))
    ruined = {"optimizer": {"learning_rate": 10.0, "clip_norm": None, "averaging": None}}
    changes = {**ruined, "schedule": {"result": "best"}, "run": {"evaluate_start": True}}
    result = run_training(config_from(tmp_path / "second", tmp_path / "first", **changes))
    records = [record for record in runs.records(tmp_path / "second") if record["kind"] == "evaluation"]
    assert records[0]["step"] == 0
    assert records[0]["accuracy"] > records[-1]["accuracy"]
    assert result.evaluation["accuracy"] == records[0]["accuracy"]
    kept, first = vitrail.load(tmp_path / "second").state_dict(), vitrail.load(tmp_path / "first").state_dict()
    assert all((kept[name] == first[name]).all() for name in first)


def test_a_head_for_other_classes_cannot_be_kept(tmp_path):
    vitrail.save(
        vitrail.create_model("Ti/4", image_size=16, in_channels=1, width=32, num_heads=2, depth=1, num_classes=3),
        tmp_path / "three",
    )
    with pytest.raises(ConfigError, match="3 classes"):
        run_training(config_from(tmp_path / "run", tmp_path / "three"))
