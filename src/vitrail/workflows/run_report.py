"""The report that is made of every finished run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from vitrail.data.open import Data
from vitrail.errors import VitrailError
from vitrail.inspection.image_choice import choose_photographs
from vitrail.inspection.images import MOST
from vitrail.inspection.inspect import REPORT, choose_run_images, inspect_loaded
from vitrail.model.cost import compute_cost
from vitrail.system.device import choose_device
from vitrail.system.events import OnEvent, ignore_event
from vitrail.training.result import TrainingResult

CPU_OPERATIONS = 2e12
"""Operations that a CPU may spend on one pass over the images: about ten seconds."""
LEAST = 8
"""Images that are measured on even where they take longer."""
STOPPED = "stopped"
"""The problem of a report that a KeyboardInterrupt ended."""


def write_run_report(
    result: TrainingResult, *, source: Data | None = None, on_event: OnEvent = ignore_event
) -> TrainingResult:
    """Write the report of a finished run into its folder, and return the result with the report's path.

    An error never spoils the run: it is told as an event.

    Args:
        result: The run. Without `run.report`, and on all ranks but the first, there is no report.
        source: The images of the run, if no name opens them.
        on_event: Called with what happens.

    Events:
        report: folder, path, problem: the report's file, or None and why none could be made.
        progress: the passes over images.
    """
    if not result.config.run.report or os.environ.get("RANK", "0") != "0":
        return result
    values = {"folder": str(result.folder), "path": None, "problem": ""}
    try:
        result = replace(result, report=_inspect_run(result, source, on_event))
        values["path"] = str(result.report)
    except KeyboardInterrupt:
        values["problem"] = STOPPED
    except Exception as error:  # the trained model must not be lost for a report
        is_known = isinstance(error, VitrailError | OSError)
        values["problem"] = str(error) if is_known else f"{type(error).__name__}: {error}"
    on_event("report", values)
    return result


def _inspect_run(result: TrainingResult, source: Data | None, on_event: OnEvent) -> Path:
    device = choose_device(result.config.run.device)
    affordable = MOST if device.type == "cuda" else int(CPU_OPERATIONS / compute_cost(result.model.architecture).flops)
    choice = choose_run_images(result.config, source) or choose_photographs()
    path, most = result.folder / REPORT, min(max(affordable, LEAST), MOST)
    try:
        model = result.model.to(device)
        return inspect_loaded([str(result.folder)], [model], choice, path, most, on_event).report
    finally:
        result.model.cpu()
