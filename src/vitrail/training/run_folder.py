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

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vitrail.errors import ConfigError, TrainingError, VitrailError
from vitrail.system.files import describe_reason, write_whole
from vitrail.system.locks import lock_file
from vitrail.system.remote import RemoteError
from vitrail.training.checkpoint_folder import read_step
from vitrail.training.config import RunConfig
from vitrail.training.resolve import build_config, read_toml, to_toml
from vitrail.training.run import RunSetup

if TYPE_CHECKING:
    from vitrail.training.run_copy import RunCopy

log = logging.getLogger("vitrail")

ADJUSTABLE = {"data": {"source", "workers", "in_memory"}, "optimizer": {"accumulate"}}
"""Keys that may change on resume, besides everything under `run` except `FIXED`."""
FIXED = {"seed", "fp8"}
"""Keys under `run` that may not change on resume, because they change what is learned."""
CONFIG_FILE, LOCK_FILE, DATA_FILE, WEIGHTS_FILE = "config.toml", ".lock", ".data", ".weights"
FEWSHOT_FILE = ".fewshot"
FACT_FILES = (CONFIG_FILE, DATA_FILE, WEIGHTS_FILE, FEWSHOT_FILE)
"""The files that tell which run it is."""
WITHOUT_COPY = "the run can also go on without run.copy_to"
TRIAL_PREFIX = "sweep-"
"""Folders with this prefix, inside a run's folder, are the runs of a sweep that comes before it."""
START_FOLDER = "start"
"""The folder, inside a run's folder, of the weights that the run starts from, if no file has them."""


@contextmanager
def claim_folder(setup: RunSetup, copy: RunCopy | None = None) -> Iterator[None]:
    """Lock the run folder while the block runs, and make sure that it holds this run or none.

    If the run has a copy, which only the first rank has, it must be of this run too. What it has and the folder has
    not is fetched.

    Raises:
        ConfigError: The folder or the copy holds other files, or a run with other images, weights or configuration.
        TrainingError: Another process is training in the folder, or it cannot be written, or the copy cannot be read.
    """
    folder, ranks, lock = setup.config.run.folder, setup.ranks, None

    def claim() -> VitrailError | None:
        nonlocal lock
        try:
            folder.mkdir(parents=True, exist_ok=True)
            check_other_files(folder)
            lock = _lock(folder)
            facts = _list_facts(setup)
            if copy is not None:  # first: a folder must not become a run's if the copy is of another one
                _check_copy(copy, setup.config, facts)
            check_same_run(setup.config, facts)
            if copy is not None:
                _fetch_from_copy(copy, setup)
        except VitrailError as error:
            return error
        except RemoteError as error:
            return TrainingError(f"{error}; {WITHOUT_COPY}")
        except OSError as error:
            return TrainingError(f"{folder} cannot be written: {describe_reason(error)}")
        return None

    try:
        failure = ranks.run_without_timeout(claim if ranks.is_first else lambda: None)
        failure = ranks.broadcast_from_first(failure)
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


Facts = list[tuple[str, str, str, str | None]]
"""For each file that tells which run it is: its name, its content now, and what that is about and comes from."""


def _list_facts(setup: RunSetup) -> Facts:
    """Return what tells which run it is. Few-shot images are left out if they are not measured on now."""
    config, run = setup.config, setup.config.run
    facts: Facts = [
        (DATA_FILE, setup.data_fingerprint, "images", config.data.source),
        (WEIGHTS_FILE, setup.weights_digest, "weights", config.model.weights),
    ]
    if setup.fewshot is not None:
        drawn_from = f"{run.fewshot_data or config.data.source} with run.fewshot_shots={run.fewshot_shots}"
        facts.append((FEWSHOT_FILE, setup.fewshot.fingerprint, "few-shot images", drawn_from))
    return facts


def check_same_run(config: RunConfig, facts: Facts) -> None:
    """Check that images, weights and configuration are those the run was started with. The first start saves them."""
    folder = config.run.folder
    _compare_with(folder, str(folder), "run.folder", config, facts)
    for name, now, _, _ in facts:
        write_whole(folder / name, now.encode())
    write_whole(folder / CONFIG_FILE, to_toml(config).encode())


def _compare_with(folder: Path, place: str, key: str, config: RunConfig, facts: Facts) -> None:
    """Raise a ConfigError if the files in a folder tell of another run. `place` is where it is, and `key` says so."""
    if (folder / CONFIG_FILE).exists():  # first: another share or holdout gives other images, and this names the key
        for name, then, now in find_differences(build_config(read_toml(folder / CONFIG_FILE)), config):
            raise ConfigError(
                f"the run in {place} was begun with {name} = {then!r}, not {now!r}: give another "
                f"{key}, or the same value to go on with it"
            )
    for name, now, what, where in facts:
        if (folder / name).exists() and (folder / name).read_bytes() != now.encode():
            raise ConfigError(
                f"the run in {place} was begun with other {what} than {where} has now: give another {key}"
            )


def _check_copy(copy: RunCopy, config: RunConfig, facts: Facts) -> None:
    """Raise a ConfigError if the copy is of another run."""
    with copy.fetch_facts() as found:
        if found is None:
            return
        try:
            _compare_with(found, copy.address, "run.copy_to", config, facts)
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(found), copy.address)) from None


def _fetch_from_copy(copy: RunCopy, setup: RunSetup) -> None:
    """Fetch the newest checkpoint of the copy if the folder has no whole one as new, and write the facts there."""
    newest = -1
    with suppress(TrainingError):  # all of them are damaged: the copy may have whole ones
        path = setup.checkpoints.find_newest_here()
        newest = -1 if path is None else read_step(path)
    step = copy.fetch_newest(after=newest)
    if step is not None:
        log.warning("the checkpoint of step %s comes from the copy in %s", f"{step:,}", copy.address)
    copy.write_facts()


def find_differences(then: RunConfig, now: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key whose value makes it another run, with its value then and now."""
    old, new = then.model_dump(), now.model_dump()
    for section, values in old.items():
        free = set(values) - FIXED if section == "run" else ADJUSTABLE.get(section, set())
        for key in sorted((set(values) | set(new[section])) - free):
            if values.get(key) != new[section].get(key):
                yield f"{section}.{key}", values.get(key), new[section].get(key)
