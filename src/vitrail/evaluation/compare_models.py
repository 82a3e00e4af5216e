"""What `vitrail evaluate --compare` does with each of its models."""

from __future__ import annotations

from vitrail.evaluation.compare import Compared, compared
from vitrail.evaluation.evaluate import scored_on
from vitrail.evaluation.evaluation import evaluate
from vitrail.inference.batches import How, Progress
from vitrail.system.ranks import require_one_process
from vitrail.weights.load import load


def run(model: str, data: str, split: str | None, how: How, progress: Progress | None = None) -> Compared:
    """A model's row: scored on the data, timed here."""
    require_one_process("--compare")
    source, part = scored_on(data, split)
    loaded = load(model)
    report, _ = evaluate(loaded, source, how=how, names=(model, data, part), progress=progress)
    return compared(loaded, report, how)
