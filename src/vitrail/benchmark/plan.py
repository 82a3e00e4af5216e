"""Turn the options of a benchmark into the cases to measure, checked before anything is built."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from vitrail.benchmark.case import PRECISIONS, Case
from vitrail.errors import ConfigError, did_you_mean
from vitrail.model.variants import make_architecture
from vitrail.system import processor

WITHOUT_DATA = ("inference", "training", "latency")
WITH_DATA = ("loader", "end-to-end")
"""What can be measured if there is data."""
EXTRA_PRECISIONS = {"fp8": "cuda", "int8": "cpu", "auto": "cpu"}
"""Precisions that only some candidates support, and the device they are for."""
DEFAULT_BATCH = {"cuda": 256, "cpu": 8}
DEFAULT_MODEL = "B/16"


def make_case(
    what: str,
    name: str,
    batch: int | None,
    precisions: tuple[str, str | None],
    size: int | None,
    device: torch.device,
) -> Case:
    """Return a case.

    Args:
        what: inference, training, latency, loader or end-to-end.
        name: Of the model.
        batch: Images; the device's default if None, and always 1 for latency.
        precisions: That of the plain candidates, and an extra one or None.
        size: Side of the images in pixels; the model's own if None.
        device: Where it runs.
    """
    shape = make_architecture(name) if size is None else make_architecture(name, image_size=size)
    images = 1 if what == "latency" else batch or DEFAULT_BATCH.get(device.type, DEFAULT_BATCH["cpu"])
    return Case(what, name, shape, images, precisions[0], device, precisions[1])


def parse_what(text: str | None, data: str | None, default: Sequence[str] = WITHOUT_DATA) -> list[str]:
    """Split the comma-separated value of --what and check it; without one, everything that is possible."""
    if text is None:
        return [*default, *(WITH_DATA if data is not None else ())]
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    known = (*WITHOUT_DATA, *WITH_DATA)
    for word in words:
        if word not in known:
            raise ConfigError(f"--what {word}{did_you_mean(word, known) or ':'} give some of {', '.join(known)}")
    if not words:
        raise ConfigError(f"--what is empty: give some of {', '.join(known)}")
    needs_data = [word for word in words if word in WITH_DATA]
    if needs_data and data is None:
        raise ConfigError(f"--what {needs_data[0]} needs images: name them by --data DATA, as for `vitrail train`")
    if data is not None and not needs_data:
        raise ConfigError(f"--data is for --what {' and '.join(WITH_DATA)}: leave it out, or name one of these")
    return words


def choose_precisions(precision: str | None, device: torch.device) -> tuple[str, str | None]:
    """Return the precision of the plain candidates, and an extra one (fp8, int8, auto) if it was requested.

    Raises:
        ConfigError: The device does not support the precision; also for bf16 on a processor that it crashes.
    """
    plain = "bf16" if device.type == "cuda" else "fp32"
    if precision is None:
        return plain, None
    if EXTRA_PRECISIONS.get(precision) == device.type:
        return plain, precision
    if precision not in PRECISIONS:
        allowed = [*PRECISIONS, *(name for name, kind in EXTRA_PRECISIONS.items() if kind == device.type)]
        raise ConfigError(f"--precision {precision}: give {', '.join(allowed[:-1])} or {allowed[-1]} on {device.type}")
    if precision == "bf16" and device.type == "cpu":
        probe = processor.probe_bf16(cap=os.environ.get(processor.ISA_VARIABLE))
        if not probe.works:
            raise ConfigError(f"--precision bf16: products do not work on this processor ({probe.detail}): use fp32")
    return precision, None


def check_output(option: str, path: Path | None) -> None:
    """Refuse, before minutes of measuring, a file that could not be written."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        problem = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"{option} {path}: {problem}; give a file in a folder that is there")
