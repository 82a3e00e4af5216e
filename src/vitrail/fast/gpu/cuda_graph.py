"""A function of tensors, recorded once as a CUDA graph and replayed: what starting hundreds of small kernels one by one
costs the processor is paid once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

Outputs = TypeVar("Outputs")

WARM_UPS = 3
"""Calls before the recording, in which memory is found, kernels are compiled and libraries make ready."""


class Captured(Generic[Outputs]):
    """`function` of tensors that keep their shapes and types; all that it computes lies on one GPU.

    It is recorded at the first call, which changes no generator and none of the tensors in `kept`. What a call returns
    is overwritten by the next. Randomness is drawn anew in every call, from the generators as they stand then.

    Args:
        function: launches kernels and does nothing else that would have to happen again: its Python runs only in the
            warm-ups and in the recording.
        kept: what the function changes in place, such as running means.
        generators: that the function draws from, besides torch's own.
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
        """The function, of these."""
        if self._graph is None:
            self._graph = self._record(inputs)
        for place, given in zip(self._inputs, inputs, strict=True):
            assert place.shape == given.shape
            place.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._outputs

    def _record(self, examples: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        device = examples[0].device
        self._inputs = [example.detach().clone() for example in examples]
        before = [tensor.detach().clone() for tensor in self._kept]
        drawn = torch.cuda.get_rng_state(device), [generator.get_state() for generator in self._generators]
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                self._function(*self._inputs)
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        # Threads that read data ahead may go on asking for pinned memory.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._outputs = self._function(*self._inputs)
        torch.cuda.set_rng_state(drawn[0], device)
        for generator, state in zip(self._generators, drawn[1], strict=True):
            generator.set_state(state)
        with torch.no_grad():
            for tensor, kept in zip(self._kept, before, strict=True):
                tensor.copy_(kept)
        return graph
