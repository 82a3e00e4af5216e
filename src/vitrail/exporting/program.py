"""A graph as torch.export saves it, and compiled ahead of time by AOTInductor; both are .pt2 files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vitrail.errors import ExportError
from vitrail.exporting.carried import carried
from vitrail.exporting.graphs import Graph, traced
from vitrail.exporting.runtimes import Run, first_line, quiet


def write_program(graph: Graph, path: Path) -> None:
    """For `torch.export.load`, in Python with torch alone; what the model carries is among its extra files."""
    program = traced(graph)
    # Saved with where it was traced from, a program would tell strangers of this machine's folders.
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    with quiet():
        torch.export.save(program, path, extra_files=dict(carried(graph.model)))


def open_program(path: Path) -> Run:
    """As anyone would load it."""
    try:
        with quiet():
            module = torch.export.load(path).module()
    except Exception as error:  # whatever reading it back raises
        raise ExportError(f"torch.export cannot load the export: {first_line(error)}") from error
    return _guarded(module)


def write_package(graph: Graph, path: Path) -> None:
    """For `torch._inductor.aoti_load_package`, or C++ without Python; made for processors like this machine's."""
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ExportError(
            "compiling ahead of time needs a C++ compiler, and none was found: install g++, or name one in the "
            "environment variable CXX"
        ) from None
    program = traced(graph)
    try:
        with quiet():
            options = {"aot_inductor.metadata": carried(graph.model)}
            aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
    except Exception as error:  # the compiler's own
        raise ExportError(f"this model cannot be compiled ahead of time: {first_line(error)}") from error


def open_package(path: Path) -> Run:
    """As anyone would load it."""
    from torch._inductor import aoti_load_package

    try:
        with quiet():
            package = aoti_load_package(str(path))
    except Exception as error:
        raise ExportError(f"the compiled package cannot be loaded: {first_line(error)}") from error
    return _guarded(package)


def _guarded(module: object) -> Run:
    @torch.inference_mode()
    def run(inputs: Tensor) -> Tensor:
        try:
            outputs: Tensor = module(inputs)  # type: ignore[operator]
        except Exception as error:
            raise ExportError(f"the export does not run: {first_line(error)}") from error
        return outputs

    return run
