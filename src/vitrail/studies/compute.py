"""Figure 5 and Table 6: accuracy over the operations of pre-training, for ViT, hybrids and ResNets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.model.cost import compute_cost
from vitrail.model.variants import make_architecture
from vitrail.studies.charts import Series, draw_lines
from vitrail.studies.results import StudyResults
from vitrail.studies.scales import Scale
from vitrail.studies.study import Arm, Measured, Study
from vitrail.studies.verdict import Check
from vitrail.system.intervals import LEVEL, NO_ESTIMATE, Estimate

if TYPE_CHECKING:
    from vitrail.studies.workbench import Workbench


VIT, HYBRID, BIT = "ViT", "hybrid", "BiT"
SIZES = {0.5: "small", 1.0: "medium", 2.0: "large"}
"""What the width of a family's model is multiplied by, and what that size is called."""
PETA = 1e15


def list_arms(scale: Scale) -> list[Arm]:
    """Return three sizes of each family."""
    arms = []
    for family in (VIT, HYBRID, BIT):
        for factor, size in SIZES.items():
            section = _resize(dict(scale.models[family]), family, factor)
            flops = compute_cost(make_architecture(**section)).flops
            arms.append(Arm(f"{family}, {size}", {"model": section}, {"family": family}, 2 * flops / 3e8))
    return arms


def _resize(section: dict[str, Any], family: str, factor: float) -> dict[str, Any]:
    """Return the section of a model that is `factor` times as wide; a BiT has other blocks, as R50 and R101 do."""
    if family == BIT:
        blocks = {0.5: (1, 1, 1, 1), 1.0: (2, 2, 2, 2), 2.0: (3, 4, 6, 3)}[factor]
        return {**section, "blocks": blocks[: len(section.get("blocks", blocks))]}
    heads = max(round(section["num_heads"] * factor), 1)
    width = heads * (section["width"] // section["num_heads"])
    return {**section, "num_heads": heads, "width": width, "mlp_dim": 4 * width}


def measure(workbench: Workbench, arm: Arm) -> Measured:
    trained = workbench.pretrain(arm.settings)
    accuracy = workbench.score_fewshot(trained.model)
    return {
        "fewshot": accuracy,
        "error": 100 - accuracy,
        "petaflops": trained.flops / PETA,
        "validation": trained.validation,
        "seconds": trained.seconds,
    }


@dataclass(frozen=True)
class Lines:
    """Straight lines through the logarithms of operations and error: a power law for each family."""

    families: tuple[str, ...]
    coefficients: np.ndarray
    """The height of each family's line at the mean of all operations, then their slopes."""
    covariance: np.ndarray
    freedom: int
    centre: float
    """The mean logarithm of the operations."""

    def combine(self, weights: Mapping[tuple[str, str], float]) -> Estimate:
        """Return a weighted sum of heights ("height", family) and slopes ("slope", family), with its 95% interval."""
        from scipy.stats import t

        vector = np.zeros(len(self.coefficients))
        for (what, family), weight in weights.items():
            vector[self.families.index(family) + (len(self.families) if what == "slope" else 0)] = weight
        value = float(vector @ self.coefficients)
        if self.freedom < 1:
            return Estimate(value, -math.inf, math.inf)
        reach = float(t.ppf(0.5 + LEVEL / 2, self.freedom)) * math.sqrt(float(vector @ self.covariance @ vector))
        return Estimate(value, value - reach, value + reach)

    def predict(self, family: str, operations: float) -> Estimate:
        """Return the error of a family after so many operations, with its interval."""
        line = {("height", family): 1.0, ("slope", family): math.log(operations) - self.centre}
        value, low, high = self.combine(line)
        return Estimate(*map(_safe_exp, (value, low, high)))


def _safe_exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def fit_power_laws(points: Mapping[str, Sequence[tuple[float, float]]]) -> Lines:
    """Fit log(error) = height + slope · (log(operations) − centre) to each family, with a common deviation.

    Args:
        points: For each family, (operations, error) of every model.
    """
    families = tuple(points)
    rows = [(family, math.log(x), math.log(y)) for family, pairs in points.items() for x, y in pairs]
    centre = sum(x for _, x, _ in rows) / len(rows)
    design = np.zeros((len(rows), 2 * len(families)))
    for row, (family, x, _) in enumerate(rows):
        place = families.index(family)
        design[row, place], design[row, place + len(families)] = 1.0, x - centre
    target = np.array([y for _, _, y in rows])
    coefficients, *_ = np.linalg.lstsq(design, target, rcond=None)
    freedom = len(rows) - 2 * len(families)
    residual = target - design @ coefficients
    variance = float(residual @ residual) / freedom if freedom > 0 else math.nan
    return Lines(families, coefficients, variance * np.linalg.pinv(design.T @ design), freedom, centre)


def fit_results(results: StudyResults) -> Lines:
    """Fit the power laws to the means of the arms: how far a model is from its line, all of its seeds share."""
    points: dict[str, list[tuple[float, float]]] = {VIT: [], HYBRID: [], BIT: []}
    for arm in results.arms:
        point = (results.compute_mean(arm, "petaflops"), results.compute_mean(arm, "error"))
        points[results.get_fact(arm, "family")].append(point)
    return fit_power_laws(points)


def list_checks(results: StudyResults) -> list[Check]:
    lines = fit_results(results)
    ranges = [_list_operations(results, family) for family in lines.families]
    least, most = max(map(min, ranges)), min(map(max, ranges))
    decides = results.seeds > 1 and least < most  # otherwise there is no compute that all families have
    cheaper = early = narrows = NO_ESTIMATE
    if decides:
        cheaper = compare_errors(lines, BIT, VIT, math.sqrt(least * most))
        early = compare_errors(lines, VIT, HYBRID, least)
        narrows = lines.combine({("slope", HYBRID): 1, ("slope", VIT): -1})
    return [
        Check("BiT's error is larger than ViT's in the middle of the common compute, by %", cheaper, 0.0),
        Check("ViT's error is larger than the hybrid's at the least common compute, by %", early, 0.0),
        Check("with more compute ViT's error falls faster than the hybrid's (difference of exponents)", narrows, 0.0),
    ]


def compare_errors(lines: Lines, first: str, second: str, operations: float) -> Estimate:
    """Return by how many percent the first family's error is larger than the second's after so many operations."""
    at = math.log(operations) - lines.centre
    difference = lines.combine(
        {("height", first): 1, ("slope", first): at, ("height", second): -1, ("slope", second): -at}
    )
    return Estimate(*(100 * (_safe_exp(each) - 1) for each in difference))


def _list_operations(results: StudyResults, family: str) -> list[float]:
    return [float(row["measured"]["petaflops"]) for row in results.rows if row["facts"]["family"] == family]


def draw(results: StudyResults, path: Path) -> None:
    lines = fit_results(results)
    series = []
    for family in lines.families:
        arms = [arm for arm in results.arms if results.get_fact(arm, "family") == family]
        arms.sort(key=lambda arm: results.compute_mean(arm, "petaflops"))
        points = [(results.compute_mean(arm, "petaflops"), results.estimate(arm, "error")) for arm in arms]
        exponent = lines.combine({("slope", family): 1.0})
        reach = exponent.value - exponent.low
        fitted = [(x, lines.predict(family, x).value) for x, _ in points]
        series.append(
            Series(f"{family}: exponent {exponent.value:.3f} ± {reach:.3f}".replace("-", "−"), points, fitted)
        )
    draw_lines(path, series, "operations of pre-training, 10¹⁵", "few-shot error, %", logarithmic=True)


STUDY = Study(
    name="compute",
    title="Accuracy for the same compute",
    claim="Vision Transformers need less compute than ResNets for the same accuracy; hybrids are slightly better at "
    "small compute, and the difference vanishes for larger models.",
    where="Figure 5 and Table 6, section 4.4",
    list_arms=list_arms,
    measure=measure,
    metric="fewshot",
    unit="few-shot accuracy, %",
    rule="A power law of error over counted operations is fitted to the models of each family. In the middle of the "
    "compute that all families have, BiT's error is above ViT's; at its least, ViT's error is above the hybrid's; and "
    "ViT's error falls faster with compute than the hybrid's. One seed, or families without common compute, decide "
    "nothing.",
    interval_note="Those of the checks are others: they come from the distances of nine models to their three "
    "lines, and tell how other models would do.",
    list_checks=list_checks,
    limits="Operations span one order of magnitude, where the paper's span two and lie a hundred thousand times "
    "higher, on data that no model can learn by heart. Three models make a line of each family.",
    paper=(
        ("ViT against ResNets, mean of 5 data sets", "2 to 4 times less compute for the same accuracy"),
        ("ViT-B/32, 55 exaFLOPs · R50x1, 50 exaFLOPs", "80.73 · 77.54 ImageNet"),
        ("R50+B/32, 106 exaFLOPs · R101x1, 96 exaFLOPs", "84.90 · 80.67 ImageNet"),
        ("ViT-L/16, 14 epochs · R50+L/16, 14 epochs", "87.12 · 87.12 ImageNet"),
    ),
    draw=draw,
)
