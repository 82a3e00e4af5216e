"""Figure 8: which dimension of a Vision Transformer to scale."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.model.cost import compute_cost
from vitrail.model.variants import make_architecture
from vitrail.studies.charts import Series, draw_lines
from vitrail.studies.results import StudyResults
from vitrail.studies.scales import Scale
from vitrail.studies.study import Arm, Measured, Study
from vitrail.studies.verdict import Check, check_greater, estimate_seed_mean, pool_deviation

if TYPE_CHECKING:
    from vitrail.studies.workbench import Workbench


BASE = "base"
DEPTH, WIDTH, MLP, PATCH, ALL = "depth", "width", "MLP", "patch", "all"
FACTORS = {DEPTH: (0.5, 2.0), WIDTH: (0.5, 2.0), MLP: (0.5, 2.0), PATCH: (2.0, 0.5), ALL: (0.5, 1.5)}
"""What each dimension is multiplied by; a smaller patch makes a longer sequence."""


def list_arms(scale: Scale) -> list[Arm]:
    """Return the base and, for each dimension, one smaller and one larger model."""
    section = dict(scale.pretraining["model"])
    # As in the paper, the MLP of the base is twice as wide as the model, and the depth can be halved and doubled.
    section |= {"mlp_dim": 2 * section["width"], "depth": 2 * max(section["depth"] // 3, 1)}
    arms = [_make_arm(BASE, section, BASE)]
    for dimension, factors in FACTORS.items():
        for factor in factors:
            changed = dict(section)
            for key, names in (("depth", (DEPTH, ALL)), ("width", (WIDTH, ALL)), ("mlp_dim", (MLP, ALL))):
                if dimension in names:
                    changed[key] = round(section[key] * factor)
            if dimension in (WIDTH, ALL):  # the heads stay as wide as they are
                head = section["width"] // section["num_heads"]
                changed["num_heads"] = max(changed["width"] // head, 1)
                changed["width"] = changed["num_heads"] * head
            if dimension == PATCH:
                changed["name"] = f"Ti/{round(scale.patch_size * factor)}"
            shown = changed[{WIDTH: "width", MLP: "mlp_dim"}.get(dimension, "depth")]
            label = (
                changed["name"][2:] if dimension == PATCH else f" {factor:g} times" if dimension == ALL else f" {shown}"
            )
            arms.append(_make_arm(f"{dimension}{label}", changed, dimension))
    return arms


def _make_arm(name: str, section: dict[str, Any], dimension: str) -> Arm:
    cost = compute_cost(make_architecture(**{**section, "num_classes": 200}))
    facts = {"dimension": dimension, "gigaflops": cost.flops / 1e9, "parameters": cost.parameters}
    return Arm(name, {"model": section}, facts, weight=cost.flops / 3e8)


def measure(workbench: Workbench, arm: Arm) -> Measured:
    trained = workbench.pretrain(arm.settings)
    return {"fewshot": workbench.score_fewshot(trained.model), "validation": trained.validation}


def list_gains(results: StudyResults, dimension: str) -> list[float]:
    """Return, for each seed, what a dimension gains for every doubling of the operations."""
    arms = [arm for arm in results.arms if results.get_fact(arm, "dimension") == dimension]
    least, most = sorted(arms, key=lambda arm: float(results.get_fact(arm, "gigaflops")))
    ratio = results.get_fact(most, "gigaflops") / results.get_fact(least, "gigaflops")
    pairs = zip(results.list_values(least), results.list_values(most), strict=True)
    return [(more - less) / math.log2(ratio) for less, more in pairs]


def list_checks(results: StudyResults) -> list[Check]:
    gains = {dimension: list_gains(results, dimension) for dimension in (DEPTH, WIDTH, MLP, PATCH)}
    noise = pool_deviation(list(gains.values()))
    return [
        check_greater("depth gains more than width", gains[DEPTH], gains[WIDTH], deviation=noise),
        check_greater("depth gains more than the MLP", gains[DEPTH], gains[MLP], deviation=noise),
        check_greater("smaller patches gain more than width", gains[PATCH], gains[WIDTH], deviation=noise),
        Check("smaller patches gain", estimate_seed_mean(gains[PATCH], noise), 0.0),
    ]


def draw(results: StudyResults, path: Path) -> None:
    lines = []
    for dimension in FACTORS:
        arms = [arm for arm in results.arms if results.get_fact(arm, "dimension") in (dimension, BASE)]
        arms.sort(key=lambda arm: float(results.get_fact(arm, "gigaflops")))
        points = [(float(results.get_fact(arm, "gigaflops")), results.estimate(arm)) for arm in arms]
        lines.append(Series(dimension, points))
    draw_lines(path, lines, "billion operations for one image", results.study.unit, logarithmic=True)


STUDY = Study(
    name="shape",
    title="Depth, width, MLP or patches",
    claim="Scaling the depth helps more than scaling the width or the MLP, and smaller patches help without new "
    "parameters.",
    where="Figure 8, appendix D.2",
    list_arms=list_arms,
    measure=measure,
    metric="fewshot",
    unit="few-shot accuracy, %",
    rule="The gain of a dimension is its accuracy for each doubling of the operations, from its smallest to its "
    "largest model. Depth gains more than width and than the MLP, smaller patches gain more than width, and they gain "
    "at all.",
    interval_note="They tell how another seed would do, not how other images would. Those of the checks come from the "
    "deviation that the gains have in common.",
    list_checks=list_checks,
    limits="Every arm is trained for the same number of steps and far from convergence; "
    "the base has a quarter to a half of the layers that the paper's has.",
    paper=(
        ("base", "8 layers, width 1024, MLP 2048, patches of 32 pixels"),
        ("depth", "largest gains, up to 64 layers; less after 16"),
        ("width", "smallest changes"),
        ("patches", "steady gains without new parameters"),
        ("all together", "robust gains"),
    ),
    shown_facts={"gigaflops": "10⁹ operations", "parameters": "parameters"},
    draw=draw,
)
