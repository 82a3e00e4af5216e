"""vitrail bench: how fast our model is in every way there is, beside other libraries' models of the same shape.

All ways of a case are built first and then take turns, in one process, with a large matrix product among them as the
measure of what the device can do. What cannot be measured is named, with the reason, and the others are measured.
"""

from __future__ import annotations

import copy
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.data.writers import write_whole
from vitrail.errors import NotApplicableError, VitrailError
from vitrail.fast.measure import PeakMemory, Product, Stopwatch, percentile, relative_distance, take_turns
from vitrail.model.architecture import VitArchitecture
from vitrail.model.cost import cost, tokens
from vitrail.train.distributed import chosen_device
from vitrail.workflows.bench_figures import draw
from vitrail.workflows.bench_peers import importable, in_a_line, parse_peers
from vitrail.workflows.bench_plan import check_places, checked_precision, planned
from vitrail.workflows.bench_report import Measured, Report, Row, describe_machine, product_record
from vitrail.workflows.bench_ways import OURS, PRECISIONS, Case, Missing, Way, all_ways, make_batch, make_ours

ROUNDS, SECONDS = 5, 600.0

TURN_SECONDS = 0.3
"""What a turn lasts about, where one step is not longer."""
LATENCY_CALLS = 10
"""In a turn at least, each of them timed: the slowest hundredth is of interest."""
WARM_UPS = 2
COMPARED = 8
"""Images, at most, whose logits are compared with the plain model's."""
PRODUCT = ("", "product")
MEMORY_INFO = Path("/proc/meminfo")

Tell = Callable[[str], None]
Key = tuple[str, str]
"""Library and way."""


@dataclass(frozen=True)
class Ready:
    """A way that has run, and how it is to be timed."""

    step: Callable[[], Tensor]
    calls: int
    parameters: int
    memory: int | None
    distance: float | None


def run(
    names: Sequence[str] = (),
    *,
    what: str | None = None,
    batch: int | None = None,
    precision: str | None = None,
    size: int | None = None,
    peers: str = "all",
    threads: int | None = None,
    rounds: int = ROUNDS,
    compiles: bool | None = None,
    device: str = "auto",
    grow: str | None = None,
    seconds: float = SECONDS,
    out: Path | None = None,
    plot: Path | None = None,
    tell: Tell = lambda line: None,
) -> Report:
    """Measure models by their names; see `vitrail bench --help` for what the options mean."""
    target = chosen_device(device)
    precision = checked_precision(precision, target)
    cases = planned(names, what, batch, precision, size, grow, target)
    wanted = parse_peers(peers)
    check_places(out, plot)
    compiled = target.type == "cuda" if compiles is None else compiles
    found, threads_before = Measured(missing=left_out(compiled, compiles)), torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    if target.type == "cuda" and target.index is not None:
        torch.cuda.set_device(target)  # graphs are recorded on the current one
    try:
        machine = describe_machine(target, wanted)
        present = [library for library in wanted if is_present(library, found)]
        how = functools.partial(measure, compiles=compiled, rounds=rounds, tell=tell)
        if grow:
            notes = measure_growing(cases, present, how, seconds, found)
        else:
            notes = measure_all(cases, present, how, found)
    finally:
        torch.set_num_threads(threads_before)
    if target.type == "cpu":
        notes.append("memory is measured on a GPU alone")
    asked = {
        "cases": [str(case) for case in cases],
        "precision": precision,
        "peers": wanted,
        "rounds": rounds,
        "compile": compiled,
        "seconds": seconds if grow else None,
    }
    report = Report(machine, asked, found.rows, found.missing, found.products, notes + unlike(found.rows), grow)
    if out is not None:
        write_whole(out, json.dumps(report.as_dict(), indent=1, ensure_ascii=False, allow_nan=False).encode())
    if plot is not None and report.rows:
        draw(report, plot)
    return report


def left_out(compiled: bool, asked: bool | None) -> list[Missing]:
    """Compiled ways, where they are not measured."""
    if compiled:
        return []
    reason = "--no-compile" if asked is False else "on a CPU it takes minutes to compile: ask for it with --compile"
    return [Missing("", "every library", "compiled", f"left out, {reason}")]


def is_present(library: str, found: Measured) -> bool:
    """Whether a peer can be imported; if not, `found` has the reason."""
    try:
        importable(library)
    except NotApplicableError as error:
        found.missing.append(Missing("", library, "", str(error)))
        return False
    return True


def measure_all(
    cases: Sequence[Case], peers: Sequence[str], how: Callable[..., Measured], found: Measured
) -> list[str]:
    """One case after the other, into `found`."""
    for case in cases:
        found.add(how(case, peers))
    return []


def measure_growing(
    cases: Sequence[Case],
    peers: Sequence[str],
    how: Callable[..., Measured],
    seconds: float,
    found: Measured,
    clock: Callable[[], float] = time.perf_counter,
) -> list[str]:
    """Cases that grow, into `found`, as long as there is memory and time; a note on where it ended.

    A way that fails takes no part in larger cases.
    """
    began, last, given_up = clock(), 0.0, set[Key]()
    for case in cases:
        start = clock()
        if found.rows and start - began + last > seconds:
            return [f"ended before {case}: it would not have fitted into the {seconds:g} s of --seconds"]
        measured = how(case, [peer for peer in peers if (peer, "") not in given_up], without=given_up)
        found.add(measured)
        given_up |= {(each.library, each.way) for each in measured.missing}
        last = clock() - start
        if not measured.rows:
            return [f"ended at {case}: nothing could be measured there any more"]
    return []


def measure(
    case: Case,
    peers: Sequence[str],
    *,
    compiles: bool,
    rounds: int,
    tell: Tell = lambda line: None,
    without: frozenset[Key] | set[Key] = frozenset(),
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """All ways of a case, in turns; those in `without` are left out."""
    tell(f"{case}: building")
    watch, found = Stopwatch(case.device, clock), Measured()
    product = Product(case.device, PRECISIONS[case.precision])
    ready: dict[Key, Ready] = {}

    def failed(key: Key, error: Exception) -> None:
        found.missing.append(Missing(str(case), *key, reason(error)))
        ready.pop(key, None)
        tell(str(found.missing[-1]))

    try:
        check_memory(case)
        batch, ours = make_batch(case), make_ours(case.architecture)
        reference = plain_logits(ours, batch.images[:COMPARED].float())
        for way in all_ways(case, batch, ours, peers, compiles):
            if isinstance(way, Missing):
                found.missing.append(way)
            elif (key := (way.library, way.name)) not in without:
                try:
                    ready[key] = prepare(way, case, reference, watch)
                    tell(f"{case}: {way.library} {way.name} is ready")
                except Exception as error:  # a peer may raise anything, and the others are to be measured
                    failed(key, error)
                    release(case.device)
    except (VitrailError, RuntimeError) as error:  # the latter where there is no memory
        failed(("every library", ""), error)
        return found
    tell(f"{case}: {rounds} rounds of {len(ready)}")
    turns: dict[Key, Callable[[], list[float]]] = {
        key: functools.partial(turn, watch, each.step, each.calls, case.what == "latency")
        for key, each in ready.items()
    }
    calls = watch.calls_in(product, TURN_SECONDS)
    seconds = take_turns({PRODUCT: lambda: [watch.together(product, calls)], **turns}, rounds, failed)
    found.products.append(product_record(case, product.flops, seconds.pop(PRODUCT)))
    best = found.products[-1]["flops_per_second"]
    found.rows.extend(row(case, key, ready[key], times, best) for key, times in seconds.items())
    turns.clear()
    ready.clear()
    if compiles:
        torch.compiler.reset()
    release(case.device)
    return found


def prepare(way: Way, case: Case, reference: Tensor, watch: Stopwatch) -> Ready:
    """Build a way and run it: the first call compiles or records, and shows whether it computes the same."""
    check_memory(case)
    memory = PeakMemory(case.device)
    step, parameters = way.build()
    logits = step()
    expected = (case.batch, *reference.shape[1:])
    if logits.shape != expected:
        raise NotApplicableError(f"refused: it gives {tuple(logits.shape)} for {case.batch} images and not {expected}")
    distance = relative_distance(logits[:COMPARED], reference) if way.library == OURS else None
    if not logits.isfinite().all():
        raise NotApplicableError("refused: not all of its logits are finite")
    at_first = memory.peak()
    memory.restart()
    for _ in range(WARM_UPS):
        step()
    calls = watch.calls_in(step, TURN_SECONDS, LATENCY_CALLS if case.what == "latency" else 1)
    return Ready(step, calls, parameters, at_first if way.recorded else memory.peak(), distance)


def turn(watch: Stopwatch, step: Callable[[], Tensor], calls: int, one_by_one: bool) -> list[float]:
    """Seconds of steps; one before them, where they are short, finds the caches as the others left them."""
    if calls > 1:
        step()
    return watch.each(step, calls) if one_by_one else [watch.together(step, calls)]


def row(case: Case, key: Key, ready: Ready, seconds: list[list[float]], best: float) -> Row:
    """What the times of a way amount to; `best`: operations a second of the large product."""
    every = [second for turn in seconds for second in turn]
    median = statistics.median(every)
    return Row(
        name=case.name,
        what=case.what,
        size=case.size,
        batch=case.batch,
        precision=case.precision,
        library=key[0],
        way=key[1],
        parameters=ready.parameters,
        seconds=seconds,
        median_seconds=median,
        p99_seconds=percentile(every, 0.99) if case.what == "latency" else None,
        images_per_second=case.batch / median,
        flops_per_second=case.flops / median,
        share_of_product=case.flops / median / best,
        memory_bytes=ready.memory,
        distance=ready.distance,
    )


def plain_logits(model: nn.Module, images: Tensor) -> Tensor:
    """Of our plain model in float32 on the images' device, which all our ways are compared with."""
    own = copy.deepcopy(model).to(images.device).eval()
    with torch.no_grad():
        logits: Tensor = own(images)
    return logits


def check_memory(case: Case) -> None:
    """Refuse, on a CPU, what would not fit into its memory: the system would kill the process and not say why."""
    a, free = case.architecture, free_memory()
    if case.device.type != "cpu" or free is None or not isinstance(a, VitArchitecture):
        return
    # Roughly: weights (with gradients and both means of AdamW), and what a block, or each of them, keeps of a token.
    weights = cost(a).parameters * (4 if case.trains else 1)
    kept = case.batch * tokens(a) * (8 * a.width + 2 * a.mlp_dim) * (a.depth if case.trains else 1)
    if (needed := 4 * (weights + kept)) > free:
        raise NotApplicableError(f"it would take about {needed / 2**30:.1f} GiB and {free / 2**30:.1f} are free")


def free_memory() -> int | None:
    """Bytes that the system could still give; None where it does not tell."""
    with suppress(OSError, ValueError, IndexError):
        for line in MEMORY_INFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def reason(error: Exception) -> str:
    """Why something could not be measured, in a line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory on the GPU"
    return str(error) if isinstance(error, VitrailError) else f"it failed with {in_a_line(error)}"


def unlike(rows: Sequence[Row]) -> list[str]:
    """Notes on peers with a few parameters more or fewer than ours."""
    ours: dict[Any, int] = {row.case: row.parameters for row in rows if row.library == OURS}
    pairs = [(row, ours.get(row.case, row.parameters)) for row in rows]
    told = [
        f"{row.name}: the model of {row.library} has {row.parameters:,} parameters and ours {own:,}"
        for row, own in pairs
        if row.parameters != own
    ]
    return list(dict.fromkeys(told))


def release(device: torch.device) -> None:
    """Give back the memory of what is no longer there."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
