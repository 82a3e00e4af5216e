"""A whole training run in its folder: from a configuration to a model that can be loaded.

runs/name/
    config.toml          all of the configuration
    metrics.jsonl        what was measured, a line for each record
    tensorboard/         the same for TensorBoard
    checkpoints/         to go on from
    model/               the result, which `vitrail.load` takes; the folder above will do as well
    curves.png, .svg     the learning curves
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.config import TrainingCost, show_size
from vitrail.errors import ConfigError, TrainingError
from vitrail.model.architecture import Architecture, TimmArchitecture, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.cost import FORWARD_AND_BACKWARD, compute_cost, count_tokens
from vitrail.model.create import build_empty_model
from vitrail.system.device import device_name
from vitrail.system.files import write_whole
from vitrail.system.ranks import Ranks, explain_lost_rank, join_ranks
from vitrail.training import records
from vitrail.training.build import build_run
from vitrail.training.config import RunConfig
from vitrail.training.curves import draw_curves
from vitrail.training.loop import full_state, resume, train
from vitrail.training.resolve import build_config, read_toml, to_toml
from vitrail.training.run import Run
from vitrail.training.trackers import open_trackers
from vitrail.weights.card import some
from vitrail.weights.save import save

ADJUSTABLE = {"data": {"source", "workers", "in_memory"}, "optimizer": {"accumulate"}}
"""What may differ when a run is gone on with, besides all of the section run but the seed."""


CONFIG_FILE, LOCK, DATA, WEIGHTS = "config.toml", ".lock", ".data", ".weights"
TRIAL_PREFIX = "sweep-"
"""Runs inside a run's folder that a sweep makes first."""


@dataclass(frozen=True)
class TrainingResult:
    """Of a finished run."""

    folder: Path
    model: Path
    steps: int
    evaluation: dict[str, float] | None
    """What the last evaluation measured, if there was one."""
    evaluated: int
    """On so many images."""


def run_training(config: RunConfig) -> TrainingResult:
    """Train, from the beginning or from where an earlier start got to."""
    folder = config.run.folder
    with join_ranks(config.run.device, config.run.timeout) as ranks, _settings(config), _in_one_line(folder, ranks):
        run = build_run(config, ranks)
        with _claimed(run), _sound_attention(run.objective.model.architecture):
            resumed = resume(run)
            run.display.start_step = run.progress.step
            if ranks.is_first:
                run.trackers = open_trackers(
                    config.run.trackers, folder, config.model_dump(mode="json"), run.progress.step
                )
            try:
                with run.display:
                    _introduce(run, resumed)
                    train(run)
            finally:
                for tracker in run.trackers:
                    tracker.close()
            return finish(run)


def finish(run: Run) -> TrainingResult:
    """Write the model and the curves. Every rank comes here; the first writes."""
    folder = run.config.run.folder
    state = full_state(run)
    kept = records.read_records(run.records.path) if run.ranks.is_first else []
    if run.ranks.is_first:
        model = exported(run.objective.model, state)
        model.training_cost, model.learned_from = spent(run), run.data
        save(model, folder / "model", notes=story(run, kept))
        draw_curves(kept, folder / "curves.png", str(folder))
    evaluations = [entry for entry in kept if entry["kind"] == "evaluation" and entry["step"] == run.steps]
    measured = {n: v for n, v in evaluations[-1].items() if isinstance(v, float)} if evaluations else None
    images = len(run.evaluation.source) if run.evaluation is not None else 0
    return TrainingResult(folder, folder / "model", run.steps, run.ranks.broadcast_from_first(measured), images)


def exported(trained: ImageModel, state: dict[str, torch.Tensor]) -> ImageModel:
    """A model of its own with the weights of an objective's state, ready to evaluate."""
    model = build_empty_model(trained.architecture)
    own = {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}
    model.load_state_dict(own, assign=True)
    model.preprocessing, model.labels = trained.preprocessing, trained.labels
    if trained.origin is not None and trained.origin.format != "native":
        # Where the numbers began, and under what licence, stays true of what was made of them.
        notes = (*trained.origin.notes, "trained further since")
        model.origin = trained.origin.model_copy(update={"notes": notes})
    return model.eval()


def spent(run: Run) -> TrainingCost:
    """What it took to get here, with what the weights that it began from had cost."""
    forward = compute_cost(run.objective.model.architecture).flops
    here = TrainingCost(
        flops=FORWARD_AND_BACKWARD * forward * run.progress.position,
        device_seconds=run.progress.seconds * run.ranks.size,
        devices=(device_name(run.ranks.device),),
    )
    return here if run.config.model.weights is None else here.after(run.objective.model.training_cost)


def story(run: Run, kept: list[dict[str, Any]]) -> str:
    """How the model came about, for its card."""
    config, data = run.config, run.training.source
    run_training = config.model.name or config.model.weights
    lines = [
        f"{run.steps:,} steps of {config.data.batch_size} images, {run.training.epoch:.3g} epochs of {len(data):,} "
        f"images of `{config.data.source}`, from {'fresh weights' if config.model.name else f'`{run_training}`'}, "
        f"objective {config.objective.kind}, seed {config.run.seed}, {run.progress.seconds:,.0f} s on "
        f"{run.ranks.size} × {device_name(run.ranks.device)}."
    ]
    for entry in kept[-1:]:
        if entry["kind"] == "evaluation":
            told = ", ".join(f"{name} {value:.4g}" for name, value in entry.items() if isinstance(value, float))
            images = len(run.evaluation.source) if run.evaluation is not None else 0
            lines.append(f"At the end on the {images:,} images of {entry['part']}: {told}.")
    lines.append(f"```toml\n{to_toml(config)}```")
    return "\n\n".join(lines)


def _introduce(run: Run, resumed: Path | None) -> None:
    """What is about to happen, in a few lines."""
    if not run.ranks.is_first:
        return
    model, data, config = run.objective.model, run.training.source, run.config
    parameters = sum(parameter.numel() for parameter in run.objective.parameters())
    line = run.display.line
    line(f"data: {len(data):,} images to train on, " + _validation(run))
    if config.objective.kind == "classification":
        line(f"classes: {data.num_classes}" + (f", {some(data.classes)}" if data.classes else ""))
    name = config.model.name or config.model.weights
    line(f"model: {name}, {parameters:,} parameters, images of {show_size(model.image_size)} pixels")
    line(
        f"training: {run.steps:,} steps of {config.data.batch_size} images on {run.ranks.size} × "
        f"{device_name(run.ranks.device)}, {str(run.precision).removeprefix('torch.')}, in {config.run.folder}"
    )
    if run.progress.step == run.steps:
        line("it is finished already: there is nothing left to train")
    elif resumed is not None:
        line(f"going on from step {run.progress.step:,}")


def _validation(run: Run) -> str:
    if run.evaluation is None:
        hint = "" if run.config.data.validate_on == "none" else " (data.holdout=0.1 would set some aside)"
        return f"none to validate on{hint}"
    return f"{len(run.evaluation.source):,} to validate on"


@contextlib.contextmanager
def _settings(config: RunConfig) -> Iterator[None]:
    """Torch's own settings, as they were again afterwards."""
    before, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            yield
    finally:
        if config.run.deterministic:
            torch.use_deterministic_algorithms(before)
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _sound_attention(architecture: Architecture) -> Iterator[None]:
    """Without cuDNN's kernel for sequences of an odd multiple of 64: there its backward pass gives gradients that are
    no numbers once a row's logsumexp is below −88 (cuDNN 9.19, torch 2.11 on an H200; pytorch issue 196678). Elsewhere
    it is sound, and the fastest. Of timm's networks the lengths are not known: they go without it."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    if isinstance(architecture, TimmArchitecture):
        torch.backends.cuda.enable_cudnn_sdp(False)
    if isinstance(architecture, VitArchitecture):
        axial = architecture.block == "axial"
        lengths = architecture.grid(architecture.image_size) if axial else (count_tokens(architecture),)
        torch.backends.cuda.enable_cudnn_sdp(before and all(length % 128 != 64 for length in lengths))
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextlib.contextmanager
def _claimed(run: Run) -> Iterator[None]:
    """The run folder is ours while the block runs, and holds this configuration."""
    config, ranks = run.config, run.ranks
    wrong, lock = None, None
    if ranks.is_first:
        try:
            config.run.folder.mkdir(parents=True, exist_ok=True)
            _check_folder(config.run.folder)
            lock = _lock(config.run.folder)
            _agree(config, run.data, run.weights)
        except (ConfigError, TrainingError) as error:
            wrong = error
        except OSError as error:
            wrong = TrainingError(f"{config.run.folder} cannot be written: {error.strerror or error}")
    wrong = ranks.broadcast_from_first(wrong)
    try:
        if wrong is not None:
            raise wrong
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _check_folder(folder: Path) -> None:
    """Nothing is written among other files."""
    others = [path.name for path in folder.iterdir() if path.name != LOCK and not path.name.startswith(TRIAL_PREFIX)]
    if others and not (folder / CONFIG_FILE).exists():
        raise ConfigError(f"{folder} holds {min(others)} and is no run: give a new run.folder")


def _lock(folder: Path) -> int | None:
    """Held by one process at a time, and let go by the system when that ends, however it ends."""
    if sys.platform == "win32":
        return None
    import fcntl

    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        # Not flock: workers would inherit it, and outlive a killed run by some seconds.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        raise TrainingError(
            f"another process is training in {folder}: wait for it, or give another run.folder"
        ) from None
    return descriptor


def _agree(config: RunConfig, data: str, weights: str) -> None:
    """With the images, weights and configuration that the run was begun with; the first start writes them down."""
    path = config.run.folder / CONFIG_FILE
    facts = ((DATA, data, "images", config.data.source), (WEIGHTS, weights, "weights", config.model.weights))
    for name, now, what, where in facts:
        told = config.run.folder / name
        if told.exists() and told.read_text(encoding="utf-8") != now:
            raise ConfigError(
                f"the run in {config.run.folder} was begun with other {what} than {where} has now: give another "
                "run.folder"
            )
    if path.exists():
        for key, then, now in find_differences(build_config(read_toml(path)), config):
            raise ConfigError(
                f"the run in {config.run.folder} was begun with {key} = {then!r}, not {now!r}: give another "
                "run.folder, or the same value to go on with it"
            )
    for name, now, _, _ in facts:
        write_whole(config.run.folder / name, now.encode())
    write_whole(path, to_toml(config).encode())


def find_differences(then: RunConfig, now: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """The keys that make it another run, with their values then and now."""
    old, new = then.model_dump(), now.model_dump()
    for section, values in old.items():
        free = set(values) - {"seed"} if section == "run" else ADJUSTABLE.get(section, set())
        for key in sorted((set(values) | set(new[section])) - free):
            if values.get(key) != new[section].get(key):
                yield f"{section}.{key}", values.get(key), new[section].get(key)


@contextlib.contextmanager
def _in_one_line(folder: Path, ranks: Ranks) -> Iterator[None]:
    """What the machine does to a run is told in a line, with what to do next."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise TrainingError(
            "the GPU has too little memory: a larger optimizer.accumulate computes a batch in more parts, and "
            "run.gradient_checkpointing=true keeps less"
        ) from None
    except RuntimeError as error:
        if ranks.size > 1 and (told := explain_lost_rank(error)):
            raise TrainingError(f"rank {ranks.rank}: {told}; start again to go on from the last checkpoint") from None
        raise
    except OSError as error:
        if error.filename is None and not error.strerror:
            raise
        raise TrainingError(f"{error.filename or folder}: {error.strerror}; the last whole checkpoint stays") from None
