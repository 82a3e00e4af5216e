"""The report that is made of every finished run."""

from __future__ import annotations

import os
from collections.abc import Iterator

from vitrail.errors import VitrailError
from vitrail.inspection.inspect import MOST, REPORT, inspect_loaded, make_run_picker, pick_default_images
from vitrail.model.cost import compute_cost
from vitrail.system.device import choose_device
from vitrail.training.config import RunConfig
from vitrail.training.result import TrainingResult
from vitrail.weights.load import load

CPU_OPERATIONS = 2e12
"""Operations that a CPU may spend on one pass over the images: about ten seconds."""
LEAST = 8
"""Images that are measured on even where they take longer."""


def write_run_report(config: RunConfig, result: TrainingResult) -> Iterator[str]:
    """Write the report of a finished run into its folder and yield a line that says where it is.

    An error never spoils the run: it becomes a line that names the command to try again.
    """
    if not config.run.report or os.environ.get("RANK", "0") != "0":
        return
    command = f"vitrail inspect {result.folder}"
    try:
        device = choose_device(config.run.device)
        model = load(result.model, device=device)
        affordable = MOST if device.type == "cuda" else int(CPU_OPERATIONS / compute_cost(model.architecture).flops)
        pick = make_run_picker(config) or pick_default_images
        path, most = result.folder / REPORT, min(max(affordable, LEAST), MOST)
        yield f"report: {inspect_loaded([str(result.folder)], [model], pick, path, most).report}"
    except KeyboardInterrupt:
        yield f"report: stopped; {command} makes it"
    except Exception as error:  # the trained model must not be lost for a report
        reason = str(error) if isinstance(error, VitrailError | OSError) else f"{type(error).__name__}: {error}"
        yield f"report: none could be made ({reason}); {command} tries again"
