"""The rule of every study, on planted results of all three kinds."""

from __future__ import annotations

import math

import pytest
from planted_results import LARGE_NOISE, plant

from vitrail.studies import compute, positions, resolution, self_supervision, shape
from vitrail.studies.attention_focus import CENTRE, TUNED, UNTRAINED
from vitrail.studies.catalogue import NAMES


def data_size(larger_gains, vit_wins):
    def values(arm):
        model, share = arm.facts["model"], arm.facts["share"]
        grown = math.log10(share / 0.03)
        return {
            "BiT": 30 + 5 * grown,
            "ViT": 20 + (15 if vit_wins else 5) * grown,
            "larger ViT": 18 + (25 if larger_gains else 3) * grown,
            "hybrid": 25,
        }[model]

    return values


def compute_planted(advantage, hybrid_early=True):
    """Errors by a power law: BiT's are larger by a factor, and a hybrid's fall more slowly from a lower start."""

    def values(arm):
        family = arm.facts["family"]
        size = {"small": 1.0, "medium": 2.0, "large": 8.0}[arm.name.split(", ")[1]]
        operations = size * {"BiT": 1.2, "hybrid": 1.1, "ViT": 1.0}[family]
        slope = -0.1 if family != "hybrid" else -0.05 if hybrid_early else -0.15
        start = {"BiT": 60 * advantage, "ViT": 60, "hybrid": 56 if hybrid_early else 64}[family]
        error = start * operations**slope
        return {"fewshot": 100 - error, "error": error, "petaflops": operations * 10}

    return values


def by_name(values, default):
    return lambda arm: next((value for name, value in values.items() if arm.name.startswith(name)), default)


def shape_planted(depth, width, patch):
    """Accuracies that grow by so many points for each doubling of the operations."""

    def values(arm):
        gains = {shape.DEPTH: depth, shape.WIDTH: width, shape.PATCH: patch}
        return 40 + gains.get(arm.facts["dimension"], 0) * math.log2(arm.facts["gigaflops"])

    return values


def resolution_planted(slope, others):
    def values(arm):
        return 50 + slope * arm.facts["size"] if arm.facts["table"] == resolution.INTERPOLATED else others

    return values


def distance_planted(growth, nearest, hybrid_nearest):
    def values(arm):
        is_trained, is_hybrid = arm.facts["state"] == "trained", arm.facts["model"] == "hybrid"
        near = 95 if not is_trained else hybrid_nearest if is_hybrid else nearest
        return {"growth": growth if is_trained else 0, "nearest": near, "farthest": 105, "layer 1": 90, "layer 2": 95}

    return values


def optimizer_planted(adam):
    def values(arm):
        is_adam, is_better = arm.facts["optimizer"] == "Adam", arm.name.endswith(("0.001", "0.1"))
        # The rate with the worse held-out accuracy must not decide, however well it transfers.
        return {"accuracy": (adam if is_adam else 50) if is_better else 99, "validation": 40 if is_better else 10}

    return values


HOLDS = {
    "data-size": data_size(larger_gains=True, vit_wins=True),
    "compute": compute_planted(1.3),
    "resolution": resolution_planted(0.3, 52),
    "positions": by_name({positions.NONE: 40}, 50),
    "pooling": by_name({"average, higher": 40}, 50),
    "shape": shape_planted(6, 2, 4),
    "optimizer": optimizer_planted(55),
    "axial": by_name({"axial": 55}, 50),
    "self-supervision": by_name({"from scratch": 40, "supervised": 60}, 50),
    "attention-distance": distance_planted(20, 40, 80),
    "attention-focus": by_name({TUNED: 60, UNTRAINED: 40, CENTRE: 50}, 0),
}
FAILS = {
    "data-size": data_size(larger_gains=True, vit_wins=False),
    "compute": compute_planted(0.8),
    "resolution": resolution_planted(-0.3, 10),
    "positions": by_name({positions.RELATIVE: 40, positions.NONE: 40}, 50),
    "pooling": by_name({"average, lower": 40}, 50),
    "shape": shape_planted(2, 6, 4),
    "optimizer": optimizer_planted(45),
    "axial": by_name({"axial ViT/4": 45, "axial": 55}, 50),
    "self-supervision": by_name({"from scratch": 70, "supervised": 60}, 50),
    "attention-distance": distance_planted(20, 40, 30),
    "attention-focus": by_name({TUNED: 45, UNTRAINED: 40, CENTRE: 50}, 0),
}


def test_every_study_is_planted():
    assert set(HOLDS) == set(FAILS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_claim_that_holds(name):
    results = plant(name, HOLDS[name])
    assert results.decide() == "holds here", results.make_checks()


@pytest.mark.parametrize("name", NAMES)
def test_a_claim_that_does_not_hold(name):
    results = plant(name, FAILS[name])
    assert results.decide() == "does not hold here", results.make_checks()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "compute"])
def test_noise_decides_nothing(name):
    results = plant(name, HOLDS[name], LARGE_NOISE)
    assert results.decide() == "not decided", results.make_checks()


def test_a_noisy_power_law_decides_nothing():
    def values(arm):
        # Errors that jump up and down from size to size fit no line.
        jump = 25 if "medium" in arm.name else 0
        return {**compute_planted(1.05)(arm), "error": 50 + jump}

    assert plant("compute", values, (-5.0, 0.0, 5.0)).decide() == "not decided"


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_never_decides_for_a_claim(name):
    assert plant(name, HOLDS[name], (0.0,)).decide() == "not decided"


def test_families_without_common_compute_decide_nothing():
    def values(arm):
        found = compute_planted(1.3)(arm)
        return {
            **found,
            "petaflops": found["petaflops"] * {"ViT": 1, "hybrid": 100, "BiT": 10_000}[arm.facts["family"]],
        }

    results = plant("compute", values)
    assert {check.outcome for check in results.make_checks()} == {"open"}


def test_power_laws_are_found_again():
    points = {"a": [(x, 50 * x**-0.2) for x in (1, 2, 4, 8)], "b": [(x, 30 * x**-0.1) for x in (2, 4, 8)]}
    lines = compute.fit_power_laws(points)
    assert lines.combine({("slope", "a"): 1}).value == pytest.approx(-0.2)
    assert lines.combine({("slope", "b"): 1}).value == pytest.approx(-0.1)
    assert lines.predict("a", 16).value == pytest.approx(50 * 16**-0.2)


def test_the_intervals_of_power_laws_are_those_of_linear_regression():
    from scipy import stats

    rng = __import__("numpy").random.default_rng(0)
    x = [1.0, 2.0, 4.0, 8.0, 16.0]
    y = [50 * each**-0.2 * math.exp(0.05 * rng.standard_normal()) for each in x]
    lines = compute.fit_power_laws({"a": list(zip(x, y, strict=True))})
    expected = stats.linregress([math.log(each) for each in x], [math.log(each) for each in y])
    reach = stats.t.ppf(0.975, 3) * expected.stderr
    found = lines.combine({("slope", "a"): 1})
    assert found == pytest.approx((expected.slope, expected.slope - reach, expected.slope + reach))


def test_the_length_of_scratch_matches_that_of_pretraining_and_finetuning():
    from vitrail.studies.scales import SCALES

    for scale in SCALES.values():
        ratio = scale.pretraining["data"]["batch_size"] / scale.finetuning["data"]["batch_size"]
        long = scale.scale_steps(self_supervision.FINETUNING_LENGTH + ratio)["schedule.steps"]
        short = scale.scale_steps(self_supervision.FINETUNING_LENGTH)["schedule.steps"]
        images = scale.steps * scale.pretraining["data"]["batch_size"]
        assert (long - short) * scale.finetuning["data"]["batch_size"] == images
