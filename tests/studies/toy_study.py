"""A study that trains nothing, for tests of what is around a study."""

from __future__ import annotations

from vitrail.errors import TrainingError
from vitrail.studies import Arm, Study, check_greater

BASE, BETTER = "plain", "better"


def list_arms(scale):
    return [Arm(BASE, facts={"level": 10}), Arm(BETTER, facts={"level": 20})]


def measure(workbench, arm):
    return {"score": arm.facts["level"] + 0.1 * workbench.seed}


def list_checks(results):
    return [check_greater("better is better", results.list_values(BETTER), results.list_values(BASE))]


def measure_nothing_twice(broken):
    """Return a measurement that fails for one run while a file exists."""

    def measure_or_fail(workbench, arm):
        if broken.exists() and arm.name == BASE and workbench.seed == 0:
            raise TrainingError("the machine is on fire")
        return measure(workbench, arm)

    return measure_or_fail


def measure_or_die(workbench, arm):
    """End the process in one of the runs, fail in another."""
    import os

    if workbench.seed == 0:
        if arm.name == BASE:
            os._exit(7)
        raise RuntimeError("nobody expected this")
    return measure(workbench, arm)


TOY = Study(
    name="toy",
    title="A toy",
    claim="Better is better.",
    where="nowhere",
    list_arms=list_arms,
    measure=measure,
    metric="score",
    unit="score",
    rule="Better is better.",
    list_checks=list_checks,
    limits="Everything.",
    paper=(("nothing", "0"),),
)
