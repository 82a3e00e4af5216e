"""`bench`: a whole benchmark, from its options to the cases and the report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vitrail.benchmark.candidates import AUTOTUNED, COMPILED, EAGER
from vitrail.benchmark.case import PRECISIONS, Case, NotMeasured
from vitrail.benchmark.data_path import DataSupply, measure_data_path
from vitrail.benchmark.machine import describe_machine
from vitrail.benchmark.measure import MeasureOptions, measure_case
from vitrail.benchmark.report import BenchmarkReport, Measurements, compare_rows, describe_case
from vitrail.benchmark.report_file import ReportFile
from vitrail.benchmark.time_limit import DEFAULT_SECONDS, LEFT_OUT, TimeLimit
from vitrail.data.open import Data
from vitrail.errors import ConfigError, did_you_mean
from vitrail.model.variants import make_architecture
from vitrail.system import processor
from vitrail.system.device import choose_device
from vitrail.system.events import OnEvent, open_listener, send_messages, send_progress

WITHOUT_DATA = ("inference", "latency", "training")
"""What can be measured without data: first what tells most in the least time."""
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
    """Whether to measure the compiled model too, however long that takes; None: on a GPU, if `thorough`."""
    autotune: bool = False
    """Whether to measure max-autotune too, which takes many minutes."""
    plain: bool = True
    """False: only what `vitrail.fast` makes of the model."""
    device: str = "auto"
    thorough: bool = False
    """True: everything, however long it takes, and the compiled model on a GPU; else what two minutes allow."""

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("size", 1), ("threads", 1), ("rounds", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} = {value}: give {least} or more")

    def modes(self, device: torch.device) -> tuple[str, ...]:
        """Return the plain modes that are measured: some of eager, compiled and autotuned."""
        by_default = (device.type == "cuda" and self.thorough) or self.autotune
        compiles = by_default if self.compiles is None else self.compiles
        return (EAGER, *([COMPILED] if compiles else ()), *([AUTOTUNED] if self.autotune else ()))

    @property
    def seconds(self) -> float | None:
        """The time that the benchmark may take; None for no limit, also if something was asked for that takes long."""
        return None if self.thorough or self.compiles or self.autotune else DEFAULT_SECONDS

    def explain_modes(self, modes: Sequence[str]) -> list[NotMeasured]:
        """Return why the compiled model is not measured, if it is not."""
        if COMPILED in modes:
            return []
        why = (
            "--no-compile (compiles=False)"
            if self.compiles is False
            else "it takes minutes to compile: ask for it with --compile (compiles=True)"
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
    thorough: bool = False,
    out: str | Path | None = None,
    on_event: OnEvent | None = None,
) -> BenchmarkReport:
    """Measure how fast models are on this machine, within two minutes unless it is to be thorough.

    After every case, all that was measured so far is written. A benchmark that was stopped goes on after its last whole
    case, if the same is asked for again on the same machine, by the same commit of vitrail.

    Events: message (text) about every step; progress of the task "measuring", in cases; measured (case, number, cases,
    rows, file) after every case.

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
        compiles: Whether to measure the compiled model too, however long that takes; None: on a GPU, if `thorough`.
        autotune: Whether to measure max-autotune too, which takes many minutes.
        plain: False: only what `vitrail.fast` makes of the model.
        device: cpu, cuda, mps, …; auto takes a GPU if there is one.
        thorough: Whether to measure everything, however long it takes. Otherwise what does not fit into two minutes is
            left out, and the report says so; and a model is compiled only if `compiles` is True.
        out: A JSON file for the report, which `BenchmarkReport.read` reads again; None: bench.json in vitrail's cache.
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
        thorough=thorough,
    )
    names = [models] if isinstance(models, str) else models
    with open_listener(on_event) as listener:
        return _measure_all(names, options, ReportFile(None if out is None else Path(out)), listener)


def _measure_all(names: Sequence[str], options: SpeedOptions, file: ReportFile, on_event: OnEvent) -> BenchmarkReport:
    device = choose_device(options.device)
    whats = parse_what(options.what, options.data)
    cases = make_cases(names, whats, options, device)
    file.check()
    supply = None if options.data is None else DataSupply.open(options.data, options.workers, cases)
    modes, limit = options.modes(device), TimeLimit(options.seconds)
    request = describe_request(cases, options, modes, workers=None if supply is None else supply.workers)
    notes = [*([GPU_ONLY_MEMORY] if device.type == "cpu" else ()), *([supply.describe()] if supply else ())]
    say = send_messages(on_event)
    measuring = MeasureOptions(modes, options.rounds, options.plain, say, limit=limit)
    progress = send_progress(on_event, "measuring")
    with use_device(device, options.threads):
        report = BenchmarkReport(describe_machine(device), request, [], [], [], notes, measured=[])
        earlier = file.read_stopped(report)
        results, measured = (
            Measurements(missing=[] if whats == ["loader"] else options.explain_modes(modes)),
            list[str](),
        )
        if earlier is not None:
            results, measured = Measurements(earlier.rows, earlier.missing, earlier.products), earlier.measured or []
            say(f"going on after {len(measured)} of {len(cases)} cases, which were measured before a stop")
        for number, case in enumerate(cases, start=1):
            progress(number - 1, len(cases))
            if str(case) in measured:
                found = Measurements([row for row in results.rows if str(case).startswith(f"{describe_case(row)},")])
            else:
                found = _measure_one(case, measuring, supply, options.compiles)
                results.add(found)
                measured.append(str(case))
            report = replace(
                report,
                rows=results.rows,
                missing=results.missing,
                products=results.products,
                comparisons=compare_rows(results.rows, case.precision),
                measured=None if number == len(cases) else list(measured),
            )
            path = file.write(report)
            rows = [asdict(row) for row in found.rows]
            about = {"case": str(case), "number": number, "cases": len(cases), "title": report.title}
            on_event("measured", {**about, "rows": rows, "file": None if path is None else str(path)})
        progress(len(cases), len(cases))
    return report


def _measure_one(
    case: Case, measuring: MeasureOptions, supply: DataSupply | None, compiles: bool | None
) -> Measurements:
    """Measure a case, if there is time for it."""
    if not measuring.limit.begins(case):
        return Measurements(missing=[NotMeasured(str(case), "every library", "", LEFT_OUT)])
    if case.what in WITH_DATA:
        assert supply is not None
        return measure_data_path(case, supply, measuring, compiles=compiles)
    return measure_case(case, measuring)


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
        "thorough": options.seconds is None,
        "seconds": None,
        **others,
    }


def make_cases(names: Sequence[str], whats: Sequence[str], options: SpeedOptions, device: torch.device) -> list[Case]:
    """Return a case for each of `whats` and each model."""
    precisions = choose_precisions(options.precision, device)
    return [
        make_case(what, name, options.batch, precisions, options.size, device)
        for what in whats
        for name in names or [DEFAULT_MODEL]
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
        return [*(WITH_DATA if data is not None else ()), *default]
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
