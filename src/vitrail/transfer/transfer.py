"""One set of a suite, as the paper transfers: choose a learning rate, train again on everything, score on the test.

runs/suite-NAME/SET/
    sweep-RATE/            a run for each learning rate, scored on what was held out
    seed-0/, seed-1/, …    runs on all of the training images; predictions.npz: what each says about the test part
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
"""Of which the paper reports mean and deviation."""
DECIDED = {
    "weights": "--model",
    "name": "--model",
    "source": "--data",
    "validate_on": "what it chooses by",
    "holdout": "what it chooses by",
    "seed": "--runs",
}
"""Keys that are the suite's affair, and what takes their place."""
RATE, FOLDER = "learning_rate", "folder"
PREDICTIONS = "predictions.npz"
NONE = -1
"""In the place of a prediction for an image that could not be read."""

Extra = Callable[[Source, Indices], dict[str, int]]
"""More to count: from the test part and the predictions to numbers by name."""


@dataclass(frozen=True)
class SuitePlan:
    """What holds for all sets of a suite."""

    model: str
    folder: Path
    runs: int
    rates: tuple[float, ...] | None
    """To try on every set; None for the recipe's."""
    overrides: tuple[str, ...]

    @property
    def given(self) -> set[str]:
        """The names of the keys that a person gave, without their sections."""
        return {_key(override) for override in self.overrides}


def make_plan(
    suite: str, model: str, folder: Path | None, runs: int, overrides: Sequence[str], rates: Sequence[float] | None
) -> SuitePlan:
    """Checked; the folder is that of the suite and the model unless given, as an argument or as run.folder=…"""
    if runs < 1:
        raise ConfigError(f"--runs {runs}: give 1 or more; the paper has {RUNS}")
    if rates is not None and (not rates or not all(0 < rate < math.inf for rate in rates)):
        raise ConfigError(f"rates = {', '.join(map(str, rates)) or 'none'}: give learning rates above 0")
    kept = []
    for override in overrides:
        key, value = _key(override), override.partition("=")[2].strip()
        if key in DECIDED:
            raise ConfigError(f"{override.strip()}: a suite decides {key} itself, by {DECIDED[key]}: leave it out")
        if key == RATE and rates is not None:
            raise ConfigError(f"{override.strip()} and rates are one too many: give one of them")
        if key == FOLDER and value:
            folder = folder or Path(value)
        else:
            kept.append(override)
    tried = None if rates is None else tuple(dict.fromkeys(rates))
    return SuitePlan(model, folder or Path("runs") / f"suite-{suite}-{short_name(model)}", runs, tried, tuple(kept))


def _key(override: str) -> str:
    return override.partition("=")[0].strip().rpartition(".")[2]


@dataclass(frozen=True)
class TransferTarget:
    """A set that is ready to be transferred to."""

    name: str
    recipe: Recipe
    changes: dict[str, dict[str, Any]]
    """Of the recipe, for this set."""
    choosing: dict[str, Any]
    """Of the section data, for the runs that choose: where the images are, and what is held out."""
    chosen_on: str
    """The part that decides, in words."""
    training: dict[str, Any]
    """Of the section data, for the runs on everything."""
    images: tuple[int, int]
    """To train on while choosing, and in the end."""
    test: Source
    notes: tuple[str, ...] = ()
    """Where the data is not what the set's name says."""
    extra: Extra | None = None


@dataclass(frozen=True)
class ScoredRun:
    """A run on everything, and how many images of the test part it gets right."""

    seed: int
    rate: float
    folder: str
    hits: int
    count: int
    unreadable: int
    accuracy: float
    extra: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Flat."""
        told = asdict(self)
        extra = told.pop("extra")
        return {**told, **extra}


@dataclass(frozen=True)
class TransferResult:
    """Of one set."""

    name: str
    rate: float
    tried: tuple[Trial, ...]
    runs: tuple[ScoredRun, ...]
    deviations: dict[str, tuple[Any, Any]]
    """Keys whose values are not the recipe's: its own, and ours."""
    notes: tuple[str, ...]

    @property
    def accuracies(self) -> list[float]:
        """Of the runs."""
        return [run.accuracy for run in self.runs]

    def as_json(self) -> dict[str, Any]:
        """Every number of every run."""
        mean, deviation = mean_and_deviation(self.accuracies)
        return {
            "mean": mean,
            "deviation": deviation,
            "rate": self.rate,
            "runs": [run.as_json() for run in self.runs],
            "tried": [_trial(trial) for trial in self.tried],
            "deviations": {key: list(values) for key, values in self.deviations.items()},
            "notes": list(self.notes),
        }


def _trial(trial: Trial) -> dict[str, Any]:
    measured = {"failure": trial.failure} if trial.failure else {"accuracy": trial.accuracy, "loss": trial.loss}
    return {"rate": trial.rate, "folder": trial.folder.as_posix(), **measured}


def list_remarks(outcomes: dict[str, TransferResult], found: Collection[str], sources: dict[str, str]) -> Iterator[str]:
    """Lines below a table: where anything was changed that the paper says, where data is not what it should be, and
    every set without a result.

    `found`: the sets whose data is there; `sources`: where to get each set of the suite.
    """
    keys = sorted({key for outcome in outcomes.values() for key in outcome.deviations})
    if keys:
        yield f"- **not the paper's protocol**: other values of {', '.join(keys)}"
    for name, outcome in outcomes.items():
        for note in outcome.notes:
            yield f"- {name}: {note}"
    for name, source in sources.items():
        if name not in found:
            yield f"- {name} has no data: {source}"
        elif name not in outcomes:
            yield f"- {name} is still to come"


# ---- Configurations --------------------------------------------------------------------------------------------------


def make_config(plan: SuitePlan, subject: TransferTarget) -> RunConfig:
    """Of a run that chooses. A warm-up goes with the length: what it is of the recipe's, it is of the one given."""
    tree = _tree(plan, subject)
    overrides = list(plan.overrides)
    if plan.given & {"steps", "epochs"} and "warmup_steps" not in plan.given:
        warmup = int(tree["schedule"]["warmup_steps"])
        steps = count_steps(resolve(tree, [*overrides, "schedule.warmup_steps=0"]), subject.images[1])
        overrides.append(f"schedule.warmup_steps={warmup * steps // subject.recipe.steps}")
    config = resolve(tree, overrides)
    least = min(subject.images) if len(list_rates(plan, subject, config)) > 1 else subject.images[1]
    if config.data.batch_size > least:
        raise ConfigError(
            f"{subject.name}: data.batch_size = {config.data.batch_size} is more than the {least} images to train on: "
            f"give data.batch_size={least} or fewer"
        )
    return config


def _tree(plan: SuitePlan, subject: TransferTarget) -> dict[str, Any]:
    tree = subject.recipe.config
    for section, values in subject.changes.items():
        tree[section] |= values
    tree["model"]["weights"] = plan.model
    tree["data"] |= subject.choosing
    # The newest checkpoint is enough to go on from, and there are many runs.
    tree["run"] |= {"folder": str(plan.folder / subject.name), "keep": 1}
    return tree


def list_rates(plan: SuitePlan, subject: TransferTarget, config: RunConfig) -> tuple[float, ...]:
    """To try: those that were given, else the paper's."""
    if RATE in plan.given:
        return (config.optimizer.learning_rate,)
    return plan.rates or subject.recipe.learning_rates


def find_deviations(plan: SuitePlan, subject: TransferTarget, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """What makes it another training than the recipe's, apart from the learning rate that was chosen."""
    found = {key: (then, now) for key, then, now in find_differences(resolve(_tree(plan, subject)), config)}
    found.pop(f"optimizer.{RATE}", None)
    tried = list_rates(plan, subject, config)
    if tried != subject.recipe.learning_rates:
        found["learning rates"] = (list(subject.recipe.learning_rates), list(tried))
    if plan.runs != RUNS:
        found["runs"] = (RUNS, plan.runs)
    return found


# ---- Training and scoring --------------------------------------------------------------------------------------------


def transfer_to(
    plan: SuitePlan, subject: TransferTarget, prepare: Callable[[RunConfig, bool], None] | None = None
) -> Generator[str, None, TransferResult]:
    """Lines on what was found; then everything. What was finished before is not trained again.

    `prepare`: called before the first run, with the configuration and whether there is anything to choose.
    """
    config = make_config(plan, subject)
    candidates = list_rates(plan, subject, config)
    if prepare is not None:
        prepare(config, len(candidates) > 1)
    tried, rate = [], candidates[0]
    choosing = f"{len(candidates)} to choose the learning rate and " if len(candidates) > 1 else ""
    yield f"{subject.name}: {choosing}{plan.runs} on all images: trainings of {_steps(config, subject):,} steps"
    if len(candidates) > 1:
        for trial in run_trials(config, candidates):
            tried.append(trial)
            told = trial.failure or f"{trial.accuracy:.1%} on {subject.chosen_on}"
            yield f"{subject.name}: learning rate {trial.rate:.3g}: {told}"
        rate = choose_best(tried).rate
        yield f"{subject.name}: chosen: {rate:.3g}"
    else:
        yield f"{subject.name}: learning rate {rate:.3g}: the only one, so there is nothing to choose"
    scored = []
    for seed in range(plan.runs):
        update = {"optimizer": {RATE: rate}, "data": subject.training, "run": {"seed": seed}}
        scored.append(_run(change_config(config, update, f"seed-{seed}"), subject))
        yield f"{subject.name}: seed {seed}: {scored[-1].accuracy:.2%} of {scored[-1].count:,} test images"
    return TransferResult(
        subject.name, rate, tuple(tried), tuple(scored), find_deviations(plan, subject, config), _notes(subject, scored)
    )


def _steps(config: RunConfig, subject: TransferTarget) -> int:
    return count_steps(config, subject.images[1])


def _notes(subject: TransferTarget, scored: Sequence[ScoredRun]) -> tuple[str, ...]:
    broken = max(run.unreadable for run in scored)
    return (
        (*subject.notes, f"test images that cannot be read and are not counted: {broken:,}")
        if broken
        else subject.notes
    )


def _run(config: RunConfig, subject: TransferTarget) -> ScoredRun:
    result = run_training(config)
    predictions = predict_test_images(config, result.model, subject.test)
    labels = subject.test.labels(0, len(subject.test))
    read = predictions != NONE
    hits, count = int((predictions == labels)[read].sum()), int(read.sum())
    if not count:
        raise DataError(
            f"{subject.name}: none of the {len(read):,} test images can be read: `vitrail data check` says why"
        )
    return ScoredRun(
        seed=config.run.seed,
        rate=config.optimizer.learning_rate,
        folder=result.folder.as_posix(),
        hits=hits,
        count=count,
        unreadable=len(read) - count,
        accuracy=hits / count,
        extra=subject.extra(subject.test, predictions) if subject.extra is not None else {},
    )


def predict_test_images(config: RunConfig, model: Path, source: Source) -> Indices:
    """The model's class for every image; kept beside it, since a test part can take longer than the training."""
    path = config.run.folder / PREDICTIONS
    with join_ranks(config.run.device, config.run.timeout) as ranks:
        of = _digest(model, source) if ranks.is_first else ""
        found: Indices | None = ranks.broadcast_from_first(_kept(path, of) if ranks.is_first else None)
        if found is None:
            found = _computed(config, model, source, ranks)
            if ranks.is_first:
                file = io.BytesIO()
                np.savez(file, of=np.array(of), predictions=found)
                write_whole(path, file.getvalue())
    return found


def _digest(model: Path, source: Source) -> str:
    """What tells these weights and these images from others."""
    return " ".join([compute_fingerprint(source), *(sha256(path) for path in sorted(model.glob("*.safetensors")))])


def _kept(path: Path, of: str) -> Indices | None:
    """What was predicted before, if it was by the same weights and for the same images."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
            return kept["predictions"].astype(np.int64) if str(kept["of"]) == of else None
    except (OSError, ValueError, KeyError, BadZipFile):
        return None


def _computed(config: RunConfig, model: Path, source: Source, ranks: Ranks) -> Indices:
    loaded = load(model)
    options = InferenceOptions(batch_size=config.data.batch_size, workers=config.data.workers, device=config.run.device)
    found: Indices = np.full(len(source), NONE, dtype=np.int64)
    for batch, logits in run_batches(loaded, source, loaded, options, ranks):
        classes = logits.argmax(dim=1).cpu()
        found[batch.indices[batch.mask].numpy()] = classes[batch.mask].numpy()
    together: Indices = np.maximum.reduce(ranks.gather(found))  # each has its own images, and nothing of the others'
    return together


def run_on_first_rank(config: RunConfig, work: Callable[[], None]) -> None:
    """Done by the first rank, while the others wait; an error of its own is everyone's."""
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
