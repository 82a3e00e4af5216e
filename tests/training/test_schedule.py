"""The learning rate against closed forms."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.training.schedule import learning_rate

DECAYS = ("cosine", "linear", "none")
decays = st.sampled_from(DECAYS)


@st.composite
def schedules(draw, most: int = 1_000_000_000) -> dict:
    """A schedule with at least one step after its warm-up."""
    steps = draw(st.integers(1, most))
    return {
        "base": draw(st.floats(1e-8, 10.0)),
        "steps": steps,
        "warmup_steps": draw(st.one_of(st.just(0), st.integers(0, steps - 1))),
    }


@settings(deadline=None)
@given(schedules(), decays, st.data())
def test_the_warm_up_is_a_line(schedule, decay, data):
    warmup = schedule["warmup_steps"]
    if not warmup:
        return
    step = data.draw(st.integers(0, warmup - 1))
    expected = Fraction(schedule["base"]) * (step + 1) / warmup
    assert learning_rate(step, **schedule, decay=decay) == pytest.approx(float(expected), rel=1e-14)
    assert learning_rate(0, **schedule, decay=decay) > 0


@settings(deadline=None)
@given(schedules(), decays)
def test_the_first_step_after_the_warm_up_has_the_base_rate(schedule, decay):
    assert learning_rate(schedule["warmup_steps"], **schedule, decay=decay) == schedule["base"]


@settings(deadline=None)
@given(schedules(), st.data())
def test_linear_decay_is_a_line_to_zero(schedule, data):
    steps, warmup = schedule["steps"], schedule["warmup_steps"]
    step = data.draw(st.integers(warmup, steps - 1))
    expected = Fraction(schedule["base"]) * (steps - step) / (steps - warmup)
    assert learning_rate(step, **schedule, decay="linear") == pytest.approx(float(expected), rel=1e-14)


@settings(deadline=None)
@given(schedules(), st.data())
def test_cosine_decay_is_half_a_cosine(schedule, data):
    base, steps, warmup = schedule["base"], schedule["steps"], schedule["warmup_steps"]
    step = data.draw(st.integers(warmup, steps - 1))
    expected = base * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
    assert learning_rate(step, **schedule, decay="cosine") == pytest.approx(expected, abs=base * 1e-15, rel=1e-12)


@settings(deadline=None)
@given(schedules())
def test_without_decay_the_rate_stays(schedule):
    last = learning_rate(schedule["steps"] - 1, **schedule, decay="none")
    assert last == schedule["base"]


@settings(deadline=None)
@given(schedules())
def test_the_end_is_just_above_zero(schedule):
    base, steps = schedule["base"], schedule["steps"]
    length = steps - schedule["warmup_steps"]
    last = {decay: learning_rate(steps - 1, **schedule, decay=decay) for decay in ("linear", "cosine")}
    assert last["linear"] == pytest.approx(base / length, rel=1e-14)
    # 1 − cos x = 2 sin² x/2: the difference itself has no digits left for small x.
    assert last["cosine"] == pytest.approx(base * math.sin(math.pi / (2 * length)) ** 2, rel=1e-12)
    assert min(last.values()) > 0
    for decay in last:
        assert learning_rate(steps, **schedule, decay=decay) == 0  # the step that is not taken


@settings(deadline=None)
@given(schedules(most=300), decays)
def test_up_then_down_and_never_negative(schedule, decay):
    rates = [learning_rate(step, **schedule, decay=decay) for step in range(schedule["steps"])]
    top = schedule["warmup_steps"]
    assert all(0 < rate <= schedule["base"] * (1 + 1e-15) for rate in rates)
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    if decay != "none":
        assert len(set(rates[top:])) == len(rates[top:])


@settings(deadline=None)
@given(schedules(), st.sampled_from(["linear", "cosine"]), st.data())
def test_a_final_rate_is_where_the_decay_ends(schedule, decay, data):
    """As in the released code: final + (base − final) · what is left of the curve."""
    steps, warmup, base = schedule["steps"], schedule["warmup_steps"], schedule["base"]
    final = base * data.draw(st.floats(0, 1))
    step = data.draw(st.integers(warmup, steps - 1))
    curve = learning_rate(step, **{**schedule, "base": 1.0}, decay=decay)
    found = learning_rate(step, **schedule, decay=decay, final=final)
    assert found == pytest.approx(final + (base - final) * curve, rel=1e-12)
    assert learning_rate(steps, **schedule, decay=decay, final=final) == pytest.approx(final, rel=1e-12)
    assert learning_rate(warmup, **schedule, decay=decay, final=final) == pytest.approx(base, rel=1e-12)


def test_the_end_of_the_released_linear_decay():
    """Its last of 20 steps after a warm-up of 10: 1e-5 + (1e-3 − 1e-5) / 10."""
    rate = learning_rate(19, base=1e-3, steps=20, warmup_steps=10, decay="linear", final=1e-5)
    assert rate == pytest.approx(1e-5 + (1e-3 - 1e-5) / 10)
    early = learning_rate(4, base=1e-3, steps=20, warmup_steps=10, decay="linear", final=1e-5)
    assert early == pytest.approx(5e-4)


def test_worked_by_hand():
    def rates(decay: str) -> list[float]:
        return [learning_rate(step, base=8.0, steps=8, warmup_steps=4, decay=decay) for step in range(8)]

    assert rates("linear") == [2, 4, 6, 8, 8, 6, 4, 2]
    assert rates("none") == [2, 4, 6, 8, 8, 8, 8, 8]
    assert rates("cosine") == pytest.approx([2, 4, 6, 8, 8, 4 + 2 * math.sqrt(2), 4, 4 - 2 * math.sqrt(2)])


@pytest.mark.parametrize(
    ("supports", "base"), [((100, 200, 300, 400, 500), 0.003), ((500, 3000, 6000, 9000, 10_000), 1)]
)
def test_a_staircase_is_that_of_bit(supports, base):
    """The released rule, written down again: a tenth after each support; only its warm-up begins at 0."""
    warmup, *falls, steps = supports
    for step in range(warmup, steps):
        expected = base
        for support in falls:
            expected /= 10 if support < step else 1
        found = learning_rate(step, base=base, steps=steps, warmup_steps=warmup, decay="staircase", decay_at=falls)
        assert found == pytest.approx(expected, rel=1e-12)
