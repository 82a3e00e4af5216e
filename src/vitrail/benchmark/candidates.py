"""The ways to compute a case: our model's, then each peer's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from vitrail.benchmark.case import OURS, PRECISIONS, Batch, Built, Case, Missing, Way
from vitrail.benchmark.peers import PEERS, parameters_of, peer_model
from vitrail.benchmark.runtimes import runtime_ways
from vitrail.errors import NotApplicableError
from vitrail.fast.gpu.cuda_graph import Captured
from vitrail.fast.optimize import optimize, why_no_kernels
from vitrail.model.base import ImageModel

LEARNING_RATE = 1e-4
EAGER, COMPILED, AUTOTUNED = "eager", "compiled", "autotuned"
MODES = {COMPILED: None, AUTOTUNED: "max-autotune-no-cudagraphs"}
"""What torch.compile is told. It would record CUDA graphs by itself too; here that is a way of its own, for all."""
GRAPH = "CUDA graph"
CALIBRATED = 32
"""Images that FP8 is calibrated on."""
GRAPH_FLOPS = 3e13
"""Operations of a step, up to which it is recorded too. A GPU takes tens of milliseconds for more, behind which all
starting of kernels hides; and every recording keeps the memory of all its activations while others have their turn."""


def all_ways(
    case: Case, batch: Batch, ours: ImageModel, peers: Sequence[str], modes: Sequence[str], plain: bool = True
) -> Iterator[Way | Missing]:
    """Ours, then those of each peer, which is built when it is its turn; `modes`: some of eager and `MODES`.

    Not `plain`: of ours only what `vitrail.fast` makes of it.
    """
    if plain:
        yield from ways_of(OURS, ours, case, batch, modes)
    else:
        yield Missing(str(case), OURS, ", ".join(modes), "left out by --fast")
    yield from fast_ways(case, batch, ours)
    if case.device.type == "cuda" and not case.trains and not is_recorded(case):
        reason = f"left out, a step of {case.flops / 1e12:,.0f} TFLOP is too long to gain from it"
        yield Missing(str(case), "every library", f"{' or '.join(modes)} as a {GRAPH}", reason)
    for library in peers:
        if library not in PEERS:
            yield from runtime_ways(library, case, batch, ours)
            continue
        try:
            theirs = peer_model(library, case.architecture)
        except NotApplicableError as error:
            yield Missing(str(case), library, "", str(error))
            continue
        yield from ways_of(library, theirs, case, batch, modes)


def fast_ways(case: Case, batch: Batch, ours: ImageModel) -> Iterator[Way]:
    """Ours beyond those that any model has: what `vitrail.fast` makes of it.

    Those in the case's own precision always, those in `case.beyond` where it is asked for. A way that cannot be here
    raises a NotApplicableError when it is built, with the reason; one that finds its precision by itself tells it in
    what it has built.
    """
    if case.device.type == "cpu" and not case.trains:
        yield Way(OURS, "fast", lambda: _fast(ours, case, batch, case.precision), our_weights=True)
        if case.beyond is not None:
            yield Way(OURS, f"fast, {case.beyond}", lambda: _fast(ours, case, batch, case.beyond), our_weights=True)
    if case.device.type != "cuda" or case.precision != "bf16":
        return
    for precision in ("bf16", "fp8") if case.beyond == "fp8" else ("bf16",):
        name = "fused" if precision == "bf16" else f"fused, {precision}"
        if case.trains:
            yield Way(OURS, name, partial(_fused, ours, case, batch, precision), precision=precision, our_weights=True)
            continue
        if precision == "fp8":
            build = partial(_fast, ours, case, batch, precision, calibrated=False)
            yield Way(OURS, f"{name}, a scale for each token", build, precision=precision, our_weights=True)
        for recorded in (False, True):
            yield Way(
                OURS,
                f"{name}, {GRAPH}" if recorded else name,
                partial(_fast, ours, case, batch, precision, recorded),
                recorded=recorded,
                precision=precision,
                our_weights=True,
            )


def ways_of(library: str, model: nn.Module, case: Case, batch: Batch, modes: Sequence[str]) -> Iterator[Way]:
    """Those that there are for any model; each works on a copy of it."""

    def way(name: str, mode: str, recorded: bool = False) -> Way:
        return Way(
            library,
            name,
            lambda: _built(model, case, batch, mode, recorded),
            recorded=recorded,
            our_weights=library == OURS,
        )

    for mode in modes:
        yield way(mode, mode)
    if is_recorded(case):
        for mode in modes:
            yield way(GRAPH if mode == EAGER else f"{mode}, {GRAPH}", mode, recorded=True)


def is_recorded(case: Case) -> bool:
    """Whether CUDA graphs are among its ways."""
    return case.device.type == "cuda" and not case.trains and case.flops <= GRAPH_FLOPS


def _built(model: nn.Module, case: Case, batch: Batch, mode: str, recorded: bool) -> Built:
    """A copy of a model on its device, and a step of it."""
    parameters = parameters_of(model)
    own = copy.deepcopy(model).to(case.device, case.dtype).train(case.trains)
    run: Callable[[Tensor], Tensor] = own if mode == EAGER else torch.compile(own, dynamic=False, mode=MODES[mode])
    if case.trains:
        return Built(training_step(own, run, case, batch), parameters)
    return Built(inference_step(Captured(run) if recorded else run, batch.images), parameters)


def _fast(
    model: ImageModel,
    case: Case,
    batch: Batch,
    precision: str | None,
    recorded: bool = False,
    calibrated: bool = True,
) -> Built:
    """What `vitrail.fast.optimize` makes of it; calibrated on the batch, or not."""
    fast = optimize(
        copy.deepcopy(model).to(case.device),
        "latency" if recorded else "throughput",
        precision or "auto",
        batch=case.batch,
        images=batch.images[:CALIBRATED].float() if calibrated else None,
    )
    return Built(inference_step(fast, batch.images), parameters_of(model), fast.precision)


def _fused(model: ImageModel, case: Case, batch: Batch, precision: str) -> Built:
    """Training by fused kernels."""
    if (why := why_no_kernels(case.device)) is not None:
        raise NotApplicableError(f"there are no fused kernels here: {why}")
    from vitrail.fast.gpu.training import FusedLearning

    own = copy.deepcopy(model).to(case.device).train()
    learning = FusedLearning(own, fp8=precision == "fp8")
    return Built(training_step(own, learning, case, batch), parameters_of(model))


def inference_step(run: Callable[[Tensor], Tensor], images: Tensor) -> Callable[[], Tensor]:
    """A forward pass."""

    def step() -> Tensor:
        with torch.inference_mode():
            return run(images)

    return step


def training_step(model: nn.Module, run: Callable[[Tensor], Tensor], case: Case, batch: Batch) -> Callable[[], Tensor]:
    """Forward, backward and fused AdamW; `run` is the model, or the model compiled."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    half = case.precision != "fp32"

    def step() -> Tensor:
        with torch.autocast(case.device.type, PRECISIONS[case.precision]) if half else nullcontext():
            logits = run(batch.images)
            loss = nn.functional.cross_entropy(logits, batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return logits.detach()

    return step
