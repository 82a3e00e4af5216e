"""Train a model from a configuration, in a folder of its own (see run_folder.py for what is in it)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from vitrail.config import show_size
from vitrail.errors import TrainingError
from vitrail.model.architecture import Architecture, TimmArchitecture, VitArchitecture
from vitrail.model.cost import count_tokens
from vitrail.system.device import device_name
from vitrail.system.ranks import Ranks, explain_lost_rank, join_ranks
from vitrail.training.build import build_run, prepare_run
from vitrail.training.checkpoint import resume
from vitrail.training.config import RunConfig
from vitrail.training.loop import train
from vitrail.training.result import TrainingResult, save_result
from vitrail.training.run import Progress, Run, RunSetup
from vitrail.training.run_folder import claim_folder
from vitrail.training.trackers import Tracker, open_trackers
from vitrail.weights.card import shorten_labels


def run_training(config: RunConfig) -> TrainingResult:
    """Train a model, from the beginning or from the newest checkpoint in the run folder.

    Under `torchrun`, all ranks call this and get the same result.

    Raises:
        ConfigError: The configuration does not fit the data, the machine or the run in the folder.
        DataError: The data cannot be trained on.
        TrainingError: The machine failed: too little memory, a full disk, a lost rank. `Diverged` and `Stopped` are
            special cases: no finite gradients, and a stop signal.
    """
    folder = config.run.folder
    with (
        join_ranks(config.run.device, config.run.timeout) as ranks,
        _apply_settings(config),
        _explain_failures(folder, ranks),
    ):
        setup = prepare_run(config, ranks)
        with claim_folder(setup), _avoid_broken_attention(setup.learner.objective.model.architecture):
            state = resume(setup)
            with _open_trackers(setup, state.progress.step) as trackers:
                run = build_run(setup, state.progress, trackers)
                with run.display:
                    _introduce(run, state.progress)
                    train(run, state)
            return save_result(run, state.progress)


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


def _introduce(run: Run, progress: Progress) -> None:
    """Show what is about to be trained, in a few lines."""
    if not run.ranks.is_first:
        return
    objective, source, config, show = (
        run.learner.objective,
        run.training_loader.source,
        run.config,
        run.display.print_line,
    )
    parameters = sum(parameter.numel() for parameter in objective.parameters())
    show(f"data: {len(source):,} images to train on, {_describe_validation(run)}")
    if config.objective.kind == "classification":
        show(f"classes: {source.num_classes}" + (f", {shorten_labels(source.classes)}" if source.classes else ""))
    name = config.model.name or config.model.weights
    show(f"model: {name}, {parameters:,} parameters, images of {show_size(objective.model.image_size)} pixels")
    show(
        f"training: {run.steps:,} steps of {config.data.batch_size} images on {run.ranks.size} × "
        f"{device_name(run.ranks.device)}, {str(run.learner.precision).removeprefix('torch.')}, in {config.run.folder}"
    )
    if progress.step == run.steps:
        show("it is finished already: there is nothing left to train")
    elif progress.step:
        show(f"going on from step {progress.step:,}")


def _describe_validation(run: Run) -> str:
    if run.evaluation_loader is None:
        hint = "" if run.config.data.validate_on == "none" else " (data.holdout=0.1 would set some aside)"
        return f"none to validate on{hint}"
    return f"{len(run.evaluation_loader.source):,} to validate on"


@contextmanager
def _apply_settings(config: RunConfig) -> Iterator[None]:
    """Apply the configuration's settings to torch, and restore torch's own at the end of the block."""
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
    except torch.OutOfMemoryError:
        raise TrainingError(
            "the GPU has too little memory: a larger optimizer.accumulate computes a batch in more parts, and "
            "run.gradient_checkpointing=true keeps less"
        ) from None
    except RuntimeError as error:
        if ranks.size > 1 and (reason := explain_lost_rank(error)):
            raise TrainingError(f"rank {ranks.rank}: {reason}; start again to go on from the last checkpoint") from None
        raise
    except OSError as error:
        if error.filename is None and not error.strerror:
            raise
        raise TrainingError(f"{error.filename or folder}: {error.strerror}; the last whole checkpoint stays") from None
