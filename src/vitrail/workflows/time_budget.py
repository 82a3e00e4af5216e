"""Fit a fine-tuning into a time: measure a few real steps, then choose method, resolution and number of steps."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vitrail.data.open import Data
from vitrail.model.base import ImageModel
from vitrail.model.create import copy_model
from vitrail.system.ranks import Ranks
from vitrail.training.build import build_run, prepare_run
from vitrail.training.config import RunConfig
from vitrail.training.resolve import change_config
from vitrail.training.run import Progress, RunState, TrainingRun
from vitrail.training.step import train_step, wait_for_pending_step
from vitrail.workflows.finetune_settings import EVALUATIONS

CPU_MINUTES = 3.0
"""The budget on a CPU if none is given."""
TIMED_IMAGES = 8
"""Images in a step that is only timed: few, so that a large model on a slow machine is measured in seconds."""
TIMED_STEPS, TIMED_SECONDS = 5, 3.0
"""So many steps are timed, and fewer if they take longer: one alone is often slowed by what else a machine does."""
PLANNED_SHARE = 0.8
"""Share of the remaining time that is planned; the rest is for machines that slow down and for the report."""
REPORT_SECONDS = 12.0
"""Time for the report and the files, beside the passes over images."""
LEAST_STEPS, LEAST_EPOCHS = 20, 1.0
"""A shorter training is not worth its time: a linear head is as good then."""
MOST_PIXEL_BYTES = 1 << 30
"""Decoded images up to this size are kept in memory."""
SLOW_READING = 0.25
"""Reading is left to another process if it takes more than this share of a step."""


@dataclass(frozen=True)
class StepTime:
    """How long the parts of a training take on this machine."""

    reading: float
    """Seconds to read, decode and augment one image."""
    training: float
    """Seconds to train on one image, without reading it."""

    @property
    def evaluating(self) -> float:
        """Seconds to evaluate one image: a training step takes three times the products of a forward pass."""
        return self.reading + self.training / 3

    def time_step(self, batch_size: int, has_reader: bool) -> float:
        """Return the seconds of a step; a reader process reads while the step is computed."""
        reading, training = self.reading * batch_size, self.training * batch_size
        return max(reading, training) if has_reader else reading + training


class ImageCounts(NamedTuple):
    """How many images a run has for each purpose."""

    training: int
    validation: int
    test: int
    """Images that only the last measurement sees."""


@dataclass(frozen=True)
class Plan:
    """A training that fits into a time."""

    config: RunConfig
    step_seconds: float
    seconds: float
    """What the whole will take from now on, by estimate."""


def time_training(config: RunConfig, data: Data, model: ImageModel | None, device: torch.device) -> StepTime:
    """Measure real training steps, and return the median. Nothing is written, and the model stays as it is."""
    is_gpu = device.type == "cuda"
    batch = config.data.batch_size if is_gpu else min(TIMED_IMAGES, config.data.batch_size)
    changes = {"batch_size": batch, "in_memory": False, "workers": 0}
    config = change_config(config, {"data": changes, "optimizer": {"accumulate": 1}, "model": {"keep_head": False}})
    ranks, copied = Ranks(0, 1, device), None if model is None else copy_model(model)
    with torch.random.fork_rng(devices=[device] if is_gpu else []), torch.enable_grad():
        run = build_run(prepare_run(config, ranks, source=data, start=copied), Progress())
        state = RunState()
        train_step(run, state)  # the first one sets up what the others use
        wait_for_pending_step(run, state)
        times: list[tuple[float, float]] = []
        began = time.perf_counter()
        while len(times) < TIMED_STEPS and (not times or time.perf_counter() - began < TIMED_SECONDS):
            times.append(_time_step(run, state, batch))
    return StepTime(*(statistics.median(part) for part in zip(*times, strict=True)))


def _time_step(run: TrainingRun, state: RunState, batch: int) -> tuple[float, float]:
    """Return the seconds to read one image, and to train on one."""
    began = time.perf_counter()
    next(run.training_loader)
    reading = time.perf_counter() - began
    train_step(run, state)
    wait_for_pending_step(run, state)
    step = time.perf_counter() - began - reading
    return reading / batch, max(step - reading, step / 10) / batch


def plan_training(
    config: RunConfig,
    sizes: Sequence[tuple[int, int] | None],
    data: Data,
    model: ImageModel | None,
    *,
    seconds: float,
    images: ImageCounts,
    pixel_bytes: int,
    device: torch.device,
    fits_head: bool,
    given_keys: Collection[str] = (),
) -> Plan | None:
    """Choose the largest image size at which a training in the remaining time is worth it, and its number of steps.

    Args:
        config: the wanted training; its number of steps is the most that is planned.
        sizes: image sizes to try, the best first; None is the size in the configuration.
        data: the images.
        model: the model to start from; None for fresh weights.
        seconds: the time for everything that is left to do.
        images: how many are trained on, validated on and tested on.
        pixel_bytes: size of all decoded images.
        device: where it trains.
        fits_head: whether a head is fitted to all training images first.
        given_keys: settings that the user has given, which stay as they are.

    Returns:
        None if there is not enough time to train.
    """
    began = time.monotonic()
    most_steps, batch = config.schedule.steps or 0, config.data.batch_size
    for size in sizes:
        sized = config if size is None else change_config(config, {"model": {"image_size": size}})
        times = time_training(sized, data, model, device)
        reading = choose_reading(pixel_bytes, times, device)
        step = times.time_step(batch, bool(reading["workers"]))
        decoding = reading["in_memory"] * images.training * times.reading
        outside_images = images.training * fits_head + (images.test or images.validation)
        outside = REPORT_SECONDS + decoding + outside_images * times.evaluating
        evaluations = (EVALUATIONS + 1) * images.validation * times.evaluating
        left = seconds - (time.monotonic() - began)
        steps = min(int((PLANNED_SHARE * left - outside - evaluations) / step), most_steps)
        if steps >= min(LEAST_STEPS, most_steps) and steps * batch >= LEAST_EPOCHS * images.training:
            chosen: dict[str, dict[str, Any]] = {"data": reading, "run": {"most_seconds": max(left - outside, step)}}
            changes = {
                section: {key: value for key, value in values.items() if key not in given_keys}
                for section, values in chosen.items()
            }
            planned = change_config(sized, {**changes, "schedule": {"steps": steps}})
            return Plan(planned, step, outside + evaluations + steps * step)
    return None


def choose_reading(pixel_bytes: int, times: StepTime, device: torch.device) -> dict[str, int | bool]:
    """Return `data.in_memory` and `data.workers` for images of this size at this pace."""
    fits = pixel_bytes <= MOST_PIXEL_BYTES
    is_slow = times.reading > SLOW_READING * times.training
    cores = os.cpu_count() or 1
    readers = 1 if device.type == "cpu" else max(1, min(8, cores // 2))
    return {"in_memory": fits, "workers": readers if is_slow and not fits and cores > 1 else 0}
