"""Write a graph as a torch.export program or as an AOTInductor package; both are .pt2 files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vitrail.errors import ExportError
from vitrail.exporting.graphs import ExportGraph, collect_metadata, trace_graph
from vitrail.exporting.runtimes import ExportRunner, first_line, silence_exporters


def write_program(graph: ExportGraph, path: Path) -> None:
    """Write a program for `torch.export.load`, which needs torch alone; the metadata is in its extra files."""
    program = trace_graph(graph)
    # Saved with where it was traced from, a program would tell strangers of this machine's folders.
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    with silence_exporters():
        torch.export.save(program, path, extra_files=dict(collect_metadata(graph.model)))


def open_program(path: Path) -> ExportRunner:
    """Load the file as a user would, and return it as a function."""
    try:
        with silence_exporters():
            module = torch.export.load(path).module()
    except Exception as error:  # whatever reading it back raises
        raise ExportError(f"torch.export cannot load the export: {first_line(error)}") from error
    return _wrap_errors(module)


def write_package(graph: ExportGraph, path: Path) -> None:
    """Write a package for `torch._inductor.aoti_load_package` or for C++, compiled for processors like this one."""
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
    program = trace_graph(graph)
    try:
        with silence_exporters():
            options = {"aot_inductor.metadata": collect_metadata(graph.model)}
            aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
    except Exception as error:  # the compiler's own
        raise ExportError(f"this model cannot be compiled ahead of time: {first_line(error)}") from error


def open_package(path: Path) -> ExportRunner:
    """Load the file as a user would, and return it as a function."""
    from torch._inductor import aoti_load_package

    try:
        with silence_exporters():
            package = aoti_load_package(str(path))
    except Exception as error:
        raise ExportError(f"the compiled package cannot be loaded: {first_line(error)}") from error
    return _wrap_errors(package)


def _wrap_errors(module: object) -> ExportRunner:
    @torch.inference_mode()
    def run(inputs: Tensor) -> Tensor:
        try:
            outputs: Tensor = module(inputs)  # type: ignore[operator]
        except Exception as error:
            raise ExportError(f"the export does not run: {first_line(error)}") from error
        return outputs

    return run
