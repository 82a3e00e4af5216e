"""The fastest of several ways to compute one thing on a GPU, found by trying them: once for each shape in a process."""

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
Way = Callable[..., Tensor]

_chosen: dict[Hashable, str] = {}


def choose(
    key: Hashable, ways: Mapping[str, Callable[..., Result]], *inputs: object, in_line: bool = False
) -> Callable[..., Result]:
    """The way that takes least time for these inputs, which `key` stands for; the first one where there is no GPU."""
    return ways[fastest(key, ways, *inputs, in_line=in_line)]


def fastest(key: Hashable, ways: Mapping[str, Callable[..., object]], *inputs: object, in_line: bool = False) -> str:
    """Its name.

    Ways that cannot run here are passed over. Each is recorded as a graph of several calls, so that a kernel is not
    charged for the time that Python takes to start it, and they take turns, for the chip's clock rises and falls.

    `in_line`: for what takes microseconds, as one among others: the cache does not hold its weights yet, its first
    input is just being written, and its result is waited for.
    """
    device = next(each.device for each in inputs if isinstance(each, Tensor))
    key = key, device
    if key not in _chosen:
        _chosen[key] = _measured(ways, inputs, device, in_line) if device.type == "cuda" else next(iter(ways))
    return _chosen[key]


def bucket(rows: int) -> int:
    """The next power of two: what is fastest for so many rows is taken to be so for all up to it."""
    return 1 << max(rows - 1, 0).bit_length()


def chosen() -> dict[Hashable, str]:
    """What was found so far."""
    return dict(_chosen)


def _measured(
    ways: Mapping[str, Callable[..., object]], inputs: tuple[object, ...], device: torch.device, in_line: bool
) -> str:
    if in_line:
        displacing = _displacing(device)
        ways = {name: partial(_in_line, way, displacing) for name, way in ways.items()}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    why, pool = "", torch.cuda.graph_pool_handle()  # one for all: what a graph leaves in its memory nobody reads
    for name, way in ways.items():
        try:
            graphs[name] = _recorded(way, inputs, device, pool)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a kernel that does not fit this chip says so in many ways
            why = str(error)
    if not graphs:
        raise NotApplicableError(f"none of the kernels runs here: {why}")
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


def _recorded(
    way: Callable[..., object], inputs: tuple[object, ...], device: torch.device, pool: Any
) -> torch.cuda.CUDAGraph:
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        way(*inputs)
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(CALLS):
            way(*inputs)
    return graph


def _displacing(device: torch.device) -> Tensor:
    """So much that, once written, it takes the place of all that the cache held."""
    return torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)


def _in_line(way: Callable[..., object], displacing: Tensor, first: Tensor, *others: object) -> None:
    from vitrail.fast.gpu.kernels.overlap import copied

    displacing.zero_()
    result = way(copied(first), *others)
    if isinstance(result, Tensor):
        copied(result)
