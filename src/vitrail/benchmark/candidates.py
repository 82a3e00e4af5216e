"""The ways to compute a case with our model: eager, compiled, as a CUDA graph, and by `vitrail.fast`.

`plain_candidates` works for a model of any library; benchmarks/against_peers.py uses it for the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from vitrail.benchmark.case import (
    OURS,
    PRECISIONS,
    BuiltCandidate,
    Candidate,
    Case,
    NotMeasured,
    RandomBatch,
    count_parameters,
)
from vitrail.errors import NotApplicableError
from vitrail.fast.gpu.cuda_graph import CudaGraph
from vitrail.fast.optimize import explain_missing_kernels, optimize
from vitrail.model.base import ImageModel

LEARNING_RATE = 1e-4
EAGER, COMPILED, AUTOTUNED = "eager", "compiled", "autotuned"
COMPILE_MODES = {COMPILED: None, AUTOTUNED: "max-autotune-no-cudagraphs"}
"""The `mode` for torch.compile. Without its own CUDA graphs: here these are separate candidates."""
GRAPH = "CUDA graph"
CALIBRATION_IMAGES = 32
"""Images that FP8 is calibrated on."""
GRAPH_FLOPS = 3e13
"""Longer steps are not recorded as CUDA graphs. They take tens of milliseconds, which hides the time of starting
kernels; and every graph holds the memory of all its activations while the others run."""


def our_candidates(
    case: Case, batch: RandomBatch, model: ImageModel, modes: Sequence[str], plain: bool = True
) -> Iterator[Candidate | NotMeasured]:
    """Yield the candidates of our model (float32 on the CPU; each copies it), and what is left out.

    `modes`: some of eager, compiled and autotuned. `plain`: False for only those of `vitrail.fast`.
    """
    if plain:
        yield from plain_candidates(OURS, model, case, batch, modes)
    else:
        yield NotMeasured(str(case), OURS, ", ".join(modes), "left out by --fast")
    yield from fast_candidates(case, batch, model)
    if case.device.type == "cuda" and not case.trains and not uses_graphs(case):
        reason = f"left out, a step of {case.flops / 1e12:,.0f} TFLOP is too long to gain from it"
        yield NotMeasured(str(case), "every library", f"{' or '.join(modes)} as a {GRAPH}", reason)


def fast_candidates(case: Case, batch: RandomBatch, model: ImageModel) -> Iterator[Candidate]:
    """Yield what `vitrail.fast` makes of the model: in the case's precision, and in `case.extra_precision`.

    A candidate that is impossible here raises a NotApplicableError when it is built.
    """
    if case.device.type == "cpu" and not case.trains:
        build = partial(_build_fast, model, case, batch)
        yield Candidate(OURS, "fast", partial(build, case.precision), has_our_weights=True)
        if (extra := case.extra_precision) is not None:
            yield Candidate(OURS, f"fast, {extra}", partial(build, extra), has_our_weights=True)
    if case.device.type != "cuda" or case.precision != "bf16":
        return
    for precision in ("bf16", "fp8") if case.extra_precision == "fp8" else ("bf16",):
        name = "fused" if precision == "bf16" else f"fused, {precision}"
        candidate = partial(Candidate, OURS, precision=precision, has_our_weights=True)
        if case.trains:
            yield candidate(name, partial(_build_fused_training, model, case, batch, precision))
            continue
        build = partial(_build_fast, model, case, batch, precision)
        if precision == "fp8":
            yield candidate(f"{name}, a scale for each token", partial(build, calibrates=False))
        yield candidate(name, build)
        yield candidate(f"{name}, {GRAPH}", partial(build, records=True), is_recorded=True)


def plain_candidates(
    library: str, model: nn.Module, case: Case, batch: RandomBatch, modes: Sequence[str]
) -> Iterator[Candidate]:
    """Yield the candidates that any library's model has: eager or compiled, and both as CUDA graphs."""
    for records in (False, True) if uses_graphs(case) else (False,):
        for mode in modes:
            name = mode if not records else GRAPH if mode == EAGER else f"{mode}, {GRAPH}"
            build = partial(_build_plain, model, case, batch, mode, records)
            yield Candidate(library, name, build, is_recorded=records, has_our_weights=library == OURS)


def uses_graphs(case: Case) -> bool:
    """Return whether CUDA graphs are among the candidates of a case."""
    return case.device.type == "cuda" and not case.trains and case.flops <= GRAPH_FLOPS


def _build_plain(model: nn.Module, case: Case, batch: RandomBatch, mode: str, records: bool) -> BuiltCandidate:
    own = copy.deepcopy(model).to(case.device, case.dtype).train(case.trains)
    run: Callable[[Tensor], Tensor] = own
    if mode != EAGER:
        run = torch.compile(own, dynamic=False, mode=COMPILE_MODES[mode])
    if case.trains:
        return BuiltCandidate(make_training_step(own, run, case, batch), count_parameters(model))
    return BuiltCandidate(
        make_inference_step(CudaGraph(run) if records else run, batch.images), count_parameters(model)
    )


def _build_fast(
    model: ImageModel,
    case: Case,
    batch: RandomBatch,
    precision: str,
    records: bool = False,
    calibrates: bool = True,
) -> BuiltCandidate:
    fast = optimize(
        copy.deepcopy(model).to(case.device),
        "latency" if records else "throughput",
        precision,
        batch=case.batch,
        images=batch.images[:CALIBRATION_IMAGES].float() if calibrates else None,
    )
    return BuiltCandidate(make_inference_step(fast, batch.images), count_parameters(model), fast.precision)


def _build_fused_training(model: ImageModel, case: Case, batch: RandomBatch, precision: str) -> BuiltCandidate:
    if (obstacle := explain_missing_kernels(case.device)) is not None:
        raise NotApplicableError(f"there are no fused kernels here: {obstacle}")
    from vitrail.fast.gpu.training import FusedTraining

    own = copy.deepcopy(model).to(case.device).train()
    fused = FusedTraining(own, fp8=precision == "fp8")
    return BuiltCandidate(make_training_step(own, fused, case, batch), count_parameters(model))


def make_inference_step(run: Callable[[Tensor], Tensor], images: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        with torch.inference_mode():
            return run(images)

    return step


def make_training_step(
    model: nn.Module, run: Callable[[Tensor], Tensor], case: Case, batch: RandomBatch
) -> Callable[[], Tensor]:
    """Return a step of forward, backward and fused AdamW; `run` is the model, or the compiled model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    is_half = case.precision != "fp32"

    def step() -> Tensor:
        with torch.autocast(case.device.type, PRECISIONS[case.precision]) if is_half else nullcontext():
            logits = run(batch.images)
            loss = nn.functional.cross_entropy(logits, batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return logits.detach()

    return step
