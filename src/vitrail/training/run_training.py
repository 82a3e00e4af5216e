"""Train a model from a configuration, in a folder of its own (see run_folder.py for what is in it)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vitrail.data.locate import find_local_path
from vitrail.data.open import Data, name_data
from vitrail.errors import TrainingError
from vitrail.model.architecture import Architecture, TimmArchitecture, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.cost import count_tokens
from vitrail.system.device import NO_APPLE_MEMORY, device_name, explain_missing_operation
from vitrail.system.events import OnEvent, open_listener
from vitrail.system.files import describe_reason
from vitrail.system.ranks import Ranks, explain_lost_rank, join_ranks
from vitrail.training.build import build_run, prepare_run
from vitrail.training.checkpoint import resume
from vitrail.training.config import RunConfig
from vitrail.training.copy_thread import keep_copy
from vitrail.training.fewshot import FewshotRun, OpenFewshot
from vitrail.training.fit_batch import fit_batch
from vitrail.training.loop import explain_end, train
from vitrail.training.memory import OUT_OF_MEMORY
from vitrail.training.result import TrainingResult, save_result
from vitrail.training.run import Progress, RunSetup, TrainingRun
from vitrail.training.run_copy import RunCopy
from vitrail.training.run_folder import claim_folder
from vitrail.training.trackers import Tracker, open_trackers
from vitrail.weights.card import shorten_labels

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The environment variable without which cuBLAS refuses to be deterministic."""


def run_training(
    config: RunConfig,
    *,
    source: Data | None = None,
    start: ImageModel | None = None,
    fewshot: OpenFewshot | None = None,
    fits_batch: bool = False,
    on_event: OnEvent | None = None,
) -> TrainingResult:
    """Train a model, from the beginning or from the newest checkpoint in the run folder.

    Under `torchrun`, all ranks call this and get the same result.

    Args:
        config: The configuration.
        source: Images in place of those of `data.source`, which is then only a name for them.
        start: The model of `model.weights`, if it is loaded already. It is changed in place.
        fewshot: What opens the images for few-shot accuracy, if `run.fewshot_every` asks for it; it comes from
            vitrail/evaluation/training_fewshot.py, because training does not know how to evaluate features.
        fits_batch: Whether to try first in how many parts a batch fits into the memory of the device.
        on_event: Called with what happens, on the first rank (see vitrail/system/events.py).

    Raises:
        ConfigError: The configuration does not fit the data, the machine or the run in the folder.
        DataError: The data cannot be trained on.
        TrainingError: The machine failed: too little memory, a full disk, a lost rank. `Diverged` and `Stopped` are
            special cases: no finite gradients, and a stop signal.
    """
    folder = config.run.folder
    with (
        open_listener(on_event) as listener,
        join_ranks(config.run.device, config.run.timeout) as ranks,
        _apply_settings(config),
        _explain_failures(folder, ranks),
    ):
        ranks.run_without_timeout(lambda: _fetch_all_data(config, source))
        if fits_batch:
            config = fit_batch(config, ranks, listener, source, start)
        setup = prepare_run(config, ranks, source=source, start=start, open_fewshot=fewshot)
        copy = _open_copy(config, ranks)
        with (
            claim_folder(setup, copy),
            keep_copy(copy, setup.checkpoints),
            _avoid_broken_attention(setup.learner.objective.model.architecture),
        ):
            state = resume(setup)
            with _open_trackers(setup, state.progress.step) as trackers:
                run = build_run(setup, state.progress, trackers, listener)
                run.on_event("training", _describe_run(run, state.progress))
                try:
                    train(run, state)
                finally:
                    why = explain_end(state.progress, run.steps, config)
                    ended = {"folder": str(folder), "step": state.progress.step, "steps": run.steps, "why_early": why}
                    run.on_event("trained", ended)
            return save_result(run, state.progress)


def _fetch_all_data(config: RunConfig, source: Data | None) -> None:
    """Copy the data of a run to this machine, if an address names it."""
    find_local_path(config.data.source if source is None else name_data(source))
    if config.run.fewshot_every is not None and config.run.fewshot_data is not None:
        find_local_path(config.run.fewshot_data)


def _open_copy(config: RunConfig, ranks: Ranks) -> RunCopy | None:
    """Return the copy of the run in a bucket on the first rank; None if it has none."""
    return RunCopy(config.run.folder, config.run.copy_to) if config.run.copy_to and ranks.is_first else None


@contextmanager
def _open_trackers(setup: RunSetup, step: int) -> Iterator[list[Tracker]]:
    """Open the trackers on the first rank, and close them at the end of the block."""
    trackers, config = [], setup.config
    if setup.ranks.is_first:
        trackers = open_trackers(config.run.trackers, config.run.folder, config.model_dump(mode="json"), step)
    try:
        yield trackers
    finally:
        for tracker in trackers:
            tracker.close()


def _describe_run(run: TrainingRun, progress: Progress) -> dict[str, Any]:
    """Return the values of a `training` event."""
    objective, source, config = run.learner.objective, run.training_loader.source, run.config
    has_classes = config.objective.kind == "classification"
    return {
        "folder": str(config.run.folder),
        "model": config.model.name or config.model.weights,
        "parameters": sum(parameter.numel() for parameter in objective.parameters()),
        "image_size": list(objective.model.image_size),
        "training_images": len(source),
        "repeats": run.repeats,
        "validation_images": run.validation_images or None,
        "can_hold_out": not run.evaluation_loaders and config.data.validate_on != "none",
        "classes": source.num_classes if has_classes else None,
        "class_names": shorten_labels(source.classes) if has_classes and source.classes else "",
        "task": config.data.task if config.objective.kind == "task" else None,
        "outputs": shorten_labels(source.task.output_names) if config.objective.kind == "task" else "",
        "steps": run.steps,
        "start_step": progress.step,
        "is_finished": progress.has_ended or progress.step == run.steps,
        "batch_size": config.data.batch_size,
        "devices": run.ranks.size,
        "device": device_name(run.ranks.device),
        "precision": str(run.learner.precision).removeprefix("torch."),
        "computed_by": run.learner.computed_by,
        "unused_holdout": run.unused_holdout,
        "fewshot": None if run.fewshot is None else _describe_fewshot(config, run.fewshot),
    }


def _describe_fewshot(config: RunConfig, fewshot: FewshotRun) -> dict[str, Any]:
    drawn, scored = (len(source) for source in fewshot.task.sources)
    return {"shots": config.run.fewshot_shots, "drawn": drawn, "scored": scored, "every": config.run.fewshot_every}


@contextmanager
def _apply_settings(config: RunConfig) -> Iterator[None]:
    """Apply the configuration's settings to torch, and restore torch's own at the end of the block."""
    before, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    is_new = config.run.deterministic and WORKSPACE not in os.environ
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    if config.run.deterministic:
        os.environ.setdefault(WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices), _keep_apple_generator(), torch.enable_grad():
            yield
    finally:
        if config.run.deterministic:
            torch.use_deterministic_algorithms(before, warn_only=warns_only)
        if is_new:
            del os.environ[WORKSPACE]
        torch.set_num_threads(threads)


@contextmanager
def _keep_apple_generator() -> Iterator[None]:
    """Restore the random state of Apple's GPU, if there is one, at the end of the block."""
    state = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        yield
    finally:
        if state is not None:
            torch.mps.set_rng_state(state)


@contextmanager
def _avoid_broken_attention(architecture: Architecture) -> Iterator[None]:
    """Turn off cuDNN's attention for sequence lengths that are an odd multiple of 64.

    There, its backward pass gives gradients that are not numbers once a row's logsumexp is below −88 (cuDNN 9.19, torch
    2.11 on an H200; pytorch issue 196678). For other lengths it is correct, and the fastest. The lengths in timm's
    networks are not known, so it is off for them.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    if isinstance(architecture, TimmArchitecture):
        torch.backends.cuda.enable_cudnn_sdp(False)
    if isinstance(architecture, VitArchitecture):
        is_axial = architecture.block == "axial"
        lengths = architecture.grid(architecture.image_size) if is_axial else (count_tokens(architecture),)
        torch.backends.cuda.enable_cudnn_sdp(before and all(length % 128 != 64 for length in lengths))
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def _explain_failures(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Turn failures of the machine into a TrainingError that says what to do next."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if isinstance(error, torch.OutOfMemoryError) or NO_APPLE_MEMORY in str(error):
            raise TrainingError(OUT_OF_MEMORY) from None
        if missing := explain_missing_operation(error):
            raise TrainingError(missing) from None
        if ranks.size > 1 and (reason := explain_lost_rank(error)):
            raise TrainingError(f"rank {ranks.rank}: {reason}; start again to go on from the last checkpoint") from None
        raise
    except OSError as error:
        if error.filename is None and not error.strerror:
            raise
        raise TrainingError(
            f"{error.filename or folder}: {describe_reason(error)}; the last whole checkpoint stays"
        ) from None
