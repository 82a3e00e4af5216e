"""One case of `vitrail bench`: our model in every way there is, beside other libraries' models of the same shape.

All ways of a case are built first and then take turns, in one process, with a large matrix product among them as the
measure of what the device can do. What cannot be measured is named, with the reason, and the others are measured.
"""

from __future__ import annotations

import copy
import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vitrail.benchmark.candidates import EAGER, all_ways
from vitrail.benchmark.case import PRECISIONS, Case, Key, Missing, Way, make_batch, make_ours
from vitrail.benchmark.peers import in_a_line
from vitrail.benchmark.report import Measured, Row, product_record
from vitrail.errors import NotApplicableError, VitrailError
from vitrail.fast.measure import PeakMemory, Product, Stopwatch, percentile, relative_distance, take_turns
from vitrail.model.architecture import VitArchitecture
from vitrail.model.cost import cost, tokens

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


@dataclass(frozen=True)
class Facts:
    """What is known of a way besides its times."""

    parameters: int
    precision: str
    memory: int | None
    distance: float | None


@dataclass(frozen=True)
class Ready:
    """A way that has run, and how it is to be timed."""

    step: Callable[[], object]
    calls: int
    facts: Facts


def measure(
    case: Case,
    peers: Sequence[str],
    *,
    modes: Sequence[str],
    rounds: int,
    plain: bool = True,
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
        for way in all_ways(case, batch, ours, peers, modes, plain):
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
        release(case.device)
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
    found.rows.extend(row(case, key, ready[key].facts, times, case.flops, best) for key, times in seconds.items())
    turns.clear()
    ready.clear()
    if set(modes) != {EAGER}:
        torch.compiler.reset()
    release(case.device)
    return found


def prepare(way: Way, case: Case, reference: Tensor, watch: Stopwatch) -> Ready:
    """Build a way and run it: the first call compiles or records, and shows whether it computes the same."""
    check_memory(case)
    memory = PeakMemory(case.device)
    step, parameters, precision = way.build()
    logits = step()
    expected = (case.batch, *reference.shape[1:])
    if logits.shape != expected:
        raise NotApplicableError(f"refused: it gives {tuple(logits.shape)} for {case.batch} images and not {expected}")
    distance = relative_distance(logits[:COMPARED], reference) if way.our_weights else None
    if not logits.isfinite().all():
        raise NotApplicableError("refused: not all of its logits are finite")
    at_first = memory.peak()
    memory.restart()
    for _ in range(WARM_UPS):
        step()
    calls = watch.calls_in(step, TURN_SECONDS, LATENCY_CALLS if case.what == "latency" else 1)
    precision = precision or way.precision or case.precision
    used = at_first if way.recorded else memory.peak()
    return Ready(step, calls, Facts(parameters, precision, used, distance))


def turn(watch: Stopwatch, step: Callable[[], object], calls: int, one_by_one: bool) -> list[float]:
    """Seconds of steps; one before them, where they are short, finds the caches as the others left them."""
    if calls > 1:
        step()
    return watch.each(step, calls) if one_by_one else [watch.together(step, calls)]


def row(case: Case, key: Key, facts: Facts, seconds: list[list[float]], flops: int, best: float | None) -> Row:
    """What the times of a way amount to; `flops`: of a step. `best`: operations a second of the large product; None
    where no product is computed."""
    every = [second for turn in seconds for second in turn]
    median = statistics.median(every)
    speed = None if best is None else flops / median
    return Row(
        name=case.name,
        what=case.what,
        size=case.size,
        batch=case.batch,
        precision=facts.precision,
        library=key[0],
        way=key[1],
        parameters=facts.parameters,
        seconds=seconds,
        median_seconds=median,
        p99_seconds=percentile(every, 0.99) if case.what == "latency" else None,
        images_per_second=case.batch / median,
        flops_per_second=speed,
        share_of_product=None if speed is None or best is None else speed / best,
        memory_bytes=facts.memory,
        distance=facts.distance,
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


def release(device: torch.device) -> None:
    """Give back the memory of what is no longer there."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
