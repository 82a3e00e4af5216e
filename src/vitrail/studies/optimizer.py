"""Appendix D.1: ResNets that are pre-trained with Adam transfer better than with SGD."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.studies.results import StudyResults
from vitrail.studies.scales import Scale
from vitrail.studies.study import Arm, Measured, Study
from vitrail.studies.verdict import Check, check_greater

if TYPE_CHECKING:
    from vitrail.studies.workbench import Workbench


RATES = {"Adam": (1e-3, 3e-3), "SGD": (0.1, 0.3)}
"""The learning rates of each; the one with the better held-out accuracy while pre-training is taken."""
DECAY = {"Adam": 0.1, "SGD": 1e-4}
"""Weight decay: PyTorch's AdamW multiplies it by the learning rate too, and SGD adds it to the gradient."""


def list_arms(scale: Scale) -> list[Arm]:
    arms = []
    for name, rates in RATES.items():
        for rate in rates:
            settings = {
                "model": dict(scale.models["BiT"]),
                "optimizer.kind": "adamw" if name == "Adam" else "sgd",
                "optimizer.learning_rate": rate,
                "optimizer.weight_decay": DECAY[name],
            }
            arms.append(Arm(f"{name}, rate {rate:g}", settings, {"optimizer": name}, weight=4.0))
    return arms


def measure(workbench: Workbench, arm: Arm) -> Measured:
    trained = workbench.pretrain(arm.settings)
    return {
        "accuracy": workbench.score_test(workbench.finetune(trained).model),
        "fewshot": workbench.score_fewshot(trained.model),
        "validation": trained.validation,
    }


def choose_arm(results: StudyResults, optimizer: str) -> str:
    """Return the arm of an optimizer whose pre-training was best on held-out images."""
    arms = [arm for arm in results.arms if results.get_fact(arm, "optimizer") == optimizer]
    return max(arms, key=lambda arm: results.compute_mean(arm, "validation"))


def list_checks(results: StudyResults) -> list[Check]:
    adam, sgd = choose_arm(results, "Adam"), choose_arm(results, "SGD")
    return [
        check_greater(
            f"pre-training with {adam} transfers better than with {sgd}",
            results.list_values(adam),
            results.list_values(sgd),
            deviation=results.pool_deviation(),
        )
    ]


STUDY = Study(
    name="optimizer",
    title="Adam or SGD for ResNets",
    claim="ResNets that are pre-trained with Adam transfer better than those pre-trained with SGD.",
    where="Appendix D.1, Table 7",
    list_arms=list_arms,
    measure=measure,
    metric="accuracy",
    unit="accuracy after fine-tuning, %",
    rule="Of two learning rates for each optimizer, the one with the better held-out accuracy while pre-training is "
    "taken. With it, Adam is better than SGD after fine-tuning, which uses SGD for both.",
    list_checks=list_checks,
    limits="One ResNet and one data set to transfer to; the paper averages over several of both. "
    "With two learning rates each, the best one may lie outside.",
    paper=(
        ("ResNet50, mean of the data sets", "Adam 89.33, SGD 88.79"),
        ("ResNet152x2", "Adam 94.01, SGD 93.72"),
    ),
)
