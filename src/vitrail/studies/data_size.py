"""Figures 3 and 4: with little data ResNets win, with much data Vision Transformers do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.studies.charts import Series, draw_lines
from vitrail.studies.results import StudyResults
from vitrail.studies.scales import Scale
from vitrail.studies.study import Arm, Measured, Study
from vitrail.studies.verdict import Check, check_greater

if TYPE_CHECKING:
    from vitrail.studies.workbench import Workbench


SHARES = (0.03, 0.1, 0.3, 1.0)
LENGTH = 0.75
"""The length of every training, in that of the scale's pre-training."""
WEIGHTS = {"ViT": 1.0, "larger ViT": 3.0, "hybrid": 2.5, "BiT": 3.5}
EVALUATIONS = 5
"""How often the held-out images choose the weights: the paper stops early by them."""


def list_arms(scale: Scale) -> list[Arm]:
    arms = []
    for model, section in scale.models.items():
        for share in SHARES:
            schedule = scale.scale_steps(LENGTH)
            settings = {
                "model": dict(section),
                "data.share": share,
                **schedule,
                "schedule.result": "best",
                "run.evaluate_every": max(schedule["schedule.steps"] // EVALUATIONS, 1),
            }
            facts = {"model": model, "share": share}
            arms.append(Arm(f"{model}, {100 * share:g}%", settings, facts, WEIGHTS[model]))
    return arms


def measure(workbench: Workbench, arm: Arm) -> Measured:
    trained = workbench.pretrain(arm.settings)
    return {"fewshot": workbench.score_fewshot(trained.model), "validation": trained.validation}


def list_checks(results: StudyResults) -> list[Check]:
    few, all_images = min(SHARES), max(SHARES)
    values = {
        (model, share): results.list_values(f"{model}, {100 * share:g}%")
        for model in WEIGHTS
        for share in (few, all_images)
    }
    deviation = results.pool_deviation()
    return [
        check_greater(
            f"BiT is better than ViT with {few:.0%} of the data",
            values["BiT", few],
            values["ViT", few],
            deviation=deviation,
        ),
        check_greater(
            "ViT is better than BiT with all data",
            values["ViT", all_images],
            values["BiT", all_images],
            deviation=deviation,
        ),
        _check_gain(
            values["larger ViT", few], values["larger ViT", all_images], values["ViT", few], values["ViT", all_images]
        ),
    ]


def _check_gain(
    larger_few: Sequence[float], larger_all: Sequence[float], small_few: Sequence[float], small_all: Sequence[float]
) -> Check:
    """Check that the larger model gains more from data: differences of each seed, compared between the models."""
    larger = [after - before for before, after in zip(larger_few, larger_all, strict=True)]
    small = [after - before for before, after in zip(small_few, small_all, strict=True)]
    return check_greater("the larger ViT gains more from all data than the small one", larger, small)


def draw(results: StudyResults, path: Path) -> None:
    lines = [
        Series(model, [(share, results.estimate(f"{model}, {100 * share:g}%")) for share in SHARES])
        for model in WEIGHTS
    ]
    draw_lines(path, lines, "share of the pre-training images", results.study.unit, logarithmic=True, percent=True)


STUDY = Study(
    name="data-size",
    title="How much data a Vision Transformer needs",
    claim="With little pre-training data ResNets are better, with much data Vision Transformers are, and larger "
    "Vision Transformers suffer most from little data.",
    where="Figures 3 and 4, section 4.3",
    list_arms=list_arms,
    measure=measure,
    metric="fewshot",
    unit="few-shot accuracy, %",
    rule="BiT is better than ViT at the smallest share, ViT is better than BiT with all data, and the larger ViT gains "
    "more from the smallest share to all data than the small one.",
    interval_note="They tell how another seed would do, not how other images would. The interval of the last check "
    "comes from the gains of the two models alone, a number for each seed.",
    list_checks=list_checks,
    limits="Every training has the same number of steps, and keeps the weights that were best on held-out images. All "
    "data are here about a hundred thousand images: a tenth of the smallest set of Figure 3, and a "
    "three-thousandth of JFT-300M. Where curves cross beyond that, this study cannot show.",
    paper=(
        ("ResNet50 and ViT-B/32 on 9 million images of JFT", "the ResNet is much better"),
        ("from 90 million images on", "ViT-B/32 is better"),
        ("ViT-L/16 and ResNet152x2", "the same, at the same sizes"),
        ("ImageNet alone, 1.3 million images (Table 5)", "B/16 77.91, L/16 76.53"),
        ("JFT-300M (Table 5)", "B/16 84.15, L/16 87.12"),
    ),
    draw=draw,
)
