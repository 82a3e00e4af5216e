"""Transfer a model to one data set as the paper does: choose a learning rate, train on all images, score on the test.

runs/suite-NAME/SET/
    sweep-RATE/            a run for each learning rate, scored on held-out images
    seed-0/, seed-1/, …    runs on all training images; predictions.npz holds the predictions for the test part
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from vitrail.data.order import Indices
from vitrail.data.sources.source import Source, compute_fingerprint
from vitrail.errors import DataError
from vitrail.evaluation.training_fewshot import open_training_fewshot
from vitrail.inference.batches import InferenceOptions, open_model, run_batches
from vitrail.system.events import OnEvent, Progress, send_progress
from vitrail.system.files import sha256, write_whole
from vitrail.system.ranks import Ranks, join_ranks
from vitrail.system.results import Result
from vitrail.system.results import Rows as SummaryRows
from vitrail.training.build import count_steps
from vitrail.training.config import RunConfig
from vitrail.training.resolve import change_config
from vitrail.training.run_training import run_training
from vitrail.training.sweep import Trial, choose_best, run_trials
from vitrail.transfer.suite_plan import RATE, SuitePlan, TransferTarget, find_deviations, list_rates, make_config
from vitrail.transfer.suite_table import format_mean, mean_and_deviation
from vitrail.weights.load import load

PREDICTIONS = "predictions.npz"
NONE = -1
"""Stands for the prediction of an image that could not be read."""


@dataclass(frozen=True)
class ScoredRun:
    """A run on all training images, and its accuracy on the test part."""

    seed: int
    rate: float
    folder: str
    hits: int
    count: int
    unreadable: int
    accuracy: float
    extra: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        extra = values.pop("extra")
        return {**values, **extra}


@dataclass(frozen=True, repr=False)
class TransferResult(Result):
    """The result of a transfer to one data set."""

    name: str
    rate: float
    """The learning rate of the runs."""
    tried: tuple[Trial, ...]
    runs: tuple[ScoredRun, ...]
    deviations: dict[str, tuple[Any, Any]]
    """Keys whose values differ from the recipe: the recipe's value, and the value used."""
    notes: tuple[str, ...]

    @property
    def accuracies(self) -> list[float]:
        return [run.accuracy for run in self.runs]

    @property
    def mean(self) -> float:
        """The mean accuracy of the runs, between 0 and 1."""
        return mean_and_deviation(self.accuracies)[0]

    @property
    def deviation(self) -> float | None:
        """The sample deviation of the runs' accuracies; None for a single run."""
        return mean_and_deviation(self.accuracies)[1]

    def summary(self) -> SummaryRows:
        return [
            ("data set", self.name),
            ("accuracy, %", format_mean(self.accuracies)),
            ("runs", str(len(self.runs))),
            ("learning rate", f"{self.rate:g}"),
            *(("note", note) for note in self.notes),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers of all runs for JSON."""
        return {
            "mean": self.mean,
            "deviation": self.deviation,
            "rate": self.rate,
            "runs": [run.to_dict() for run in self.runs],
            "tried": [_describe_trial(trial) for trial in self.tried],
            "deviations": {key: list(values) for key, values in self.deviations.items()},
            "notes": list(self.notes),
        }


def _describe_trial(trial: Trial) -> dict[str, Any]:
    measured = {"failure": trial.failure} if trial.failure else {"accuracy": trial.accuracy, "loss": trial.loss}
    return {"rate": trial.rate, "folder": trial.folder.as_posix(), **measured}


def list_remarks(
    results: dict[str, TransferResult], available: Collection[str], sources: dict[str, str]
) -> Iterator[str]:
    """Yield the sentences below a table: deviations from the paper, unusual data, and data sets without a result.

    Args:
        results: the results so far, by data set.
        available: the data sets whose data was found.
        sources: for each data set of the suite, where to get it.
    """
    keys = sorted({key for outcome in results.values() for key in outcome.deviations})
    if keys:
        yield f"**not the paper's protocol**: other values of {', '.join(keys)}"
    for name, outcome in results.items():
        for note in outcome.notes:
            yield f"{name}: {note}"
    for name, source in sources.items():
        if name not in available:
            yield f"{name} has no data: {source}"
        elif name not in results:
            yield f"{name} is still to come"


def transfer_to(plan: SuitePlan, target: TransferTarget, on_event: OnEvent) -> TransferResult:
    """Choose a learning rate, train on all images, and score. Finished runs are not trained again.

    Events: transfer, trial, chosen, scored and transferred, as `run_suite` describes them; training; progress of the
    task "testing".
    """
    config = make_config(plan, target)
    candidates = list_rates(plan, target, config)
    if target.prepare is not None:
        target.prepare(config, len(candidates) > 1)
    steps = count_steps(config, target.images[1])
    on_event("transfer", {"set": target.name, "rates": list(candidates), "runs": plan.runs, "steps": steps})
    tried = _try_rates(config, target, candidates, on_event) if len(candidates) > 1 else ()
    rate = choose_best(tried).rate if tried else candidates[0]
    on_event("chosen", {"set": target.name, "rate": rate, "trials": len(tried)})
    scored = []
    for seed in range(plan.runs):
        update = {"optimizer": {RATE: rate}, "data": target.training, "run": {"seed": seed}}
        run = _train_and_score(change_config(config, update, f"seed-{seed}"), target, on_event)
        scored.append(run)
        on_event("scored", {"set": target.name, **run.to_dict()})
    notes = list(target.notes)
    if unreadable := max(run.unreadable for run in scored):
        notes.append(f"test images that cannot be read and are not counted: {unreadable:,}")
    deviations = find_deviations(plan, target, config)
    result = TransferResult(target.name, rate, tuple(tried), tuple(scored), deviations, tuple(notes))
    accuracy = {"mean": result.mean, "deviation": result.deviation}
    on_event("transferred", {"set": target.name, "rate": rate, "runs": len(scored), **accuracy})
    return result


def _try_rates(
    config: RunConfig, target: TransferTarget, candidates: tuple[float, ...], on_event: OnEvent
) -> tuple[Trial, ...]:
    tried = []
    for trial in run_trials(config, candidates, fewshot=open_training_fewshot, on_event=on_event):
        tried.append(trial)
        on_event("trial", {"set": target.name, **_describe_trial(trial), "part": target.chosen_on})
    return tuple(tried)


def _train_and_score(config: RunConfig, target: TransferTarget, on_event: OnEvent) -> ScoredRun:
    result = run_training(config, fewshot=open_training_fewshot, on_event=on_event)
    weights = result.folder / "model"
    predictions = predict_test_images(config, weights, target.test, send_progress(on_event, "testing"))
    labels = target.test.labels(0, len(target.test))
    read = predictions != NONE
    hits, count = int((predictions == labels)[read].sum()), int(read.sum())
    if not count:
        raise DataError(f"{target.name}: none of {len(read):,} test images can be read: `vitrail data check` says why")
    return ScoredRun(
        seed=config.run.seed,
        rate=config.optimizer.learning_rate,
        folder=result.folder.as_posix(),
        hits=hits,
        count=count,
        unreadable=len(read) - count,
        accuracy=hits / count,
        extra=target.extra(target.test, predictions) if target.extra is not None else {},
    )


def predict_test_images(config: RunConfig, model: Path, source: Source, progress: Progress | None = None) -> Indices:
    """Return the predicted class of every image. The run keeps them: predicting can be slower than training."""
    path = config.run.folder / PREDICTIONS
    with join_ranks(config.run.device, config.run.timeout) as ranks:
        of = _digest(model, source) if ranks.is_first else ""
        found: Indices | None = ranks.broadcast_from_first(_read_predictions(path, of) if ranks.is_first else None)
        if found is None:
            found = _compute_predictions(config, model, source, ranks, progress)
            if ranks.is_first:
                file = io.BytesIO()
                np.savez(file, of=np.array(of), predictions=found)
                write_whole(path, file.getvalue())
    return found


def _digest(model: Path, source: Source) -> str:
    """Return a text that identifies the weights and the images."""
    return " ".join([compute_fingerprint(source), *(sha256(path) for path in sorted(model.glob("*.safetensors")))])


def _read_predictions(path: Path, of: str) -> Indices | None:
    """Return saved predictions if they are of the same weights and images, else None."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            return saved["predictions"].astype(np.int64) if str(saved["of"]) == of else None
    except (OSError, ValueError, KeyError, BadZipFile):
        return None


def _compute_predictions(
    config: RunConfig, model: Path, source: Source, ranks: Ranks, progress: Progress | None
) -> Indices:
    loaded = load(model)
    options = InferenceOptions(batch_size=config.data.batch_size, workers=config.data.workers, device=config.run.device)
    found: Indices = np.full(len(source), NONE, dtype=np.int64)
    for batch, (logits, _) in run_batches(open_model(loaded, options, ranks), source, options, ranks, progress):
        assert logits is not None
        classes = logits.argmax(dim=1).cpu()
        found[batch.indices[batch.mask].numpy()] = classes[batch.mask].numpy()
    together: Indices = np.maximum.reduce(ranks.gather(found))  # each rank has predictions for its own images only
    return together


def run_on_first_rank(config: RunConfig, work: Callable[[], None]) -> None:
    """Run `work` on the first rank while the others wait. An error there is raised on every rank."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        work()
        return
    with join_ranks(config.run.device, config.run.timeout) as ranks:
        wrong = None
        if ranks.is_first:
            try:
                work()
            except Exception as error:
                wrong = error
        wrong = ranks.broadcast_from_first(wrong)
    if wrong is not None:
        raise wrong
