"""What `vitrail evaluate --compare` does with each of its models."""

from __future__ import annotations

from vitrail.evaluate.compare import Compared, compared
from vitrail.evaluate.evaluation import evaluate
from vitrail.evaluate.passes import How, Progress
from vitrail.train.distributed import one_process
from vitrail.weights.load import load
from vitrail.workflows.evaluate import scored_on


def run(model: str, data: str, split: str | None, how: How, progress: Progress | None = None) -> Compared:
    """A model's row: scored on the data, timed here."""
    one_process("--compare")
    source, part = scored_on(data, split)
    loaded = load(model)
    report, _ = evaluate(loaded, source, how=how, names=(model, data, part), progress=progress)
    return compared(loaded, report, how)
