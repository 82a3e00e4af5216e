"""Section 3.2: fine-tuning at a higher resolution helps, with position embeddings interpolated in two dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.studies.charts import Series, draw_lines
from vitrail.studies.results import StudyResults
from vitrail.studies.scales import Scale
from vitrail.studies.study import Arm, Measured, Study
from vitrail.studies.verdict import Check, check_greater

if TYPE_CHECKING:
    from vitrail.studies.workbench import Workbench


FACTORS = (0.75, 1.0, 1.5, 2.0)
"""The resolutions of fine-tuning, in that of pre-training."""
INTERPOLATED, IN_ORDER, FRESH = "interpolated", "not interpolated", "fresh"


def list_arms(scale: Scale) -> list[Arm]:
    sizes = [round(scale.image_size * factor / scale.patch_size) * scale.patch_size for factor in FACTORS]
    arms = [_make_arm(INTERPOLATED, size, scale) for size in sizes]
    return arms + [_make_arm(table, sizes[-1], scale) for table in (IN_ORDER, FRESH)]


def _make_arm(table: str, size: int, scale: Scale) -> Arm:
    facts = {"table": table, "size": size, "pretrained_at": scale.image_size}
    return Arm(f"{size} px, {table}", {"model.image_size": size}, facts, 1 + (size / scale.image_size) ** 2)


def measure(workbench: Workbench, arm: Arm) -> Measured:
    from vitrail.studies.position_tables import replace_positions

    start, table = workbench.pretrain(), arm.facts["table"]
    if table != INTERPOLATED:
        changed = replace_positions(start.model, arm.facts["size"], table == IN_ORDER, workbench.seed)
        start = workbench.save_start(start, changed, arm.name)
    return {"accuracy": workbench.score_test(workbench.finetune(start, arm.settings).model)}


def list_checks(results: StudyResults) -> list[Check]:
    deviation = results.pool_deviation()
    by_size = {
        int(results.get_fact(arm, "size")): results.list_values(arm)
        for arm in results.arms
        if results.get_fact(arm, "table") == INTERPOLATED
    }
    sizes = sorted(by_size)
    before = int(results.get_fact(results.arms[0], "pretrained_at"))
    highest = by_size[sizes[-1]]
    others = {table: results.list_values(f"{sizes[-1]} px, {table}") for table in (IN_ORDER, FRESH)}
    return [
        check_greater(f"{sizes[-1]} px are better than {before}", highest, by_size[before], deviation=deviation),
        check_greater(
            f"{before} px are better than {sizes[0]}", by_size[before], by_size[sizes[0]], deviation=deviation
        ),
        check_greater(
            "interpolated rows are better than rows in their old order", highest, others[IN_ORDER], deviation=deviation
        ),
        check_greater("interpolated rows are better than a fresh table", highest, others[FRESH], deviation=deviation),
    ]


def draw(results: StudyResults, path: Path) -> None:
    series = []
    for table in (INTERPOLATED, IN_ORDER, FRESH):
        arms = [arm for arm in results.arms if results.get_fact(arm, "table") == table]
        series.append(Series(table, [(results.get_fact(arm, "size"), results.estimate(arm)) for arm in arms]))
    draw_lines(path, series, "resolution of fine-tuning, pixels", results.study.unit)


STUDY = Study(
    name="resolution",
    title="Fine-tuning at higher resolution",
    claim="Fine-tuning at a higher resolution than pre-training helps, with position embeddings that are interpolated "
    "in two dimensions.",
    where="Section 3.2",
    list_arms=list_arms,
    measure=measure,
    metric="accuracy",
    unit="accuracy after fine-tuning, %",
    rule="Twice the resolution of pre-training is better than the same, which is better than three quarters of it; at "
    "twice the resolution interpolated embeddings are better than the old rows in their order and than fresh ones.",
    list_checks=list_checks,
    limits="Images at a higher resolution show more, whatever the model: this study does not separate that from the "
    "longer sequence. Without interpolation the table begins with the old rows in their old order, a quarter of what "
    "it needs; the others are fresh.",
    paper=(
        ("pre-training · fine-tuning", "224 px · 384 px, and 512 or 518 px for the best results"),
        ("ViT-L/16 on JFT: 384 px (Table 5) · 512 px (Table 2)", "87.12 · 87.76 ImageNet"),
        ("ViT-H/14 on JFT: 384 px (Table 5) · 518 px (Table 2)", "88.04 · 88.55 ImageNet"),
    ),
    draw=draw,
)
