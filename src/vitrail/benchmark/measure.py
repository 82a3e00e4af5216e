"""Measure one case: all candidates are built first and then take turns in one process.

A large matrix product takes part in the turns and shows what the device can do. A candidate that fails is reported with
the reason, and the others are measured.
"""

from __future__ import annotations

import copy
import gc
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from vitrail.benchmark.candidates import EAGER, GRAPH, our_candidates
from vitrail.benchmark.case import (
    PRECISIONS,
    Candidate,
    CandidateKey,
    Case,
    NotMeasured,
    RandomBatch,
    make_batch,
    make_model,
)
from vitrail.benchmark.report import Measurements, SpeedRow
from vitrail.benchmark.time_limit import LEFT_OUT, TimeLimit
from vitrail.errors import NotApplicableError, VitrailError
from vitrail.fast.timing import (
    PeakMemory,
    ReferenceProduct,
    Stopwatch,
    fit_calls,
    percentile,
    relative_distance,
    take_turns,
)
from vitrail.model.architecture import VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.cost import compute_cost, count_tokens

TURN_SECONDS = 0.3
"""About how long a turn lasts, unless a single step is longer."""
LATENCY_CALLS = 10
"""Fewest calls in a turn of latency, where each is timed: the slowest hundredth is of interest."""
ROUND_SECONDS = 2.0
"""Longer rounds are announced one by one."""
WARM_UPS = 2
COMPARED_IMAGES = 8
"""At most so many images have their logits compared with the plain model's."""
PRODUCT = ("", "product")
MEMORY_INFO = Path("/proc/meminfo")

OnMessage = Callable[[str], None]
Turn = Callable[[], list[float]]
"""Returns the seconds of its calls."""
ExtraCandidates = Callable[[Case, RandomBatch, ImageModel], Iterator[Candidate | NotMeasured]]
"""Yields further candidates for a case, given its batch and our model: those of other libraries."""


@dataclass(frozen=True)
class CandidateFacts:
    """What is known about a candidate besides its times."""

    parameters: int
    precision: str
    memory: int | None
    distance: float | None


@dataclass(frozen=True)
class PreparedCandidate:
    """A candidate that has run once, and how many calls a turn of it has."""

    step: Callable[[], object]
    calls: int
    seconds: float
    """Of one call, which was timed only to choose the number of calls."""
    facts: CandidateFacts


@dataclass(frozen=True)
class MeasureOptions:
    """How the cases of a benchmark are measured."""

    modes: Sequence[str] = (EAGER,)
    """Some of eager, compiled and autotuned."""
    rounds: int = 5
    plain: bool = True
    """False: of our own candidates only those of `vitrail.fast`."""
    on_message: OnMessage = lambda line: None
    """Gets a line of text about every step."""
    clock: Callable[[], float] = time.perf_counter
    limit: TimeLimit = field(default_factory=TimeLimit)
    """What is not begun any more is left out; by default nothing is."""


class CaseTimer:
    """Times the candidates of one case; collects their rows, and the reasons for those that fail.

    Args:
        case: What is computed.
        options: How it is measured.
        data: Where images come from. The reasons say DATA instead, because reports must not reveal it.
    """

    def __init__(self, case: Case, options: MeasureOptions, data: str | None = None) -> None:
        self.case, self.options, self._data = case, options, data
        self.results, self.watch = Measurements(), Stopwatch(case.device, options.clock)
        options.on_message(f"{case}: preparing")
        self._product = ReferenceProduct(case.device, PRECISIONS[case.precision]) if case.what != "loader" else None

    def record_failure(self, key: CandidateKey, error: Exception) -> None:
        reason = explain_failure(error)
        if self._data:
            reason = reason.replace(self._data, "DATA")
        self.results.missing.append(NotMeasured(str(self.case), *key, reason))
        self.options.on_message(str(self.results.missing[-1]))

    def time_turns(
        self, turns: Mapping[CandidateKey, Turn], get_facts: Callable[[CandidateKey], CandidateFacts], flops: int
    ) -> None:
        """Let the candidates and the large product take turns, and add their rows; `flops`: operations of a step."""
        product, best = self._product, None
        if product is not None:
            calls = self.watch.count_calls(product, TURN_SECONDS)
            turns = {PRODUCT: lambda: [self.watch.time_calls(product, calls)], **turns}
        began = self.options.clock()

        def begins_round(number: int) -> bool:
            """Say how far it is; refuse a round that, as long as those before, would end too late."""
            mean = (self.options.clock() - began) / (number - 1)
            if not self.options.limit.allows(mean):
                left = f"{self.options.rounds - number + 1} of {self.options.rounds} rounds"
                self.results.missing.append(NotMeasured(str(self.case), left, "", LEFT_OUT))
                return False
            if mean > ROUND_SECONDS:
                self.options.on_message(f"{self.case}: round {number} of {self.options.rounds}")
            return True

        seconds = take_turns(turns, self.options.rounds, self.record_failure, begins_round)
        if product is not None:
            times = seconds.pop(PRODUCT)
            best = product.flops / statistics.median(second for turn in times for second in turn)
            self.results.products.append(
                {"case": str(self.case), "flops": product.flops, "seconds": times, "flops_per_second": best}
            )
        rows = (make_row(self.case, key, get_facts(key), times, flops, best) for key, times in seconds.items())
        self.results.rows.extend(rows)


def measure_case(
    case: Case, options: MeasureOptions, extra: ExtraCandidates | None = None, skip: Set[CandidateKey] = frozenset()
) -> Measurements:
    """Measure all candidates of a case, in turns: ours and then those of `extra`, without those of `skip`."""
    timer = CaseTimer(case, options)
    prepared: dict[CandidateKey, PreparedCandidate] = {}
    try:
        check_memory(case)
        batch, ours = make_batch(case), make_model(case.architecture)
        reference = compute_reference(ours, batch.images[:COMPARED_IMAGES].float())
        others = iter(()) if extra is None else extra(case, batch, ours)
        # A generator, so that another library's model is built only when its turn comes.
        for candidate in chain(our_candidates(case, batch, ours, options.modes, options.plain), others):
            if isinstance(candidate, NotMeasured):
                timer.results.missing.append(candidate)
            elif (key := (candidate.library, candidate.name)) in skip:
                continue
            elif not options.limit.begins(case, needs_build=candidate.name not in (EAGER, GRAPH)):
                timer.results.missing.append(NotMeasured(str(case), *key, LEFT_OUT))
            else:
                options.on_message(f"{case}: building {candidate.library} {candidate.name}")
                try:
                    prepared[key] = ready = prepare_candidate(candidate, case, reference, timer.watch)
                    options.limit.note_speed(case.flops / ready.seconds)
                    speed = f"about {case.batch / ready.seconds:,.3g} images/s"
                    options.on_message(f"{case}: {candidate.library} {candidate.name} is ready, {speed}")
                except Exception as error:  # another library may raise anything, and the others are to be measured
                    timer.record_failure(key, error)
                    release_memory(case.device)
    except (VitrailError, RuntimeError) as error:  # RuntimeError: out of memory
        timer.record_failure(("every library", ""), error)
        release_memory(case.device)
        return timer.results
    if not prepared:  # the large product alone tells nothing about a model
        release_memory(case.device)
        return timer.results
    options.on_message(f"{case}: {options.rounds} rounds of {len(prepared)}")
    timer.time_turns(
        {key: partial(time_turn, timer.watch, each, case.what == "latency") for key, each in prepared.items()},
        lambda key: prepared[key].facts,
        case.flops,
    )
    prepared.clear()
    if set(options.modes) != {EAGER}:
        torch.compiler.reset()
    release_memory(case.device)
    return timer.results


def prepare_candidate(candidate: Candidate, case: Case, reference: Tensor, watch: Stopwatch) -> PreparedCandidate:
    """Build a candidate and run it: the first call compiles or records, and shows whether the result is right."""
    check_memory(case)
    memory = PeakMemory(case.device)
    step, parameters, precision = candidate.build()
    logits = step()
    expected = (case.batch, *reference.shape[1:])
    if logits.shape != expected:
        raise NotApplicableError(
            f"refused: it returns {tuple(logits.shape)} for {case.batch} images instead of {expected}"
        )
    distance = relative_distance(logits[:COMPARED_IMAGES], reference) if candidate.has_our_weights else None
    if not logits.isfinite().all():
        raise NotApplicableError("refused: not all of its logits are finite")
    first_peak = memory.peak()
    memory.restart()
    for _ in range(WARM_UPS):
        step()
    seconds = max(watch.time_calls(step, 1), 1e-9)
    calls = fit_calls(seconds, TURN_SECONDS, LATENCY_CALLS if case.what == "latency" else 1)
    precision = precision or candidate.precision or case.precision
    used = first_peak if candidate.is_recorded else memory.peak()
    return PreparedCandidate(step, calls, seconds, CandidateFacts(parameters, precision, used, distance))


def time_turn(watch: Stopwatch, candidate: PreparedCandidate, one_by_one: bool) -> list[float]:
    """Return the seconds of a turn: of each call, or their mean. Before several calls, one more fills the caches."""
    step, calls = candidate.step, candidate.calls
    if calls > 1:
        step()
    return watch.time_each_call(step, calls) if one_by_one else [watch.time_calls(step, calls)]


def make_row(
    case: Case, key: CandidateKey, facts: CandidateFacts, seconds: list[list[float]], flops: int, best: float | None
) -> SpeedRow:
    """Summarise the times of a candidate; `best`: operations per second of the large product, if it took part."""
    every = [second for turn in seconds for second in turn]
    median = statistics.median(every)
    speed = None if best is None else flops / median
    return SpeedRow(
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


def compute_reference(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits of our plain model in float32, on the device of the images."""
    own = copy.deepcopy(model).to(images.device).eval()
    with torch.no_grad():
        logits: Tensor = own(images)
    return logits


def check_memory(case: Case) -> None:
    """Refuse a case that does not fit into a CPU's memory: the system would kill the process without a reason."""
    a, free = case.architecture, read_free_memory()
    if case.device.type != "cpu" or free is None or not isinstance(a, VitArchitecture):
        return
    # Roughly: weights (with gradients and AdamW's averages), and what one block, or each of them, stores of a token.
    weights = compute_cost(a).parameters * (4 if case.trains else 1)
    activations = case.batch * count_tokens(a) * (8 * a.width + 2 * a.mlp_dim) * (a.depth if case.trains else 1)
    if (needed := 4 * (weights + activations)) > free:
        raise NotApplicableError(f"it would take about {needed / 2**30:.1f} GiB and {free / 2**30:.1f} are free")


def read_free_memory() -> int | None:
    """Return the bytes that the system can still provide; None if it does not say."""
    with suppress(OSError, ValueError, IndexError):
        for line in MEMORY_INFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def explain_failure(error: Exception) -> str:
    """Return in one line why something could not be measured."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory on the GPU"
    return str(error) if isinstance(error, VitrailError) else f"it failed with {summarize_error(error)}"


def summarize_error(error: BaseException) -> str:
    """Return the type and first line of an exception's root cause, without folders: the line goes into reports."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()[:1]
    message = re.sub(r"(?<![\w.])(?:/[^\s/:'\"]+)+/(?=[^\s/])", "", lines[0])[:200] if lines else ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def release_memory(device: torch.device) -> None:
    """Return unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
