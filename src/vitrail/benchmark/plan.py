"""From what was asked of a benchmark to the cases that it measures, checked before anything is built."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from vitrail.benchmark.case import PRECISIONS, Case
from vitrail.errors import ConfigError, did_you_mean
from vitrail.model.architecture import VitArchitecture
from vitrail.model.variants import architecture
from vitrail.system import processor

WHATS = ("inference", "training", "latency")
WITH_DATA = ("loader", "end-to-end")
"""What can be measured too, where there is data."""
BEYOND = {"fp8": "cuda", "int8": "cpu", "auto": "cpu"}
"""Precisions that only ways of our own, or of a runtime, have → where."""
AXES = ("resolution", "batch", "model")
SIDES = (224, 384, 512, 768, 1024)
"""Pixels; of patches that do not divide them, the next smaller that they do."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MODELS = ("Ti/16", "S/16", "B/16", "L/16", "H/14")
BATCH = {"cuda": 256, "cpu": 8}


def planned(
    names: Sequence[str],
    what: str | None,
    batch: int | None,
    precision: tuple[str, str | None],
    size: int | None,
    grow: str | None,
    device: torch.device,
    data: str | None = None,
) -> list[Case]:
    """The cases that were asked for, in the order in which they are measured."""
    batch_or_default = batch or BATCH.get(device.type, BATCH["cpu"])

    def case(what: str, name: str, images: int = batch_or_default, side: int | None = size) -> Case:
        shape = architecture(name) if side is None else architecture(name, image_size=side)
        return Case(what, name, shape, 1 if what == "latency" else images, precision[0], device, precision[1])

    whats = parse_what(what, data, ["inference"] if grow else WHATS)
    if grow is None:
        return [case(each, name) for name in names or ["B/16"] for each in whats]
    if grow not in AXES:
        raise ConfigError(f"--grow {grow}{did_you_mean(grow, AXES) or ':'} give one of {', '.join(AXES)}")
    if whats not in (["inference"], ["training"]):
        raise ConfigError("--grow takes one thing to measure: --what inference or --what training")
    if grow != "model" and len(names) > 1:
        raise ConfigError(f"--grow {grow} takes one model, not {len(names)}: {', '.join(names)}")
    for option, given, axis in (("--size", size, "resolution"), ("--batch", batch, "batch")):
        if given is not None and grow == axis:
            raise ConfigError(f"--grow {axis} goes through its own: leave {option} out")
    name = names[0] if names else "B/16"
    if grow == "model":
        return [case(whats[0], each) for each in names or MODELS]
    if grow == "batch":
        return [case(whats[0], name, images=images) for images in BATCHES]
    plain = architecture(name)
    stride = plain.stride if isinstance(plain, VitArchitecture) else 1
    return [case(whats[0], name, side=side // stride * stride) for side in SIDES]


def parse_what(text: str | None, data: str | None, by_default: Sequence[str]) -> list[str]:
    """Some of `WHATS` and `WITH_DATA`, with commas between; if nothing is said, what there is data for as well."""
    if text is None:
        return [*by_default, *(WITH_DATA if data is not None else ())]
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    known = (*WHATS, *WITH_DATA)
    for word in found:
        if word not in known:
            raise ConfigError(f"--what {word}{did_you_mean(word, known) or ':'} give some of {', '.join(known)}")
    if not found:
        raise ConfigError(f"--what is empty: give some of {', '.join(known)}")
    needing = [word for word in found if word in WITH_DATA]
    if needing and data is None:
        raise ConfigError(f"--what {needing[0]} needs images: name them by --data DATA, as for `vitrail train`")
    if data is not None and not needing:
        raise ConfigError(f"--data is for --what {' and '.join(WITH_DATA)}: leave it out, or name one of these")
    return found


def checked_precision(precision: str | None, device: torch.device) -> tuple[str, str | None]:
    """The precision of all plain ways, by what the device is for if not given; and one that is asked for besides.

    bf16 on a CPU only where it does not kill the process.
    """
    plain = "bf16" if device.type == "cuda" else "fp32"
    if precision is None:
        return plain, None
    if BEYOND.get(precision) == device.type:
        return plain, precision
    if precision not in PRECISIONS:
        here = [*PRECISIONS, *(name for name, kind in BEYOND.items() if kind == device.type)]
        raise ConfigError(f"--precision {precision}: give {', '.join(here[:-1])} or {here[-1]} on {device.type}")
    if precision == "bf16" and device.type == "cpu":
        probe = processor.probe_bf16(cap=os.environ.get(processor.VARIABLE))
        if not probe.works:
            raise ConfigError(f"--precision bf16: products do not work on this processor ({probe.detail}): use fp32")
    return precision, None


def check_places(out: Path | None, plot: Path | None) -> None:
    """Before minutes of measuring: whether there is a place for what comes of it."""
    if plot is not None and plot.suffix != ".png":
        raise ConfigError(f"--plot {plot}: a figure is a .png, with an .svg beside it")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"--plot {plot}: matplotlib is not installed here; keep the numbers by --out FILE.json, and draw them "
            "elsewhere by --from FILE.json --plot"
        )
    for option, path in (("--out", out), ("--plot", plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            problem = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise ConfigError(f"{option} {path}: {problem}; give a file in a folder that is there")
