"""Find the fastest of several implementations on a GPU by timing them: once for each shape in a process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitrail.errors import NotApplicableError

CALLS, ROUNDS = 10, 7
Result = TypeVar("Result")
Implementation = Callable[..., Tensor]

choices: dict[Hashable, str] = {}
"""Names of the fastest implementations so far, by key and device."""


def choose_fastest(
    key: Hashable, candidates: Mapping[str, Callable[..., Result]], *inputs: object, cold_cache: bool = False
) -> Callable[..., Result]:
    """Return the implementation that takes the least time for these inputs; see `find_fastest`."""
    return candidates[find_fastest(key, candidates, *inputs, cold_cache=cold_cache)]


def find_fastest(
    key: Hashable, candidates: Mapping[str, Callable[..., object]], *inputs: object, cold_cache: bool = False
) -> str:
    """Return the name of the fastest implementation; without a GPU, of the first one.

    Every implementation is recorded as a CUDA graph of several calls, so that the time in which Python starts a kernel
    does not count, and they take turns, because the clock rate of the chip changes.

    Args:
        key: The shapes and options that the result is valid for.
        candidates: Implementations by name. Those that raise an error here are skipped.
        inputs: Arguments of every implementation; at least one is a tensor.
        cold_cache: Measure as within a model: weights not yet in the cache, the first input written just before, and
            the result read right after. For kernels of microseconds.

    Raises:
        NotApplicableError: None of the implementations runs here.
    """
    device = next(each.device for each in inputs if isinstance(each, Tensor))
    key = key, device
    if key not in choices:
        choices[key] = (
            _time_all(candidates, inputs, device, cold_cache) if device.type == "cuda" else next(iter(candidates))
        )
    return choices[key]


def round_up_rows(rows: int) -> int:
    """Return the next power of two: one measurement serves all numbers of rows up to it."""
    return 1 << max(rows - 1, 0).bit_length()


def _time_all(
    candidates: Mapping[str, Callable[..., object]], inputs: tuple[object, ...], device: torch.device, cold_cache: bool
) -> str:
    if cold_cache:
        filler = _allocate_filler(device)
        candidates = {name: partial(_call_cold, each, filler) for name, each in candidates.items()}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    reason, pool = "", torch.cuda.graph_pool_handle()  # one pool for all graphs: nobody reads their results
    for name, candidate in candidates.items():
        try:
            graphs[name] = _record_graph(candidate, inputs, device, pool)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a kernel that does not fit this chip may raise anything
            reason = str(error)
    if not graphs:
        raise NotApplicableError(f"none of the kernels runs here: {reason}")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return min(times, key=lambda name: statistics.median(times[name]))


def _record_graph(
    candidate: Callable[..., object], inputs: tuple[object, ...], device: torch.device, pool: Any
) -> torch.cuda.CUDAGraph:
    side_stream = torch.cuda.Stream(device)
    side_stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side_stream):
        candidate(*inputs)
    torch.cuda.current_stream(device).wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(CALLS):
            candidate(*inputs)
    return graph


def _allocate_filler(device: torch.device) -> Tensor:
    """Return a tensor so large that writing it empties the cache of everything else."""
    return torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)


def _call_cold(candidate: Callable[..., object], filler: Tensor, first: Tensor, *others: object) -> None:
    from vitrail.fast.gpu.kernels.overlap import copy_tensor

    filler.zero_()
    result = candidate(copy_tensor(first), *others)
    if isinstance(result, Tensor):
        copy_tensor(result)
