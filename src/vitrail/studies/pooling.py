"""Figure 9: average pooling is as good as the class token, if it gets a learning rate of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.studies.results import StudyResults
from vitrail.studies.scales import Scale
from vitrail.studies.study import Arm, Measured, Study
from vitrail.studies.verdict import Check, check_equal, check_greater

if TYPE_CHECKING:
    from vitrail.studies.workbench import Workbench


LOWER = 3e-4 / 8e-4
"""Figure 9 has the learning rates 8e-4 and 3e-4."""
CLASS, AVERAGE = "class token", "average"
WITHIN = 1.0
"""Differences below this many points count as none."""


def list_arms(scale: Scale) -> list[Arm]:
    rate = scale.pretraining["optimizer"]["learning_rate"]
    arms = []
    for name, pool in ((CLASS, "class"), (AVERAGE, "average")):
        for which, factor in (("higher", 1.0), ("lower", LOWER)):
            change = {"model.pool": pool, "optimizer.learning_rate": rate * factor}
            # The arm with the scale's own settings has none, so that other studies can share its training.
            settings = {key: value for key, value in change.items() if value not in ("class", rate)}
            arms.append(Arm(f"{name}, {which} rate", settings, {"learning_rate": rate * factor}))
    return arms


def measure(workbench: Workbench, arm: Arm) -> Measured:
    trained = workbench.pretrain(arm.settings)
    return {"fewshot": workbench.score_fewshot(trained.model), "validation": trained.validation}


def list_checks(results: StudyResults) -> list[Check]:
    deviation = results.pool_deviation()
    token, same, own = (
        results.list_values(f"{CLASS}, higher rate"),
        results.list_values(f"{AVERAGE}, higher rate"),
        results.list_values(f"{AVERAGE}, lower rate"),
    )
    return [
        check_equal(
            "the average at the lower rate is as good as the class token at the higher",
            own,
            token,
            WITHIN,
            deviation=deviation,
        ),
        check_greater("the average is better at the lower rate than at the higher", own, same, deviation=deviation),
    ]


STUDY = Study(
    name="pooling",
    title="Class token or average",
    claim="Average pooling is as good as the class token, but needs another learning rate.",
    where="Figure 9, appendix D.3",
    list_arms=list_arms,
    measure=measure,
    metric="fewshot",
    unit="few-shot accuracy, %",
    rule=f"Average pooling at the lower rate is within {WITHIN:g} point of the class token at the higher rate, and "
    "better than average pooling at the higher rate.",
    list_checks=list_checks,
    limits="Two learning rates in the ratio of Figure 9 are compared; the best rate at this scale may lie elsewhere.",
    paper=(
        ("class token at 8e-4 and average at 3e-4", "about equal"),
        ("average at 8e-4", "clearly worse"),
        ("measured", "ImageNet 5-shot accuracy over the epochs of pre-training"),
    ),
)
