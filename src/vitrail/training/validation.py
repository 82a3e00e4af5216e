"""Which evaluation of a run is the best, when a run ends early, and its accuracy on images that chose nothing.

`schedule.choose_by` says which evaluations are compared: those on validation images, or those of few-shot accuracy.

The accuracy of the chosen weights must not come from the images that chose them. So `data.divide_validation` divides
the validation images into two halves, and every evaluation measures both:

    halves       the first half chooses, the second half reports
    cross-fit    both choose together; for the report each half is measured at the step that the other half alone would
                 have chosen, so every image counts
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vitrail.system.intervals import Estimate, estimate_share
from vitrail.tasks.registry import find_task
from vitrail.training.config import DataConfig, RunConfig

FIRST, SECOND = 1, 2
"""Places of the halves in the list of `compute_merits`."""
UNUSABLE = -1e300
"""Stands for a value that is not finite: JSON has no word for infinity."""

Merit = list[float]
"""Numbers that are compared one after the other; larger is better."""


class HonestAccuracy(NamedTuple):
    """The accuracy of the chosen weights on images that did not choose them."""

    accuracy: Estimate
    images: int
    is_cross_fitted: bool


def get_choosing_kind(config: RunConfig) -> str:
    """Return the kind of the records that are compared to find the best weights: "evaluation" or "fewshot"."""
    return "fewshot" if config.schedule.choose_by == "fewshot" else "evaluation"


def get_metric(config: RunConfig) -> str:
    """Return the metric that compares two of these records: "accuracy", of which more is better, or "loss"."""
    if config.objective.kind == "task" and config.schedule.choose_by == "validation" and config.data.task is not None:
        return find_task(config.data.task).choosing_metric
    has_classes = config.objective.kind == "classification" or config.schedule.choose_by == "fewshot"
    return "accuracy" if has_classes else "loss"


def compute_merit(measured: Mapping[str, Any], metric: str) -> Merit:
    """Return the merit of measurements: a higher accuracy, and of equal ones the lower loss; or only the lower loss.

    A few-shot accuracy has no loss.
    """
    names = ("accuracy", "loss") if metric == "accuracy" else ("loss",)
    values = [measured[name] if name == "accuracy" else -measured[name] for name in names if name in measured]
    return [value if math.isfinite(value) else UNUSABLE for value in values]


def is_usable(merit: Merit) -> bool:
    """Return whether a merit is of a finite value."""
    return merit[0] != UNUSABLE


def compute_merits(record: Mapping[str, Any], metric: str) -> list[Merit]:
    """Return the merits of an evaluation record on all validation images and, if they are divided, on each half."""
    return [compute_merit(part, metric) for part in (record, *record.get("halves", ()))]


def get_choosing_part(record: Mapping[str, Any], config: DataConfig) -> Mapping[str, Any]:
    """Return the measurements of an evaluation record on the images that choose: all of them, or the first half."""
    uses_half = config.divide_validation == "halves" and record.get("halves")
    return record["halves"][0] if uses_half else record


def compute_choosing_merit(record: Mapping[str, Any], metric: str, config: DataConfig) -> Merit:
    """Return the merit of an evaluation record on the images that choose."""
    return compute_merit(get_choosing_part(record, config), metric)


def find_best_evaluation(merits: Sequence[Merit], patience: int | None = None) -> int | None:
    """Return the number of the first best evaluation; None if there is none.

    With `patience`, the search ends after so many evaluations without a better one, as a run does.
    """
    best: int | None = None
    for number, merit in enumerate(merits):
        if not is_usable(merit):
            continue
        if best is None or merit > merits[best]:
            best = number
        elif patience is not None and number - best >= patience:
            break
    return best


def has_stopped_improving(evaluations: Sequence[list[Merit]], config: RunConfig) -> bool:
    """Return whether nothing that chooses has found a better evaluation for `schedule.patience` evaluations.

    With halves, the first one chooses alone: when a run ends is a choice too. With cross-fitting, each half and both
    together choose, so the run goes on as long as any of the three improves.
    """
    patience = config.schedule.patience
    if patience is None or not evaluations:
        return False
    count = len(evaluations[0])
    places = [FIRST] if config.data.divide_validation == "halves" and count > FIRST else range(count)
    ways = [[evaluation[place] for evaluation in evaluations] for place in places]
    last = len(evaluations) - 1
    return all(last - (find_best_evaluation(merits) or 0) >= patience for merits in ways)


def estimate_honest_accuracy(records: Sequence[Mapping[str, Any]], config: RunConfig) -> HonestAccuracy | None:
    """Estimate the accuracy of a run's best weights by images that did not choose them.

    Returns:
        None if the run takes its last weights, which nothing has chosen, if its validation images are not divided, or
        if it learns another task than labels.
    """
    if config.schedule.result == "last" or config.objective.kind != "classification":
        return None
    evaluations = [
        record for record in records if record["kind"] == "evaluation" and len(record.get("halves", ())) == 2
    ]
    if not evaluations:
        return None
    merits = [compute_merits(record, "accuracy") for record in evaluations]

    def count_hits(chooser: int, judge: int) -> tuple[int, int]:
        chosen = find_best_evaluation([merit[chooser] for merit in merits], config.schedule.patience) or 0
        half = evaluations[chosen]["halves"][judge - FIRST]
        return (round(half["accuracy"] * half["images"]) if half["images"] else 0), half["images"]

    pairs = [(FIRST, SECOND), (SECOND, FIRST)][: 1 if config.data.divide_validation == "halves" else 2]
    hits, images = (sum(column) for column in zip(*(count_hits(*pair) for pair in pairs), strict=True))
    if not images:  # none of them can be read
        return None
    return HonestAccuracy(estimate_share(hits, images), images, is_cross_fitted=len(pairs) == 2)
