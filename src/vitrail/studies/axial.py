"""Appendix D.6: axial attention beats plain attention, at more compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.model.cost import compute_cost
from vitrail.model.variants import make_architecture
from vitrail.studies.results import StudyResults
from vitrail.studies.scales import Scale
from vitrail.studies.study import Arm, Measured, Study
from vitrail.studies.verdict import Check, check_greater

if TYPE_CHECKING:
    from vitrail.studies.workbench import Workbench


def list_arms(scale: Scale) -> list[Arm]:
    """Return plain and axial models with small and large patches; all pool by averages, as axial ones must."""
    arms = []
    for patch in (scale.patch_size, 2 * scale.patch_size):
        for kind, block in (("ViT", "plain"), ("axial ViT", "axial")):
            section = {**scale.pretraining["model"], "name": f"Ti/{patch}", "pool": "average", "block": block}
            cost = compute_cost(make_architecture(**section))
            facts = {"gigaflops": cost.flops / 1e9, "parameters": cost.parameters}
            arms.append(Arm(f"{kind}/{patch}", {"model": section}, facts, cost.flops / 3e8))
    return arms


def measure(workbench: Workbench, arm: Arm) -> Measured:
    trained = workbench.pretrain(arm.settings)
    measured = {"fewshot": workbench.score_fewshot(trained.model), "validation": trained.validation}
    return {**measured, "seconds": trained.seconds}


def list_checks(results: StudyResults) -> list[Check]:
    deviation = results.pool_deviation()
    plain = [arm for arm in results.arms if arm.startswith("ViT")]
    return [
        check_greater(
            f"axial {arm} is better than {arm}",
            results.list_values(f"axial {arm}"),
            results.list_values(arm),
            deviation=deviation,
        )
        for arm in plain
    ]


STUDY = Study(
    name="axial",
    title="Axial attention",
    claim="An axial Vision Transformer is better than its plain counterpart, at more compute.",
    where="Appendix D.6",
    list_arms=list_arms,
    measure=measure,
    metric="fewshot",
    unit="few-shot accuracy, %",
    rule="The axial model is better than the plain one with the same patches, for both patch sizes.",
    list_checks=list_checks,
    limits="Axial blocks have a second MLP, so the axial models have about twice the parameters; the study shows who "
    "is better, not why. The AxialResNet-50 of the appendix is left out.",
    shown_facts={"gigaflops": "10⁹ operations", "parameters": "parameters"},
    paper=(
        ("Axial-ViT-B/32 and ViT-B/32", "the axial one is better, at more compute"),
        ("Axial-ViT-B/16 and ViT-B/16", "the axial one is better, at more compute"),
        ("speed", "slow in practice without kernels of its own"),
    ),
)
