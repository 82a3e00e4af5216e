"""Transfer a model to one data set as the paper does: choose a learning rate, train on all images, score on the test.

runs/suite-NAME/SET/
    sweep-RATE/            a run for each learning rate, scored on held-out images
    seed-0/, seed-1/, …    runs on all training images; predictions.npz holds the predictions for the test part
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from vitrail.data.order import Indices
from vitrail.data.sources.source import Source, compute_fingerprint
from vitrail.errors import ConfigError, DataError
from vitrail.inference.batches import InferenceOptions, run_batches
from vitrail.recipes import Recipe
from vitrail.system.files import sha256, short_name, write_whole
from vitrail.system.ranks import Ranks, join_ranks
from vitrail.training.build import count_steps
from vitrail.training.config import RunConfig
from vitrail.training.resolve import resolve
from vitrail.training.run_folder import find_differences
from vitrail.training.run_training import run_training
from vitrail.training.sweep import Trial, change_config, choose_best, run_trials
from vitrail.transfer.suite_table import mean_and_deviation
from vitrail.weights.load import load

RUNS = 3
"""Runs on all training images; the paper reports their mean and deviation."""
DECIDED = {
    "weights": "--model",
    "name": "--model",
    "source": "--data",
    "validate_on": "what it chooses by",
    "holdout": "what it chooses by",
    "seed": "--runs",
}
"""Keys that a suite sets itself, and the option that decides them."""
RATE, FOLDER = "learning_rate", "folder"
PREDICTIONS = "predictions.npz"
NONE = -1
"""Stands for the prediction of an image that could not be read."""

Extra = Callable[[Source, Indices], dict[str, int]]
"""Computes more counts, by name, from the test images and the predictions."""


@dataclass(frozen=True)
class SuitePlan:
    """The settings of all data sets of a suite."""

    model: str
    folder: Path
    runs: int
    rates: tuple[float, ...] | None
    """Learning rates to try on every data set; None means those of the recipe."""
    overrides: tuple[str, ...]

    @property
    def overridden(self) -> set[str]:
        """The keys of the overrides, without their sections."""
        return {_key(override) for override in self.overrides}


def make_plan(
    suite: str, model: str, folder: Path | None, runs: int, overrides: Sequence[str], rates: Sequence[float] | None
) -> SuitePlan:
    """Check the arguments and return a plan; its folder is `folder`, else run.folder=…, else runs/suite-NAME-MODEL."""
    if runs < 1:
        raise ConfigError(f"--runs {runs}: give 1 or more; the paper has {RUNS}")
    if rates is not None and (not rates or not all(0 < rate < math.inf for rate in rates)):
        raise ConfigError(f"rates = {', '.join(map(str, rates)) or 'none'}: give learning rates above 0")
    remaining = []
    for override in overrides:
        key, value = _key(override), override.partition("=")[2].strip()
        if key in DECIDED:
            raise ConfigError(f"{override.strip()}: a suite decides {key} itself, by {DECIDED[key]}: leave it out")
        if key == RATE and rates is not None:
            raise ConfigError(f"{override.strip()} and rates are one too many: give one of them")
        if key == FOLDER and value:
            folder = folder or Path(value)
        else:
            remaining.append(override)
    folder = folder or Path("runs") / f"suite-{suite}-{short_name(model)}"
    return SuitePlan(model, folder, runs, None if rates is None else tuple(dict.fromkeys(rates)), tuple(remaining))


def _key(override: str) -> str:
    return override.partition("=")[0].strip().rpartition(".")[2]


@dataclass(frozen=True)
class TransferTarget:
    """A data set that a model can be transferred to."""

    name: str
    recipe: Recipe
    changes: dict[str, dict[str, Any]]
    """Changes of the recipe for this data set, by section."""
    choosing: dict[str, Any]
    """Values of the section `data` in the runs that choose the learning rate."""
    chosen_on: str
    """The images that choose the learning rate, in words."""
    training: dict[str, Any]
    """Values of the section `data` in the runs on all training images."""
    images: tuple[int, int]
    """Number of training images while choosing, and in the final runs."""
    test: Source
    notes: tuple[str, ...] = ()
    """Sentences about data that is not what the name of the data set promises."""
    extra: Extra | None = None
    prepare: Callable[[RunConfig, bool], None] | None = None
    """Called before the first run with the configuration and whether a learning rate is to be chosen."""


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

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        extra = values.pop("extra")
        return {**values, **extra}


@dataclass(frozen=True)
class TransferResult:
    """The result of a transfer to one data set."""

    name: str
    rate: float
    tried: tuple[Trial, ...]
    runs: tuple[ScoredRun, ...]
    deviations: dict[str, tuple[Any, Any]]
    """Keys whose values differ from the recipe: the recipe's value, and the value used."""
    notes: tuple[str, ...]

    @property
    def accuracies(self) -> list[float]:
        return [run.accuracy for run in self.runs]

    def as_json(self) -> dict[str, Any]:
        """Return all numbers of all runs for JSON."""
        mean, deviation = mean_and_deviation(self.accuracies)
        return {
            "mean": mean,
            "deviation": deviation,
            "rate": self.rate,
            "runs": [run.as_json() for run in self.runs],
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
    """Yield the lines below a table: deviations from the paper, unusual data, and data sets without a result.

    Args:
        results: the results so far, by data set.
        available: the data sets whose data was found.
        sources: for each data set of the suite, where to get it.
    """
    keys = sorted({key for outcome in results.values() for key in outcome.deviations})
    if keys:
        yield f"- **not the paper's protocol**: other values of {', '.join(keys)}"
    for name, outcome in results.items():
        for note in outcome.notes:
            yield f"- {name}: {note}"
    for name, source in sources.items():
        if name not in available:
            yield f"- {name} has no data: {source}"
        elif name not in results:
            yield f"- {name} is still to come"


# ---- Configurations --------------------------------------------------------------------------------------------------


def make_config(plan: SuitePlan, target: TransferTarget) -> RunConfig:
    """Return the configuration of a run that chooses the learning rate.

    If the overrides change the length of the training, the warm-up keeps its share of it.
    """
    tree = _build_tree(plan, target)
    overrides = list(plan.overrides)
    if plan.overridden & {"steps", "epochs"} and "warmup_steps" not in plan.overridden:
        warmup = int(tree["schedule"]["warmup_steps"])
        steps = count_steps(resolve(tree, [*overrides, "schedule.warmup_steps=0"]), target.images[1])
        overrides.append(f"schedule.warmup_steps={warmup * steps // target.recipe.steps}")
    config = resolve(tree, overrides)
    least = min(target.images) if len(list_rates(plan, target, config)) > 1 else target.images[1]
    if config.data.batch_size > least:
        raise ConfigError(
            f"{target.name}: data.batch_size = {config.data.batch_size} is more than the {least} images to train on: "
            f"give data.batch_size={least} or fewer"
        )
    return config


def _build_tree(plan: SuitePlan, target: TransferTarget) -> dict[str, Any]:
    tree = target.recipe.config
    for section, values in target.changes.items():
        tree[section] |= values
    tree["model"]["weights"] = plan.model
    tree["data"] |= target.choosing
    # There are many runs, and the newest checkpoint is enough to resume from.
    tree["run"] |= {"folder": str(plan.folder / target.name), "keep": 1}
    return tree


def list_rates(plan: SuitePlan, target: TransferTarget, config: RunConfig) -> tuple[float, ...]:
    """Return the learning rates to try: those of the overrides or the plan, else those of the paper."""
    if RATE in plan.overridden:
        return (config.optimizer.learning_rate,)
    return plan.rates or target.recipe.learning_rates


def find_deviations(plan: SuitePlan, target: TransferTarget, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from the recipe, apart from the chosen learning rate."""
    deviations = {key: (then, now) for key, then, now in find_differences(resolve(_build_tree(plan, target)), config)}
    deviations.pop(f"optimizer.{RATE}", None)
    tried = list_rates(plan, target, config)
    if tried != target.recipe.learning_rates:
        deviations["learning rates"] = (list(target.recipe.learning_rates), list(tried))
    if plan.runs != RUNS:
        deviations["runs"] = (RUNS, plan.runs)
    return deviations


# ---- Training and scoring --------------------------------------------------------------------------------------------


def transfer_to_all(
    plan: SuitePlan, targets: Sequence[TransferTarget], write: Callable[[dict[str, TransferResult]], None]
) -> Generator[str, None, dict[str, TransferResult]]:
    """Transfer to each target; yield lines to print, and return the results by name.

    `write` is called with the results so far after each target.
    """
    for target in targets:
        make_config(plan, target)  # raises errors before anything is trained
    results: dict[str, TransferResult] = {}
    for target in targets:
        results[target.name] = yield from transfer_to(plan, target)
        write(results)
    return results


def transfer_to(plan: SuitePlan, target: TransferTarget) -> Generator[str, None, TransferResult]:
    """Choose a learning rate, train on all images, and score; yield lines to print, and return the result.

    Finished runs are not trained again.
    """
    config = make_config(plan, target)
    candidates = list_rates(plan, target, config)
    if target.prepare is not None:
        target.prepare(config, len(candidates) > 1)
    tried, rate = [], candidates[0]
    choosing = f"{len(candidates)} to choose the learning rate and " if len(candidates) > 1 else ""
    steps = count_steps(config, target.images[1])
    yield f"{target.name}: {choosing}{plan.runs} on all images: trainings of {steps:,} steps"
    if len(candidates) > 1:
        for trial in run_trials(config, candidates):
            tried.append(trial)
            outcome = trial.failure or f"{trial.accuracy:.1%} on {target.chosen_on}"
            yield f"{target.name}: learning rate {trial.rate:.3g}: {outcome}"
        rate = choose_best(tried).rate
        yield f"{target.name}: chosen: {rate:.3g}"
    else:
        yield f"{target.name}: learning rate {rate:.3g}: the only one, so there is nothing to choose"
    scored = []
    for seed in range(plan.runs):
        update = {"optimizer": {RATE: rate}, "data": target.training, "run": {"seed": seed}}
        scored.append(_train_and_score(change_config(config, update, f"seed-{seed}"), target))
        yield f"{target.name}: seed {seed}: {scored[-1].accuracy:.2%} of {scored[-1].count:,} test images"
    notes = list(target.notes)
    if unreadable := max(run.unreadable for run in scored):
        notes.append(f"test images that cannot be read and are not counted: {unreadable:,}")
    deviations = find_deviations(plan, target, config)
    return TransferResult(target.name, rate, tuple(tried), tuple(scored), deviations, tuple(notes))


def _train_and_score(config: RunConfig, target: TransferTarget) -> ScoredRun:
    result = run_training(config)
    predictions = predict_test_images(config, result.model, target.test)
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


def predict_test_images(config: RunConfig, model: Path, source: Source) -> Indices:
    """Return the predicted class of every image. The run keeps them: predicting can be slower than training."""
    path = config.run.folder / PREDICTIONS
    with join_ranks(config.run.device, config.run.timeout) as ranks:
        of = _digest(model, source) if ranks.is_first else ""
        found: Indices | None = ranks.broadcast_from_first(_read_predictions(path, of) if ranks.is_first else None)
        if found is None:
            found = _compute_predictions(config, model, source, ranks)
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


def _compute_predictions(config: RunConfig, model: Path, source: Source, ranks: Ranks) -> Indices:
    loaded = load(model)
    options = InferenceOptions(batch_size=config.data.batch_size, workers=config.data.workers, device=config.run.device)
    found: Indices = np.full(len(source), NONE, dtype=np.int64)
    for batch, logits in run_batches(loaded, source, loaded, options, ranks):
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
