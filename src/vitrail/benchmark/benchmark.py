"""`measure_speed`: a whole benchmark, from its options to the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from vitrail.benchmark.candidates import AUTOTUNED, COMPILED, EAGER
from vitrail.benchmark.case import NotMeasured
from vitrail.benchmark.data_path import DataSupply, measure_data_path
from vitrail.benchmark.machine import describe_machine
from vitrail.benchmark.measure import MeasureOptions, OnMessage, measure_case
from vitrail.benchmark.plan import DEFAULT_MODEL, WITH_DATA, check_output, choose_precisions, make_case, parse_what
from vitrail.benchmark.report import BenchmarkReport, Measurements, compare_rows
from vitrail.system.device import choose_device

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
    data: str | None = None
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

    def modes(self, device: torch.device) -> tuple[str, ...]:
        """Return the plain modes that are measured: some of eager, compiled and autotuned."""
        compiles = device.type == "cuda" or self.autotune if self.compiles is None else self.compiles
        return (EAGER, *([COMPILED] if compiles else ()), *([AUTOTUNED] if self.autotune else ()))

    def explain_modes(self, modes: Sequence[str]) -> list[NotMeasured]:
        """Return why the compiled model is not measured, if it is not."""
        if COMPILED in modes:
            return []
        why = (
            "--no-compile"
            if self.compiles is False
            else "on a CPU it takes minutes to compile: ask for it with --compile"
        )
        return [NotMeasured("", "every library", "compiled", f"left out, {why}")]


def measure_speed(
    names: Sequence[str] = (),
    options: SpeedOptions | None = None,
    *,
    out: Path | None = None,
    on_message: OnMessage = lambda line: None,
) -> BenchmarkReport:
    """Measure how fast models are on this machine.

    Args:
        names: Of models, as `vitrail models` lists them; B/16 if empty.
        options: What is measured, and how.
        out: A JSON file for the report; `BenchmarkReport.read` reads it again.
        on_message: Gets a line of text about every step.

    Returns:
        A row for each way of computing each case, what could not be measured, and the machine.

    Raises:
        ConfigError: An option is wrong. It is checked before anything is measured.
        DataError: There are no images at `options.data`.
    """
    options = options or SpeedOptions()
    device = choose_device(options.device)
    precisions = choose_precisions(options.precision, device)
    whats = parse_what(options.what, options.data)
    cases = [
        make_case(what, name, options.batch, precisions, options.size, device)
        for name in names or [DEFAULT_MODEL]
        for what in whats
    ]
    check_output("--out", out)
    supply = None if options.data is None else DataSupply.open(options.data, options.workers, cases)
    modes = options.modes(device)
    measuring = MeasureOptions(modes, options.rounds, options.plain, on_message)
    results = Measurements(missing=[] if whats == ["loader"] else options.explain_modes(modes))
    with use_device(device, options.threads):
        machine = describe_machine(device)
        for case in cases:
            if case.what in WITH_DATA:
                assert supply is not None
                results.add(measure_data_path(case, supply, measuring, compiles=options.compiles))
            else:
                results.add(measure_case(case, measuring))
    request = {
        "cases": [str(case) for case in cases],
        "precision": precisions[0],
        "beyond": precisions[1],
        "peers": [],
        "workers": None if supply is None else supply.workers,
        "rounds": options.rounds,
        "modes": list(modes),
        "seconds": None,
    }
    notes = [*([GPU_ONLY_MEMORY] if device.type == "cpu" else ()), *([supply.describe()] if supply else ())]
    comparisons = compare_rows(results.rows, precisions[0])
    report = BenchmarkReport(
        machine, request, results.rows, results.missing, results.products, notes, comparisons=comparisons
    )
    if out is not None:
        report.write(out)
    return report


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
