"""A study of your own: does a layer need several attention heads?

    python examples/own_study.py

It trains four small models on handwritten digits, in less than a minute on a laptop, and prints a verdict.
"""

from __future__ import annotations

import vitrail
from vitrail.studies import Arm, Check, Measured, Scale, Study, StudyResults, Workbench, check_greater

ONE, SEVERAL = "one head", "several heads"


def list_arms(scale: Scale) -> list[Arm]:
    """Return what is compared: settings that differ from the scale's pre-training, and nothing else."""
    return [Arm(ONE, {"model.num_heads": 1}), Arm(SEVERAL)]


def measure(workbench: Workbench, arm: Arm) -> Measured:
    """Pre-train one arm with the workbench's seed, and measure what it has learned."""
    trained = workbench.pretrain(arm.settings)
    return {"fewshot": workbench.score_fewshot(trained.model), "validation": trained.validation}


def list_checks(results: StudyResults) -> list[Check]:
    """Return the rule: the claim holds if the 95% interval of every difference is where the claim says."""
    return [check_greater("several heads are better", results.list_values(SEVERAL), results.list_values(ONE))]


STUDY = Study(
    name="heads",
    title="One head or several",
    claim="Several attention heads are better than one head of the same width.",
    where="Vaswani et al., 2017, table 3, row A",
    list_arms=list_arms,
    measure=measure,
    metric="fewshot",
    unit="few-shot accuracy, %",
    rule="The few-shot accuracy with several heads is above that with one head.",
    list_checks=list_checks,
    limits="Two heads instead of one, on 8 × 8 digits.",
    paper=(("one head against eight, translation", "0.9 BLEU worse"),),
)

if __name__ == "__main__":
    result = vitrail.study(STUDY, scale="tiny", seeds=2, folder="runs/studies")
    print(result)
