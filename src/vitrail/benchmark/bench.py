"""`bench`: a whole benchmark, from its options to the cases and the report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.benchmark.candidates import AUTOTUNED, COMPILED, EAGER
from vitrail.benchmark.case import PRECISIONS, Case, NotMeasured
from vitrail.benchmark.data_path import DataSupply, measure_data_path
from vitrail.benchmark.machine import describe_machine
from vitrail.benchmark.measure import MeasureOptions, measure_case
from vitrail.benchmark.report import BenchmarkReport, Measurements, compare_rows
from vitrail.data.open import Data
from vitrail.errors import ConfigError, did_you_mean
from vitrail.model.variants import make_architecture
from vitrail.system import processor
from vitrail.system.device import choose_device
from vitrail.system.events import OnEvent, open_listener, send_progress

WITHOUT_DATA = ("inference", "training", "latency")
WITH_DATA = ("loader", "end-to-end")
"""What can be measured if there is data."""
EXTRA_PRECISIONS = {"fp8": "cuda", "int8": "cpu", "auto": "cpu"}
"""Precisions that only some candidates support, and the device they are for."""
DEFAULT_BATCH = {"cuda": 256, "cpu": 8}
DEFAULT_MODEL = "B/16"
GPU_ONLY_MEMORY = "memory is measured on a GPU alone"


@dataclass(frozen=True)
class SpeedOptions:
    """What a benchmark measures, and how."""

    what: str | None = None
    """Some of inference, training, latency, and with `data` loader and end-to-end, separated by commas; None: all."""
    batch: int | None = None
    """Images at a time; None: 256 on a GPU, 8 on a CPU. Latency is always of one image."""
    precision: str | None = None
    """fp32 or bf16; None: bf16 on a GPU, fp32 on a CPU. fp8 (GPU), int8 or auto (CPU) are measured in addition."""
    size: int | None = None
    """Side of the images in pixels; None: the model's own."""
    data: Data | None = None
    """Images for loader and end-to-end, as for `vitrail train`."""
    workers: int | None = None
    """Processes that read the data; None: one for each core."""
    threads: int | None = None
    """CPU threads; None: torch's choice."""
    rounds: int = 5
    """Turns of each candidate; medians are over these."""
    compiles: bool | None = None
    """Whether to measure the compiled model too; None: on a GPU only."""
    autotune: bool = False
    """Whether to measure max-autotune too, which takes many minutes."""
    plain: bool = True
    """False: only what `vitrail.fast` makes of the model."""
    device: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("size", 1), ("threads", 1), ("rounds", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} = {value}: give {least} or more")

    def modes(self, device: torch.device) -> tuple[str, ...]:
        """Return the plain modes that are measured: some of eager, compiled and autotuned."""
        compiles = device.type == "cuda" or self.autotune if self.compiles is None else self.compiles
        return (EAGER, *([COMPILED] if compiles else ()), *([AUTOTUNED] if self.autotune else ()))

    def explain_modes(self, modes: Sequence[str]) -> list[NotMeasured]:
        """Return why the compiled model is not measured, if it is not."""
        if COMPILED in modes:
            return []
        why = (
            "--no-compile (compiles=False)"
            if self.compiles is False
            else "on a CPU it takes minutes to compile: ask for it with --compile (compiles=True)"
        )
        return [NotMeasured("", "every library", "compiled", f"left out, {why}")]


def bench(
    models: str | Sequence[str] = DEFAULT_MODEL,
    *,
    what: str | Sequence[str] | None = None,
    batch: int | None = None,
    precision: str | None = None,
    size: int | None = None,
    data: Data | None = None,
    workers: int | None = None,
    threads: int | None = None,
    rounds: int = 5,
    compiles: bool | None = None,
    autotune: bool = False,
    plain: bool = True,
    device: str = "auto",
    out: str | Path | None = None,
    on_event: OnEvent | None = None,
) -> BenchmarkReport:
    """Measure how fast models are on this machine.

    Events: message (text) about every step; progress of the task "measuring", in cases.

    Args:
        models: Names of models, as `vitrail models` lists them.
        what: Some of inference, training, latency, and with `data` loader and end-to-end: a list, or one text with
            commas; None: all.
        batch: Images at a time; None: 256 on a GPU, 8 on a CPU. Latency is always of one image.
        precision: fp32 or bf16; None: bf16 on a GPU, fp32 on a CPU. fp8 (GPU), int8 or auto (CPU) are measured in
            addition.
        size: Side of the images in pixels; None: the model's own.
        data: Images for loader and end-to-end, as for `vitrail.train`.
        workers: Processes that read the data; None: one for each core.
        threads: CPU threads; None: torch's choice.
        rounds: Turns of each candidate; medians are over these.
        compiles: Whether to measure the compiled model too; None: on a GPU only.
        autotune: Whether to measure max-autotune too, which takes many minutes.
        plain: False: only what `vitrail.fast` makes of the model.
        device: cpu, cuda, mps, …; auto takes a GPU if there is one.
        out: A JSON file for the report; `BenchmarkReport.read` reads it again.
        on_event: Called with what happens; by default a terminal or notebook shows a bar.

    Returns:
        A row for each way of computing each case, what could not be measured, and the machine.

    Raises:
        ConfigError: An option is wrong. It is checked before anything is measured.
        DataError: There are no images at `data`.
    """
    options = SpeedOptions(
        what=what if what is None or isinstance(what, str) else ",".join(what),
        batch=batch,
        precision=precision,
        size=size,
        data=data,
        workers=workers,
        threads=threads,
        rounds=rounds,
        compiles=compiles,
        autotune=autotune,
        plain=plain,
        device=device,
    )
    names = [models] if isinstance(models, str) else models
    path = None if out is None else Path(out)
    with open_listener(on_event) as listener:
        report = _measure_all(names, options, path, listener)
    if path is not None:
        report.write(path)
    return report


def _measure_all(names: Sequence[str], options: SpeedOptions, out: Path | None, on_event: OnEvent) -> BenchmarkReport:
    device = choose_device(options.device)
    whats = parse_what(options.what, options.data)
    cases = make_cases(names, whats, options, device)
    check_output("--out", out)
    supply = None if options.data is None else DataSupply.open(options.data, options.workers, cases)
    modes = options.modes(device)
    measuring = MeasureOptions(modes, options.rounds, options.plain, lambda line: on_event("message", {"text": line}))
    results = Measurements(missing=[] if whats == ["loader"] else options.explain_modes(modes))
    progress = send_progress(on_event, "measuring")
    with use_device(device, options.threads):
        machine = describe_machine(device)
        for done, case in enumerate(cases):
            progress(done, len(cases))
            if case.what in WITH_DATA:
                assert supply is not None
                results.add(measure_data_path(case, supply, measuring, compiles=options.compiles))
            else:
                results.add(measure_case(case, measuring))
        progress(len(cases), len(cases))
    request = describe_request(cases, options, modes, workers=None if supply is None else supply.workers)
    notes = [*([GPU_ONLY_MEMORY] if device.type == "cpu" else ()), *([supply.describe()] if supply else ())]
    comparisons = compare_rows(results.rows, cases[0].precision)
    return BenchmarkReport(
        machine, request, results.rows, results.missing, results.products, notes, comparisons=comparisons
    )


def describe_request(
    cases: Sequence[Case], options: SpeedOptions, modes: Sequence[str], **others: object
) -> dict[str, Any]:
    """Return `BenchmarkReport.asked`; `others`: the values of peers, workers and seconds, if there are any."""
    return {
        "cases": [str(case) for case in cases],
        "precision": cases[0].precision,
        "beyond": cases[0].extra_precision,
        "peers": [],
        "workers": None,
        "rounds": options.rounds,
        "modes": list(modes),
        "seconds": None,
        **others,
    }


def make_cases(names: Sequence[str], whats: Sequence[str], options: SpeedOptions, device: torch.device) -> list[Case]:
    """Return a case for each model and each of `whats`."""
    precisions = choose_precisions(options.precision, device)
    return [
        make_case(what, name, options.batch, precisions, options.size, device)
        for name in names or [DEFAULT_MODEL]
        for what in whats
    ]


def make_case(
    what: str,
    name: str,
    batch: int | None,
    precisions: tuple[str, str | None],
    size: int | None,
    device: torch.device,
) -> Case:
    """Return a case; `precisions`: that of the plain candidates, and an extra one or None.

    Without a batch or size, the device's or the model's own. Latency is always of one image.
    """
    shape = make_architecture(name) if size is None else make_architecture(name, image_size=size)
    images = 1 if what == "latency" else batch or DEFAULT_BATCH.get(device.type, DEFAULT_BATCH["cpu"])
    return Case(what, name, shape, images, precisions[0], device, precisions[1])


def parse_what(text: str | None, data: Data | None, default: Sequence[str] = WITHOUT_DATA) -> list[str]:
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


@contextmanager
def use_device(device: torch.device, threads: int | None) -> Iterator[None]:
    """Make a GPU the current one, and set the number of CPU threads; restore that number afterwards."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # CUDA graphs are recorded on the current one
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
