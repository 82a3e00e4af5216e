"""The best weights of a run: those of the step with the best evaluation, in `best/` unless they are the last ones."""

from __future__ import annotations

import json
import logging
from typing import Any, NamedTuple

from vitrail.model.base import ImageModel
from vitrail.system.files import write_whole
from vitrail.training.checkpoint_folder import find_damage, read_state, read_weights
from vitrail.training.config import RunConfig
from vitrail.training.resolve import hide_config_folders, to_toml
from vitrail.training.run import Progress, TrainingRun
from vitrail.training.trained_model import build_trained_model, training_cost
from vitrail.training.validation import (
    compute_choosing_merit,
    find_best_evaluation,
    get_choosing_kind,
    get_metric,
)
from vitrail.weights.save import save
from vitrail.weights.source import BEST_FILE, BEST_FOLDER, LAST_FOLDER

log = logging.getLogger("vitrail")


class BestEvaluation(NamedTuple):
    """The best evaluation of a run."""

    step: int
    metric: str
    """What decides: "accuracy" or "few-shot accuracy", of which more is better, or "loss"."""
    value: float


def find_best(config: RunConfig, records: list[dict[str, Any]]) -> BestEvaluation | None:
    """Return the best evaluation among the records of a run; None if there is none.

    Of equal accuracies the one with the lower loss is better, and of equals in both the first.
    """
    kind, metric = get_choosing_kind(config), get_metric(config)
    needed = {metric} if kind == "fewshot" else {metric, "loss"}
    evaluations = [record for record in records if record["kind"] == kind and needed <= record.keys()]
    merits = [compute_choosing_merit(record, metric, config.data) for record in evaluations]
    if (number := find_best_evaluation(merits)) is None:
        return None
    name = f"few-shot {metric}" if kind == "fewshot" else metric.replace("_", " ")
    return BestEvaluation(evaluations[number]["step"], name, abs(merits[number][0]))


def read_best(run: TrainingRun, best: BestEvaluation) -> ImageModel | None:
    """Return the model with the best weights of a run; None, and a warning, if their checkpoint cannot be read."""
    checkpoint = run.checkpoints.list_steps().get(best.step)
    if checkpoint is None or (damage := find_damage(checkpoint)) is not None:
        reason = "is not there" if checkpoint is None else damage
        log.warning("the best weights, of step %s, cannot be written: their checkpoint %s", best.step, reason)
        return None
    model = build_trained_model(run.learner.objective.model, read_weights(checkpoint))
    at_best = Progress.from_saved(read_state(checkpoint))
    model.training_cost = training_cost(run, at_best)
    model.learned_from, model.chosen_by = run.data_fingerprint, run.choosing_fingerprint
    return model


def save_best(run: TrainingRun, progress: Progress, records: list[dict[str, Any]]) -> None:
    """Write the best weights of a finished run, and which step they are of. Only the first rank calls this.

    If the last weights are the best, or the best are the run's result, nothing is written but this fact.
    """
    best, folder = find_best(run.config, records), run.config.run.folder
    if best is None:
        return
    is_result = best.step == progress.step or run.config.schedule.result == "best"
    if not is_result:
        if (model := read_best(run, best)) is None:
            return
        part = "" if run.config.schedule.choose_by == "fewshot" else f" on the part {run.config.data.validate_on}"
        notes = (
            f"The weights after step {best.step:,} of {run.steps:,}, where the {best.metric}{part} "
            f"was the best of the run: {best.value:.4g}. The last weights are in "
            f"`{LAST_FOLDER}`, beside this folder.\n\n```toml\n{to_toml(hide_config_folders(run.config))}```"
        )
        save(model, folder / BEST_FOLDER, notes=notes)
    where = LAST_FOLDER if is_result else BEST_FOLDER
    write_whole(folder / BEST_FILE, json.dumps({"folder": where, **best._asdict()}).encode())
