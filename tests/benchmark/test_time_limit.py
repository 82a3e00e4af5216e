"""A benchmark ends within two minutes unless it is to be thorough, and says what it left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benched import CPU, CUDA, Clock, tiny

from vitrail.benchmark import bench as benching
from vitrail.benchmark import measure as measuring
from vitrail.benchmark import time_limit
from vitrail.benchmark.bench import SpeedOptions, bench
from vitrail.benchmark.case import BuiltCandidate, Candidate
from vitrail.benchmark.measure import MeasureOptions, measure_case
from vitrail.benchmark.time_limit import DEFAULT_SECONDS, FEWEST_STEPS, TimeLimit
from vitrail.model.variants import SIZES, Size


class QuickProduct:
    flops = 100

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __call__(self) -> None:
        self.clock.time += 0.01


@pytest.fixture
def clock():
    return Clock()


def test_the_first_case_always_begins(clock):
    limit = TimeLimit(10, clock)
    clock.time = 1000
    assert limit.begins(tiny())
    assert not limit.begins(tiny())


def test_what_is_expected_to_end_too_late_does_not_begin(clock):
    limit, case = TimeLimit(10, clock), tiny()
    assert limit.begins(case)
    limit.note_speed(FEWEST_STEPS * case.flops / 6)  # so it takes 6 seconds
    clock.time = 4
    assert limit.begins(case)
    assert not limit.begins(tiny(batch=2 * case.batch))
    clock.time = 4.1
    assert not limit.begins(case)
    assert limit.begins(tiny("loader"))


def test_time_for_kernels_is_reserved_on_a_gpu(clock):
    limit, case = TimeLimit(time_limit.BUILD_SECONDS["cuda"] + 5, clock), replace(tiny(), device=CUDA)
    assert limit.begins(case)
    clock.time = 6
    assert limit.begins(case)
    assert not limit.begins(case, needs_build=True)
    assert limit.begins(tiny(), needs_build=True)


def test_no_limit(clock):
    limit = TimeLimit(None, clock)
    limit.note_speed(1e-9)
    clock.time = 1e9
    assert limit.begins(tiny())


@pytest.mark.parametrize(
    ("options", "seconds", "modes_on_a_gpu"),
    [
        ({}, DEFAULT_SECONDS, ("eager",)),
        ({"thorough": True}, None, ("eager", "compiled")),
        ({"thorough": True, "compiles": False}, None, ("eager",)),
        ({"compiles": True}, None, ("eager", "compiled")),
        ({"autotune": True}, None, ("eager", "compiled", "autotuned")),
    ],
    ids=str,
)
def test_only_what_is_asked_for_takes_long(options, seconds, modes_on_a_gpu):
    assert SpeedOptions(**options).seconds == seconds
    assert SpeedOptions(**options).modes(CUDA) == modes_on_a_gpu
    assert SpeedOptions(thorough=True).modes(CPU) == ("eager",)


def test_candidates_and_rounds_that_would_end_too_late_are_left_out(clock, monkeypatch):
    """Every step takes ten seconds, so a candidate takes fifty: three calls, one that is timed, and a turn."""
    case = tiny("training")

    def candidates(case, batch, model, modes, plain):
        def step():
            clock.time += 10
            return model(batch.images)

        for name in "abc":
            yield Candidate("vitrail", name, lambda: BuiltCandidate(step, 1))

    monkeypatch.setattr(measuring, "our_candidates", candidates)
    monkeypatch.setattr(measuring, "ReferenceProduct", lambda device, dtype: QuickProduct(clock))
    options = MeasureOptions(rounds=5, clock=clock, limit=TimeLimit(DEFAULT_SECONDS, clock))
    found = measure_case(case, options)
    assert [row.way for row in found.rows] == ["a", "b"]
    assert [(each.library, each.way) for each in found.missing] == [("vitrail", "c"), ("4 of 5 rounds", "")]
    assert all("--thorough" in each.reason for each in found.missing)
    assert all(len(row.seconds) == 1 for row in found.rows)
    assert clock.time <= 120
    unlimited = measure_case(case, MeasureOptions(rounds=5, clock=clock))
    assert [len(row.seconds) for row in unlimited.rows] == [5, 5, 5]
    assert not unlimited.missing


def test_cases_for_which_there_is_no_time_are_named(clock, monkeypatch):
    monkeypatch.setitem(SIZES, "Ti", Size(depth=2, width=32, mlp_dim=64, num_heads=2))
    plain = benching.measure_case

    def measure(case, options):
        found = plain(case, options)
        clock.time += 100
        return found

    monkeypatch.setattr(benching, "measure_case", measure)
    monkeypatch.setattr(benching, "TimeLimit", lambda seconds: TimeLimit(seconds, clock))
    options = {"size": 32, "batch": 2, "rounds": 1, "device": "cpu", "on_event": lambda kind, values: None}
    report = bench("Ti/16", **options)
    assert {row.what for row in report.rows} == {"inference", "latency"}
    (left_out,) = (each for each in report.missing if "--thorough" in each.reason)
    assert "training" in left_out.where
    assert report.measured is None
    thorough = bench("Ti/16", **options, thorough=True)
    assert {row.what for row in thorough.rows} == {"inference", "latency", "training"}
    assert not [each for each in thorough.missing if "--thorough" in each.reason]
