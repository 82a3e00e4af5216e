"""Section 4.5 and Figure 7: attention reaches farther in deeper layers, and some heads are local in the lowest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitrail.studies.charts import Series, draw_lines
from vitrail.studies.results import StudyResults
from vitrail.studies.scales import Scale
from vitrail.studies.study import Arm, Measured, Study
from vitrail.studies.verdict import Check, check_greater

if TYPE_CHECKING:
    from vitrail.studies.workbench import Workbench


IMAGES = 128
"""As in the paper."""
MODELS = ("larger ViT", "hybrid")
TRAINED, UNTRAINED = "trained", "untrained"


def list_arms(scale: Scale) -> list[Arm]:
    """Return a ViT and a hybrid with the same encoder, trained and not."""
    encoder = {key: scale.models[MODELS[0]][key] for key in ("width", "depth", "num_heads", "mlp_dim")}
    return [
        Arm(f"{model}, {state}", {"model": {**scale.models[model], **encoder}}, {"model": model, "state": state}, 3.0)
        for model in MODELS
        for state in (TRAINED, UNTRAINED)
    ]


def measure(workbench: Workbench, arm: Arm) -> Measured:
    """Measure the mean distance of each layer, and of the nearest and the farthest head in the lowest layer.

    Distances are in percent of what uniform attention would have.
    """
    from vitrail.inspection.measure.anatomy import patch_grid, patch_stride
    from vitrail.inspection.measure.attention import mean_attention_distance
    from vitrail.studies.study_data import choose_test_images

    if arm.facts["state"] == TRAINED:
        model = workbench.pretrain(arm.settings).model
    else:
        model = workbench.create_model(arm.settings["model"])
    images = workbench.prepare_images(model, choose_test_images(workbench.data.transfer[0].test, IMAGES))
    distances = mean_attention_distance(model.eval().to(images.device), images)
    share = 100 * distances / _measure_uniform(patch_grid(model, images), patch_stride(model))
    layers = {f"layer {number}": float(layer.mean()) for number, layer in enumerate(share, start=1)}
    third = max(len(share) // 3, 1)
    return {
        **layers,
        "growth": float(share[-third:].mean() - share[:third].mean()),
        "nearest": float(share[0].min()),
        "farthest": float(share[0].max()),
    }


def _measure_uniform(grid: tuple[int, int], stride: int) -> float:
    """Return the mean distance in pixels between any two patches, a patch and itself among them."""
    rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    return float(np.hypot(rows[:, None] - rows, columns[:, None] - columns).mean() * stride)


def list_checks(results: StudyResults) -> list[Check]:
    vit, hybrid = (f"{model}, {TRAINED}" for model in MODELS)
    untrained = f"{MODELS[0]}, {UNTRAINED}"

    def values(arm: str, metric: str) -> list[float]:
        return results.list_values(arm, metric)

    nothing = [0.0] * len(values(vit, "growth"))
    return [
        check_greater(
            "attention reaches farther in the upper third of the layers than in the lower",
            values(vit, "growth"),
            nothing,
        ),
        check_greater(
            "the nearest head of the lowest layer is nearer than before training",
            values(untrained, "nearest"),
            values(vit, "nearest"),
        ),
        check_greater(
            "heads of the lowest layer differ by more than a fifth of uniform attention",
            values(vit, "farthest"),
            values(vit, "nearest"),
            by=20.0,
        ),
        check_greater(
            "the nearest head of the lowest layer is less local in a hybrid",
            values(hybrid, "nearest"),
            values(vit, "nearest"),
        ),
    ]


def draw(results: StudyResults, path: Path) -> None:
    series = []
    for arm in results.arms:
        names = [name for name in results.rows[0]["measured"] if name.startswith("layer ")]
        layers = [name for name in names if all(name in row["measured"] for row in results.rows if row["arm"] == arm)]
        points = [(int(name.split()[1]), results.estimate(arm, name)) for name in layers]
        series.append(Series(arm, points))
    draw_lines(path, series, "layer", "mean attention distance, % of uniform attention")


STUDY = Study(
    name="attention-distance",
    title="How far attention reaches",
    claim="Attention reaches farther in deeper layers; in the lowest layer some heads are local and others global, and "
    "in hybrids the local ones are much less pronounced.",
    where="Section 4.5, Figure 7 right, appendix D.7",
    list_arms=list_arms,
    measure=measure,
    metric="growth",
    unit="distance in the upper third of the layers minus that in the lower, % of uniform attention",
    rule="After training, the upper third of the layers attends farther than the lower third; the nearest head of the "
    "lowest layer is nearer than before training; nearest and farthest head differ by more than a fifth of uniform "
    "attention; and the nearest head of a hybrid is less local than that of a ViT.",
    list_checks=list_checks,
    is_equally_noisy=False,
    limits="The image has 8 × 8 patches and a layer 5 heads or fewer, where the paper's models have 14 × 14 and 16.",
    paper=(
        ("lowest layers", "some heads attend to most of the image, others are consistently local"),
        ("with depth", "the attention distance grows"),
        ("hybrids, lowest layers", "the local heads are much less pronounced"),
    ),
    draw=draw,
)
