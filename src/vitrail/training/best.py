"""The best weights of a run: those of the step with the best evaluation, in `best/` unless they are the last ones."""

from __future__ import annotations

import json
import logging
import math
from typing import Any, NamedTuple

from vitrail.system.files import write_whole
from vitrail.training.checkpoint_folder import find_damage, read_state, read_weights
from vitrail.training.config import RunConfig
from vitrail.training.resolve import hide_config_folders, to_toml
from vitrail.training.run import Progress, TrainingRun
from vitrail.training.trained_model import build_trained_model, training_cost
from vitrail.weights.save import save
from vitrail.weights.source import BEST_FILE, BEST_FOLDER, LAST_FOLDER

log = logging.getLogger("vitrail")


class BestEvaluation(NamedTuple):
    """The best evaluation of a run."""

    step: int
    metric: str
    """What decides: "accuracy", of which more is better, or "loss"."""
    value: float


def find_best(config: RunConfig, records: list[dict[str, Any]]) -> BestEvaluation | None:
    """Return the best evaluation among the records of a run, the first of equal ones; None if there is none."""
    metric = "accuracy" if config.objective.kind == "classification" else "loss"
    sign = 1 if metric == "accuracy" else -1
    evaluations = [
        BestEvaluation(record["step"], metric, record[metric])
        for record in records
        if record["kind"] == "evaluation" and math.isfinite(record.get(metric, math.nan))
    ]
    return max(evaluations, key=lambda evaluation: sign * evaluation.value, default=None)


def save_best(run: TrainingRun, progress: Progress, records: list[dict[str, Any]]) -> None:
    """Write the best weights of a finished run, and which step they are of. Only the first rank calls this.

    If the last weights are the best, nothing is written but this fact.
    """
    best, folder = find_best(run.config, records), run.config.run.folder
    if best is None:
        return
    if best.step != progress.step:
        checkpoint = run.checkpoints.list_steps().get(best.step)
        if checkpoint is None or (damage := find_damage(checkpoint)) is not None:
            reason = "is not there" if checkpoint is None else damage
            log.warning("the best weights, of step %s, cannot be written: their checkpoint %s", best.step, reason)
            return
        model = build_trained_model(run.learner.objective.model, read_weights(checkpoint))
        at_best = Progress.from_saved(read_state(checkpoint))
        model.training_cost, model.learned_from = training_cost(run, at_best), run.data_fingerprint
        notes = (
            f"The weights after step {best.step:,} of {run.steps:,}, where the {best.metric} on the part "
            f"{run.config.data.validate_on} was the best of the run: {best.value:.4g}. The last weights are in "
            f"`{LAST_FOLDER}`, beside this folder.\n\n```toml\n{to_toml(hide_config_folders(run.config))}```"
        )
        save(model, folder / BEST_FOLDER, notes=notes)
    where = LAST_FOLDER if best.step == progress.step else BEST_FOLDER
    write_whole(folder / BEST_FILE, json.dumps({"folder": where, **best._asdict()}).encode())
