"""`CudaGraph`: record a function of tensors once and replay it, so that Python does not start every kernel again.

Used where hundreds of small kernels follow each other: latency of one image, small training steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

Outputs = TypeVar("Outputs")

WARM_UPS = 3
"""Calls before the recording: they allocate memory, compile kernels and initialise libraries."""


class CudaGraph(Generic[Outputs]):
    """A function of tensors on one GPU, recorded at the first call and replayed at every later one.

    All calls take tensors of the same shapes and types. The next call overwrites what a call returns. Recording changes
    no random generator and none of the tensors in `kept`; every call draws new random numbers.

    Args:
        function: Launches kernels and does nothing else: its Python code runs only in the warm-ups and the recording.
        kept: Tensors that the function changes in place, such as running means.
        generators: Random generators that the function uses, besides torch's own.
    """

    def __init__(
        self,
        function: Callable[..., Outputs],
        kept: Sequence[Tensor] = (),
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._function, self._kept, self._generators = function, kept, generators
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Tensor) -> Outputs:
        if self._graph is None:
            self._graph = self._record(inputs)
        for buffer, tensor in zip(self._inputs, inputs, strict=True):
            assert buffer.shape == tensor.shape
            buffer.copy_(tensor, non_blocking=True)
        self._graph.replay()
        return self._outputs

    def _record(self, examples: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        device = examples[0].device
        self._inputs = [example.detach().clone() for example in examples]
        before = [tensor.detach().clone() for tensor in self._kept]
        states = torch.cuda.get_rng_state(device), [generator.get_state() for generator in self._generators]
        side_stream = torch.cuda.Stream(device)
        side_stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side_stream):
            for _ in range(WARM_UPS):
                self._function(*self._inputs)
        torch.cuda.current_stream(device).wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        # Thread-local, because threads that read data ahead may allocate pinned memory meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._outputs = self._function(*self._inputs)
        torch.cuda.set_rng_state(states[0], device)
        for generator, state in zip(self._generators, states[1], strict=True):
            generator.set_state(state)
        with torch.no_grad():
            for tensor, kept in zip(self._kept, before, strict=True):
                tensor.copy_(kept)
        return graph
