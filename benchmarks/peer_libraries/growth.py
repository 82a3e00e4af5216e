"""Cases that grow (in resolution, batch or model), measured until memory or time ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from vitrail.benchmark.bench import DEFAULT_MODEL, make_case
from vitrail.benchmark.case import CandidateKey, Case
from vitrail.benchmark.report import Measurements
from vitrail.errors import ConfigError, did_you_mean
from vitrail.model.architecture import VitArchitecture
from vitrail.model.variants import make_architecture

AXES = ("resolution", "batch", "model")
SIDES = (224, 384, 512, 768, 1024)
"""Pixels; a model whose patches do not divide them gets the next smaller size."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MODELS = ("Ti/16", "S/16", "B/16", "L/16", "H/14")

MeasureFunction = Callable[[Case, Sequence[str], set[CandidateKey]], Measurements]
"""Measures a case with some peers, without some candidates."""


def plan_growth(
    axis: str,
    names: Sequence[str],
    whats: Sequence[str],
    batch: int | None,
    precisions: tuple[str, str | None],
    size: int | None,
    device: torch.device,
) -> list[Case]:
    """Return the cases of --grow, from the smallest to the largest.

    Raises:
        ConfigError: The axis is unknown, or the other options contradict it.
    """
    if axis not in AXES:
        raise ConfigError(f"--grow {axis}{did_you_mean(axis, AXES) or ':'} give one of {', '.join(AXES)}")
    if list(whats) not in (["inference"], ["training"]):
        raise ConfigError("--grow takes one thing to measure: --what inference or --what training")
    if axis != "model" and len(names) > 1:
        raise ConfigError(f"--grow {axis} takes one model, not {len(names)}: {', '.join(names)}")
    for option, value, own_axis in (("--size", size, "resolution"), ("--batch", batch, "batch")):
        if value is not None and axis == own_axis:
            raise ConfigError(f"--grow {axis} goes through its own: leave {option} out")
    what, name = whats[0], names[0] if names else DEFAULT_MODEL
    if axis == "model":
        return [make_case(what, each, batch, precisions, size, device) for each in names or MODELS]
    if axis == "batch":
        return [make_case(what, name, images, precisions, size, device) for images in BATCHES]
    plain = make_architecture(name)
    stride = plain.stride if isinstance(plain, VitArchitecture) else 1
    return [make_case(what, name, batch, precisions, side // stride * stride, device) for side in SIDES]


def measure_growth(
    cases: Sequence[Case],
    peers: Sequence[str],
    measure: MeasureFunction,
    seconds: float,
    results: Measurements,
    clock: Callable[[], float] = time.perf_counter,
) -> list[str]:
    """Measure growing cases into `results`, and return notes about where it ended.

    A candidate that fails is left out of larger cases. No case is begun that would end after `seconds`.
    """
    began, last, failed = clock(), 0.0, set[CandidateKey]()
    for case in cases:
        start = clock()
        if results.rows and start - began + last > seconds:
            return [f"ended before {case}: it would not have fitted into the {seconds:g} s of --seconds"]
        measured = measure(case, [peer for peer in peers if (peer, "") not in failed], failed)
        results.add(measured)
        failed |= {(each.library, each.way) for each in measured.missing}
        last = clock() - start
        if not measured.rows:
            return [f"ended at {case}: nothing could be measured there any more"]
    return []
