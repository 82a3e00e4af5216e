"""The folder of a run: one process trains in it at a time, and always with the same configuration.

runs/name/
    config.toml          the whole configuration
    metrics.jsonl        what was measured, one record a line
    tensorboard/         the same for TensorBoard
    checkpoints/         where a stopped run goes on from
    model/               the result; `vitrail.load` takes this folder or the one above
    best/                the weights with the best evaluation, if they are not the last ones
    best.json            the step of the best evaluation, and which of the two folders has its weights
    curves.png, .svg     the learning curves
    start/               the weights that it starts from, if no file has them: a loaded model, or a fitted head
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from vitrail.errors import ConfigError, TrainingError
from vitrail.system.files import describe_reason, write_whole
from vitrail.system.locks import lock_file
from vitrail.training.config import RunConfig
from vitrail.training.resolve import build_config, read_toml, to_toml
from vitrail.training.run import RunSetup

ADJUSTABLE = {"data": {"source", "workers", "in_memory"}, "optimizer": {"accumulate"}}
"""Keys that may change on resume, besides everything under `run` except `FIXED`."""
FIXED = {"seed", "fp8"}
"""Keys under `run` that may not change on resume, because they change what is learned."""
CONFIG_FILE, LOCK_FILE, DATA_FILE, WEIGHTS_FILE = "config.toml", ".lock", ".data", ".weights"
FEWSHOT_FILE = ".fewshot"
TRIAL_PREFIX = "sweep-"
"""Folders with this prefix, inside a run's folder, are the runs of a sweep that comes before it."""
START_FOLDER = "start"
"""The folder, inside a run's folder, of the weights that the run starts from, if no file has them."""


@contextmanager
def claim_folder(setup: RunSetup) -> Iterator[None]:
    """Lock the run folder while the block runs, and make sure that it holds this run or none.

    Raises:
        ConfigError: The folder holds other files, or a run with other images, weights or configuration.
        TrainingError: Another process is training in the folder, or it cannot be written.
    """
    folder, ranks = setup.config.run.folder, setup.ranks
    failure, lock = None, None
    if ranks.is_first:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            check_other_files(folder)
            lock = _lock(folder)
            fewshot = None if setup.fewshot is None else setup.fewshot.fingerprint
            check_same_run(setup.config, setup.data_fingerprint, setup.weights_digest, fewshot)
        except (ConfigError, TrainingError) as error:
            failure = error
        except OSError as error:
            failure = TrainingError(f"{folder} cannot be written: {describe_reason(error)}")
    failure = ranks.broadcast_from_first(failure)
    try:
        if failure is not None:
            raise failure
        yield
    finally:
        if lock is not None:
            lock.close()


def check_other_files(folder: Path) -> None:
    """Raise a ConfigError if a folder has files of another kind: nothing is written among them."""
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    others = [name for name in names if name not in (LOCK_FILE, START_FOLDER) and not name.startswith(TRIAL_PREFIX)]
    if others and CONFIG_FILE not in names:
        raise ConfigError(f"{folder} holds {min(others)} and is no run: give a new run.folder")


def _lock(folder: Path) -> BinaryIO:
    """Lock the folder and return the locked file. The system unlocks it when the process ends, in any way."""
    try:
        return lock_file(folder / LOCK_FILE)
    except BlockingIOError:
        raise TrainingError(
            f"another process is training in {folder}: wait for it, or give another run.folder"
        ) from None


def check_same_run(
    config: RunConfig, data_fingerprint: str, weights_digest: str, fewshot_fingerprint: str | None = None
) -> None:
    """Check that images, weights and configuration are those the run was started with. The first start saves them.

    `fewshot_fingerprint` is None if few-shot accuracy is not measured now; it may have been before.
    """
    folder = config.run.folder
    facts: list[tuple[Path, str, str, str | None]] = [
        (folder / DATA_FILE, data_fingerprint, "images", config.data.source),
        (folder / WEIGHTS_FILE, weights_digest, "weights", config.model.weights),
    ]
    if fewshot_fingerprint is not None:
        run = config.run
        drawn_from = f"{run.fewshot_data or config.data.source} with run.fewshot_shots={run.fewshot_shots}"
        facts.append((folder / FEWSHOT_FILE, fewshot_fingerprint, "few-shot images", drawn_from))
    if (folder / CONFIG_FILE).exists():  # first: another share or holdout gives other images, and this names the key
        for key, then, now in find_differences(build_config(read_toml(folder / CONFIG_FILE)), config):
            raise ConfigError(
                f"the run in {folder} was begun with {key} = {then!r}, not {now!r}: give another "
                "run.folder, or the same value to go on with it"
            )
    for path, now, what, where in facts:
        if path.exists() and path.read_text(encoding="utf-8") != now:
            raise ConfigError(
                f"the run in {folder} was begun with other {what} than {where} has now: give another run.folder"
            )
    for path, now, _, _ in facts:
        write_whole(path, now.encode())
    write_whole(folder / CONFIG_FILE, to_toml(config).encode())


def find_differences(then: RunConfig, now: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key whose value makes it another run, with its value then and now."""
    old, new = then.model_dump(), now.model_dump()
    for section, values in old.items():
        free = set(values) - FIXED if section == "run" else ADJUSTABLE.get(section, set())
        for key in sorted((set(values) | set(new[section])) - free):
            if values.get(key) != new[section].get(key):
                yield f"{section}.{key}", values.get(key), new[section].get(key)
