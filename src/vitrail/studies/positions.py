"""Table 8: a model without position embeddings is worse; which kind it has makes no difference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.studies.results import StudyResults
from vitrail.studies.scales import Scale
from vitrail.studies.study import Arm, Measured, Study
from vitrail.studies.verdict import Check, check_equal, check_greater

if TYPE_CHECKING:
    from vitrail.studies.workbench import Workbench


NONE, ONE, TWO, RELATIVE = "none", "one-dimensional", "two-dimensional", "relative"
EVERY_LAYER, SHARED = "one-dimensional, in every layer", "one-dimensional, shared by all layers"
ARMS = {
    NONE: {"model.position": "none"},
    ONE: {},
    TWO: {"model.position": "learned-2d"},
    RELATIVE: {"model.position": "relative"},
    EVERY_LAYER: {"model.position_at": "every-layer"},
    SHARED: {"model.position_at": "shared"},
}
WITHIN = 1.0
"""Differences below this many points count as none; the paper's are 0.3 points at most."""


def list_arms(scale: Scale) -> list[Arm]:
    return [Arm(name, settings) for name, settings in ARMS.items()]


def measure(workbench: Workbench, arm: Arm) -> Measured:
    trained = workbench.pretrain(arm.settings)
    return {"fewshot": workbench.score_fewshot(trained.model), "validation": trained.validation}


def list_checks(results: StudyResults) -> list[Check]:
    plain, deviation = results.list_values(ONE), results.pool_deviation()
    checks = [check_greater("positions help", plain, results.list_values(NONE), deviation=deviation)]
    for name in (TWO, RELATIVE, EVERY_LAYER, SHARED):
        values = results.list_values(name)
        checks.append(check_equal(f"{name} is as good as {ONE}", values, plain, WITHIN, deviation=deviation))
    return checks


STUDY = Study(
    name="positions",
    title="Position embeddings",
    claim="A model without position embeddings is clearly worse, and it makes no difference which kind it has or where "
    "they are added.",
    where="Table 8, appendix D.4",
    list_arms=list_arms,
    measure=measure,
    metric="fewshot",
    unit="few-shot accuracy, %",
    rule=f"One-dimensional embeddings are better than none, and each of the other kinds is within {WITHIN:g} point of "
    "them.",
    list_checks=list_checks,
    limits="The grid has 64 patches instead of 196, so there is less to know about positions, and 16 patches at the "
    "tiny scale.",
    paper=(
        ("measured", "ViT-B/16, ImageNet 5-shot accuracy, %"),
        ("none · one-dimensional · two-dimensional · relative", "61.4 · 64.2 · 64.0 · 64.0"),
        ("in every layer · shared by all layers", "64.0 · 64.3"),
    ),
    paper_numbers={NONE: "61.4", ONE: "64.2", TWO: "64.0", RELATIVE: "64.0", EVERY_LAYER: "64.0", SHARED: "64.3"},
)
