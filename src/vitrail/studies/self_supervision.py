"""Sections 4.6 and B.1.2: masked patch prediction is better than nothing, and worse than labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitrail.studies.results import StudyResults
from vitrail.studies.scales import Scale
from vitrail.studies.study import Arm, Measured, Study
from vitrail.studies.verdict import Check, check_greater

if TYPE_CHECKING:
    from vitrail.studies.workbench import Workbench


SCRATCH, SHORT, SUPERVISED = "from scratch", "from scratch, fine-tuning alone", "supervised"
TARGETS = {"mean-colour": "mean colour", "colours-4x4": "4×4 colours", "pixels": "all pixels"}
SHARES = (0.5, 0.15)
PAPERS_CHOICE = "masked patches: mean colour, 50%"
MASKED: dict[str, Any] = {"data.validate_on": "none", "run.graphs": False}
"""Without labels no hits are counted on the images that are held out. A masked step cannot be a CUDA graph."""
FINETUNING_LENGTH = 0.5
"""Steps of fine-tuning, in those of pre-training."""


def list_arms(scale: Scale) -> list[Arm]:
    arms = [Arm(SCRATCH, weight=6.0), Arm(SHORT, weight=0.5), Arm(SUPERVISED, weight=1.5)]
    for share in SHARES:
        for target, name in TARGETS.items():
            objective = {"objective.kind": "masked-patches", "objective.target": target, "objective.corrupted": share}
            arms.append(Arm(f"masked patches: {name}, {share:.0%}", {**objective, **MASKED}, weight=4.0))
    return arms


def measure(workbench: Workbench, arm: Arm) -> Measured:
    """Pre-train and fine-tune; without pre-training, train as long on the labelled images as both take together."""
    scale, length, start = workbench.scale, FINETUNING_LENGTH, None
    settings: dict[str, Any] = {f"optimizer.{name}": value for name, value in scale.pretraining["optimizer"].items()}
    if arm.name in (SCRATCH, SHORT):
        settings["model"] = dict(scale.pretraining["model"])
    else:
        start = workbench.pretrain(arm.settings)
        settings["optimizer.learning_rate"] /= 2  # learned weights are not to be forgotten
    if arm.name == SCRATCH:  # its batches are smaller than those of pre-training
        length += scale.pretraining["data"]["batch_size"] / scale.finetuning["data"]["batch_size"]
    tuned = workbench.finetune(start, {**settings, **scale.scale_steps(length)})
    before = (0.0, 0.0) if start is None else (start.flops, start.seconds)
    return {
        "accuracy": workbench.score_test(tuned.model),
        "petaflops": (before[0] + tuned.flops) / 1e15,
        "seconds": before[1] + tuned.seconds,
    }


def list_checks(results: StudyResults) -> list[Check]:
    deviation = results.pool_deviation()
    scratch, short, masked, labels = (results.list_values(arm) for arm in (SCRATCH, SHORT, PAPERS_CHOICE, SUPERVISED))
    return [
        check_greater(
            "masked patches are better than as much training from scratch", masked, scratch, deviation=deviation
        ),
        check_greater("masked patches are better than fine-tuning alone", masked, short, deviation=deviation),
        check_greater("supervised pre-training is better than masked patches", labels, masked, deviation=deviation),
    ]


STUDY = Study(
    name="self-supervision",
    title="Learning without labels",
    claim="Pre-training by masked patch prediction is better than training from scratch, and worse than pre-training "
    "with labels.",
    where="Section 4.6, appendix B.1.2",
    list_arms=list_arms,
    measure=measure,
    metric="accuracy",
    unit="accuracy after fine-tuning, %",
    rule="Masked patches (mean colour, 50% corrupted) are better than training from scratch, both with as many "
    "operations as pre-training and fine-tuning together and with those of fine-tuning alone; and supervised "
    "pre-training is better than masked patches.",
    list_checks=list_checks,
    limits="All arms but one compute the same number of operations, which is the cost that does not depend on how the "
    "device was shared; the raw results have seconds too. The paper pre-trains for a "
    "million steps, and sees most of the gain after a hundred thousand.",
    paper=(
        ("from scratch, ViT-B/16 on ImageNet", "about 77.9"),
        ("masked patches", "79.9"),
        ("supervised pre-training on ImageNet-21k", "84.0"),
        ("15% instead of 50%, all pixels instead of the mean colour", "slightly worse"),
    ),
    paper_numbers={SCRATCH: "about 77.9", PAPERS_CHOICE: "79.9", SUPERVISED: "84.0"},
)
